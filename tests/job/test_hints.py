"""Predictors and caches change what comes when, and no answer."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

from moebatch.calibration import calibrate
from moebatch.calibration.calibrate import Calibration
from moebatch.calibration.order import CalibrationOrder
from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError, ConfigError
from moebatch.job.check import check_job
from moebatch.job.hints import Hints
from moebatch.job.question import job_question
from moebatch.job.status_file import read_status
from moebatch.plan.options import PlanOptions
from moebatch.predict.array_file import FileKind
from moebatch.predict.learnt_files import HABITS, LEARNED, TABLE
from moebatch.spec.job import load_job
from moebatch.spec.policy.file import load_policy
from moebatch.spec.policy.policy import Placement, PredictorName
from tests.job.test_gating import TEXT
from tests.job.test_run import EMULATED, on_gpu, policy, run, shown, texts, write
from tests.tiny import write_checkpoint

Checkpoint = Callable[..., Path]
FAMILIES = ("mixtral", "deepseek_v3", "qwen3_next", "longcat_flash")
LEARNT = ("correlation", "token", "next-gate", "learned")


@pytest.fixture(scope="module")
def calibrated_as(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models with everything that can be learnt of them, by family."""
    return cache(lambda family: _calibrated(tmp_path_factory.mktemp("calibrated"), family))


@pytest.fixture
def calibrated(calibrated_as: Callable[[str], Path]) -> Path:
    return calibrated_as("mixtral")


def _calibrated(folder: Path, family: str) -> Path:
    model = write_checkpoint(folder / "model", family)
    (folder / "text.txt").write_text(TEXT)
    order = CalibrationOrder(
        model=model,
        text=folder / "text.txt",
        num_tokens=1200,
        predictor=("all",),
    )
    with pytest.MonkeyPatch.context() as short:
        short.setattr(calibrate, "SEQUENCE_TOKENS", 60)  # so that some are held out
        Calibration(order, lambda line: None).execute()
    return model


@pytest.fixture(scope="module")
def reference(
    calibrated_as: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[str]]:
    """What the plain driver says, by family."""

    @cache
    def said(family: str) -> list[str]:
        path = write(tmp_path_factory.mktemp("plain"), calibrated_as(family))
        run(path, policy=policy(), is_plain=True)
        return texts(path)

    return said


def with_experts(path: Path, **experts: str) -> Path:
    job = yaml.safe_load(path.read_text())
    path.write_text(json.dumps({**job, "experts": experts}))
    return path


@pytest.mark.few
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["none", *LEARNT])
@pytest.mark.parametrize("rule", ["static", "lru", "foreseen"])
def test_answers_are_those_of_the_plain_driver(
    tmp_path: Path,
    calibrated_as: Callable[[str], Path],
    reference: Callable[[str], list[str]],
    family: str,
    name: str,
    rule: str,
) -> None:
    path = with_experts(write(tmp_path, calibrated_as(family)), predictor=name)
    run(path, policy=policy(cache=rule), schedule="promoe")
    assert texts(path) == reference(family)


@pytest.mark.few
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.parametrize("rule", ["lfu", "foreseen"])
def test_on_an_emulated_gpu_too(
    tmp_path: Path,
    calibrated_as: Callable[[str], Path],
    reference: Callable[[str], list[str]],
    family: str,
    name: str,
    rule: str,
) -> None:
    path = with_experts(write(tmp_path, calibrated_as(family), **EMULATED), predictor=name)
    run(path, policy=on_gpu(cache=rule), schedule="promoe")
    assert texts(path) == reference(family)


def test_how_well_experts_were_foreseen_is_said_and_kept(tmp_path: Path, calibrated: Path) -> None:
    path = with_experts(write(tmp_path, calibrated, **EMULATED), predictor="next-gate")
    summary, _ = run(path, policy=on_gpu(cache="lru"), schedule="promoe")
    assert "GoodPred" in shown(summary)
    status = read_status(tmp_path / "out.jsonl.moebatch" / "status-1-of-1.json")
    assert status is not None
    asked = {layer: counts["num_asked"] for layer, counts in status.foresight.items()}
    assert asked == {str(layer): of.num_asked for layer, of in summary.foresight.items()}
    assert all(asked.values())


def test_where_all_experts_stay_there_is_nothing_to_say(tmp_path: Path, calibrated: Path) -> None:
    path = write(tmp_path, calibrated, **EMULATED)
    summary, _ = run(path, policy=on_gpu(weights=Placement(vram=1.0), num_slots=0))
    assert not summary.foresight and "GoodPred" not in shown(summary)


def test_what_is_asked_for_and_not_there_is_refused(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    path = with_experts(write(tmp_path, tiny_checkpoint("mixtral")), predictor="learned")
    with pytest.raises(CheckpointError, match=r"moebatch calibrate .* --predictor learned"):
        run(path, policy=policy())
    assert any("--predictor learned" in fault.message for fault in check_job(path).faults)


def test_a_plan_by_a_policy_whose_predictor_is_not_there_is_refused_as_its_run_is(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    path, given = write(tmp_path, tiny_checkpoint("mixtral")), tmp_path / "policy.yaml"
    given.write_text(policy(predictor="learned").to_yaml())
    with pytest.raises(CheckpointError, match=r"moebatch calibrate .* --predictor learned"):
        run(path, policy=load_policy(str(given)))
    with pytest.raises(CheckpointError, match=r"moebatch calibrate .* --predictor learned"):
        job_question(load_job(path), PlanOptions(has_job=True, policy=str(given)))


def test_a_planned_job_has_the_cache_that_it_asks_for(
    tmp_path: Path, calibrated: Path, reference: Callable[[str], list[str]]
) -> None:
    path = with_experts(write(tmp_path, calibrated), cache="lru")
    _, told = run(path)
    assert any("cache lru" in line for line in told)
    assert texts(path) == reference("mixtral")


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [((1, 2), "are 2, the model has 3"), ((9, 0, 0), "must be at most"), ((6, 6, 6), "sum to 18")],
)
def test_sizes_of_a_cache_that_are_not_those_of_the_policy_are_refused(
    tmp_path: Path, calibrated: Path, sizes: tuple[int, ...], fault: str
) -> None:
    """They would take memory that no plan has counted."""
    with pytest.raises(ConfigError, match=fault):
        run(write(tmp_path, calibrated), policy=policy(cache="lru", cache_sizes=sizes))


def test_habits_of_no_use_are_left_aside_but_not_where_a_cache_is_divided_by_them(
    tmp_path: Path,
) -> None:
    model = write_checkpoint(tmp_path / "model", "mixtral")
    path = HABITS.path(model)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"no habits")
    job = load_job(write(tmp_path, model))
    files = open_model(model, "auto")
    hints = Hints(job, files)
    assert hints.habits is None and "planning without" in hints.warnings[0]
    divided = load_job(with_experts(write(tmp_path, model), cache="dp"))
    with pytest.raises(CheckpointError, match="moebatch calibrate"):
        Hints(divided, files)


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (TABLE, {"none", "token", "next-gate", "learned"}),
        (LEARNED, {"none", "correlation", "token", "next-gate"}),
    ],
)
def test_the_planner_chooses_no_predictor_whose_file_is_of_no_use(
    tmp_path: Path, calibrated: Path, kind: FileKind, known: set[PredictorName]
) -> None:
    model = shutil.copytree(calibrated, tmp_path / "model")
    files, path = open_model(model, "auto"), kind.path(model)
    path.write_bytes(path.read_bytes()[:-40])
    hints = Hints(load_job(write(tmp_path, model)), files)
    assert hints.habits is not None and set(hints.habits.accuracy) == known
    assert any(str(path) in warning and "planning without" in warning for warning in hints.warnings)
    assert all(hints.predictor(name) for name in known - {"none"})
    path.unlink()
    hints = Hints(load_job(write(tmp_path, model)), files)
    assert hints.habits is not None and set(hints.habits.accuracy) == known


def test_a_calibrated_model_has_habits_of_all_predictors_and_its_hottest_stay(
    tmp_path: Path, calibrated: Path
) -> None:
    hints = Hints(load_job(write(tmp_path, calibrated)), open_model(calibrated, "auto"))
    assert hints.habits is not None
    assert set(hints.habits.accuracy) == {"none", *LEARNT}
    hottest = hints.hottest
    assert hottest is not None and all(len(set(order)) == 6 for order in hottest.values())
