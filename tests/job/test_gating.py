"""Adaptive gating, from a calibration to answers: opt-in, part of a job's identity, refused where
answers have to be exact."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from moebatch.calibration import gate_lessons
from moebatch.calibration.calibrate import Calibration
from moebatch.calibration.gate_lessons import trade_off
from moebatch.calibration.order import CalibrationOrder
from moebatch.checkpoint.model_files import open_model
from moebatch.engine.approximation_files import GATING, load_gating, save_gating
from moebatch.errors import CheckpointError, ConfigError, DoesNotFit, InputError
from moebatch.job.check import check_job
from moebatch.job.options import CheckOptions
from moebatch.job.run import JobRun
from moebatch.model.routing.gating import GatingPoint, LearntGating
from moebatch.report.calibration import calibration_view
from moebatch.spec.job import load_job
from moebatch.training.whole_model import WholeModel
from tests.command import moebatch
from tests.job.test_run import EMULATED, on_gpu, policy, run, shown, texts, write
from tests.tiny import CACHED_APART, edit_config, write_checkpoint

Checkpoint = Callable[..., Path]
CURVE = tuple(
    GatingPoint(threshold=threshold, perplexity=5 + threshold, single_share=0.3, mean_experts=1.7)
    for threshold in (0.0, 0.02)
)
LEARNT = LearntGating(
    sensitivities={0: 1.0, 1: 0.25, 2: 2.0}, curve=CURVE, wanted_loss=0.01, threshold=0.02
)
TEXT = "".join(
    f"The {noun} counts {n} of the rows.\n" for n in range(40) for noun in ("sea", "fox")
)


def leave(model: Path, learnt: LearntGating = LEARNT) -> None:
    """As if a calibration had learnt that."""
    path = GATING.path(model)
    path.parent.mkdir(exist_ok=True)
    save_gating(path, learnt, open_model(model, "auto").owner)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With something learnt about its gating."""
    folder = write_checkpoint(tmp_path_factory.mktemp("gating") / "model", "mixtral")
    leave(folder)
    return folder


def gated(path: Path, **experts: object) -> Path:
    job = json.loads(path.read_text())
    path.write_text(json.dumps({**job, "experts": {"gating": "adaptive", **experts}}))
    return path


def as_openai(path: Path) -> Path:
    job = json.loads(path.read_text())
    path.write_text(json.dumps({**job, "output": {"path": "out.jsonl", "format": "openai"}}))
    return path


def texts_and_fingerprint(path: Path) -> tuple[list[str], str]:
    lines = path.with_name("out.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in lines]
    (name,) = {body["system_fingerprint"] for body in bodies}
    return [body["choices"][0]["text"] for body in bodies], name


def test_a_threshold_of_zero_changes_no_answer(tmp_path: Path, model: Path) -> None:
    path = as_openai(write(tmp_path, model))
    run(path, policy=policy())
    exact, name = texts_and_fingerprint(path)
    summary, _ = run(gated(path, threshold=0), policy=policy())
    again, another = texts_and_fingerprint(path)
    assert again == exact and another.startswith(f"{name}-adaptive-")
    assert summary.gating is not None and summary.gating.single_share == 0
    assert summary.gating.mean_experts == 2
    run(gated(path, threshold=1e-9), policy=policy())
    assert texts_and_fingerprint(path)[1] != another


@pytest.mark.few(family=("mixtral", "deepseek_v3"))
@pytest.mark.parametrize("family", CACHED_APART)
def test_answers_are_those_of_the_plain_driver_on_every_device(tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path / "model", family)
    leave(model)
    path = gated(write(tmp_path, model), threshold=0.1)
    summary, told = run(path, policy=policy(), is_plain=True)
    answers, gating = texts(path), summary.gating
    assert gating is not None and 0.05 < gating.single_share < 0.95
    assert gating.mean_experts == pytest.approx(2 - gating.single_share)
    assert any("gating is adaptive, threshold 0.1: answers are not exactly" in t for t in told)
    assert f"adaptive, threshold 0.1: a single expert in {gating.single_share:.1%}" in shown(
        summary
    )
    for resources, asked in (({}, policy()), ({}, policy(cache="lru")), (EMULATED, on_gpu())):
        gated(write(tmp_path, model, **resources), threshold=0.1)
        summary, _ = run(path, policy=asked)
        assert texts(path) == answers
        assert summary.gating == gating, "the same decisions"
    run(write(tmp_path, model), policy=policy())
    assert texts(path) != answers, "something was left out"


def test_another_threshold_is_another_job(tmp_path: Path, model: Path) -> None:
    path = gated(write(tmp_path, model))
    run(path)
    gated(write(tmp_path, model), threshold=0.03)
    with pytest.raises(ConfigError, match=r"experts.threshold was '0.02', is '0.03'"):
        JobRun(load_job(path), lambda line: None).execute()
    assert any("experts.threshold" in fault.message for fault in check_job(path).faults)
    write(tmp_path, model)
    with pytest.raises(ConfigError, match=r"experts.gating was 'adaptive', is null"):
        JobRun(load_job(path), lambda line: None).execute()


def test_what_was_learnt_anew_is_another_job(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "mixtral")
    leave(model)
    path = gated(write(tmp_path, model))
    run(path)
    leave(model, replace(LEARNT, sensitivities={0: 1.0, 1: 0.25, 2: 2.5}))
    with pytest.raises(ConfigError, match=r"experts.sensitivities was"):
        JobRun(load_job(path), lambda line: None).execute()


def test_exact_answers_may_be_insisted_on(tmp_path: Path, model: Path) -> None:
    path = gated(write(tmp_path, model))
    with pytest.raises(ConfigError, match=r"--exact: forbids experts.gating: adaptive"):
        run(path, is_exact=True)
    assert not path.with_name("out.jsonl.moebatch").exists()
    (fault,) = check_job(path, CheckOptions(is_exact=True)).faults
    assert "forbids experts.gating" in fault.message
    assert not check_job(path).faults
    assert not check_job(write(tmp_path, model), CheckOptions(is_exact=True)).faults


def test_what_was_not_learnt_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "mixtral")
    path = gated(write(tmp_path, model))
    with pytest.raises(CheckpointError, match=r"moebatch calibrate .* --gating adaptive"):
        run(path)
    leave(model)
    edit_config(model, rms_norm_eps=1e-4)
    with pytest.raises(CheckpointError, match="was made for another model"):
        run(path)
    assert any("was made for another model" in fault.message for fault in check_job(path).faults)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"sensitivities": {0: 1.0, 1: float("nan"), 2: 2.0}},
            "holds numbers that are negative, infinite or NaN",
        ),
        ({"curve": ()}, r"array 'curve\.\w+' is float64 \[0\], must be float64 \[1\]"),
        ({"threshold": "much"}, "its description is damaged"),
        ({"wanted_loss": -1.0}, "its description is damaged"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, model: Path, changes: dict[str, object], reason: str
) -> None:
    owner, path = open_model(model, "auto").owner, tmp_path / "gating"
    save_gating(path, LEARNT, owner)
    assert load_gating(path, owner) == LEARNT
    save_gating(path, replace(LEARNT, **changes), owner)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=reason):
        load_gating(path, owner)


def test_what_was_learnt_of_other_weights_in_the_same_shapes_is_refused(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    first, second = (open_model(tiny_checkpoint("mixtral", seed=n), "auto") for n in range(2))
    path = tmp_path / "gating"
    save_gating(path, LEARNT, first.owner)
    assert load_gating(path, first.owner) == LEARNT
    with pytest.raises(CheckpointError, match="for another model, or for another state of this"):
        load_gating(path, second.owner)


def test_a_threshold_without_adaptive_gating_is_refused(tmp_path: Path, model: Path) -> None:
    for experts, message in (
        ({"gating": "exact", "threshold": 0.1}, "experts.threshold: means nothing while gating is"),
        ({"threshold": -1}, "must be auto or a number of at least 0, got -1"),
        ({"gating": "some"}, "must be one of exact, adaptive, pre-gated, got 'some'"),
    ):
        path = gated(write(tmp_path, model), **experts)
        with pytest.raises(ConfigError, match=message):
            load_job(path)


def order(model: Path, text: Path, **changes: object) -> CalibrationOrder:
    usual: dict[str, object] = {"model": model, "text": text, "gating": "adaptive"}
    return CalibrationOrder(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.few(family=("mixtral", "deepseek_v3"))
@pytest.mark.parametrize("family", CACHED_APART)
def test_a_calibration_finds_a_threshold_that_jobs_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr("moebatch.calibration.calibrate.SEQUENCE_TOKENS", 60)
    model, text = write_checkpoint(tmp_path / "model", family), tmp_path / "text.txt"
    text.write_text(TEXT)
    summary = Calibration(order(model, text), lambda line: None).execute()
    assert summary.gating is not None
    learnt = summary.gating.learnt
    assert load_gating(GATING.path(model), open_model(model, "auto").owner) == learnt
    assert tuple(learnt.sensitivities) == open_model(model, "auto").shape.moe_layers
    assert min(learnt.sensitivities.values()) > 0
    first, last = learnt.curve[0], learnt.curve[-1]
    assert (first.threshold, first.single_share, first.mean_experts) == (0, 0, 2)
    assert last.single_share > 0.99 and last.mean_experts < 1.01
    shares = [point.single_share for point in learnt.curve]
    assert shares == sorted(shares)
    assert learnt.loss(learnt.chosen) <= 0.01
    run_summary, _ = run(gated(write(tmp_path, model)))
    assert run_summary.gating is not None
    assert f"threshold {learnt.threshold:.4g}" in run_summary.gating.how


def test_prompts_are_tried_by_what_the_model_answers(tmp_path: Path) -> None:
    model, rows = write_checkpoint(tmp_path / "model", "olmoe"), tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": {[5 + n, 9, 11 + n % 4]}}}\n' for n in range(30)))
    summary = Calibration(order(model, rows, loss=5.0), lambda line: None).execute()
    assert summary.gating is not None and summary.gating.num_expected > 30
    screen = StringIO()
    Console(file=screen, width=160).print(calibration_view(summary))
    for words in ("gating.safetensors", "the model's own answers to prompts", "sensitivity"):
        assert words in screen.getvalue()
    assert re.search(r"threshold  \S+ for 5.00% of perplexity: a single expert", screen.getvalue())


def test_gradients_that_are_no_numbers_are_no_sensitivities(
    tmp_path: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, sums = tmp_path / "text.txt", {0: 1.0, 1: float("nan"), 2: 1.0}
    text.write_text(TEXT * 5)
    monkeypatch.setattr(WholeModel, "fisher_sums", lambda *_: sums)
    asked = order(tiny_checkpoint("mixtral"), text, output=tmp_path / "table")
    with pytest.raises(CheckpointError, match="gradients of this model are no numbers"):
        Calibration(asked, lambda line: None).execute()
    assert not GATING.beside(tmp_path / "table").exists()


def test_a_model_that_does_not_fit_whole_is_refused_before_it_is_loaded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 5)
    monkeypatch.setattr(gate_lessons, "load_whole", None)
    monkeypatch.setattr("moebatch.calibration.reading_policy.build_engine", None)
    with pytest.raises(DoesNotFit, match=r"--gating learns .* in memory: .* \(weights "):
        Calibration(order(model, text, dram="256MiB"), lambda line: None).execute()


def test_what_gates_cannot_learn_from_is_refused(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Too short.")
    output = tmp_path / "table"
    with pytest.raises(InputError, match="too few to hold a tenth out"):
        asked = order(tiny_checkpoint("mixtral"), text, output=output)
        Calibration(asked, lambda line: None).execute()
    single = tiny_checkpoint("mixtral", num_experts_per_tok=1)
    with pytest.raises(ConfigError, match="this model has one"):
        Calibration(order(single, text, output=output), lambda line: None).execute()
    done = moebatch("calibrate", single, "--text", text, "--gating", "fewer")
    assert done.returncode == 2 and "--gating: must be one of adaptive, got 'fewer'" in done.stderr


@pytest.mark.parametrize(
    ("perplexity", "share"),
    [
        (lambda share: 4.0 + share / 10, 0.4),
        (lambda share: 4.0 + share * 1e-3, 1.0),
        (lambda share: 4.0 + (share > 0), 0.0),
        (lambda share: 5.0 if 0.3 < share < 0.6 else 4.0, 0.3),
    ],
    ids=["in between", "all", "none", "what is good again later does not count"],
)
def test_the_largest_threshold_before_too_much_is_lost(
    perplexity: Callable[[float], float], share: float
) -> None:
    def measure(asked: float) -> GatingPoint:
        return GatingPoint(
            threshold=asked**2,
            perplexity=perplexity(asked),
            single_share=asked,
            mean_experts=2 - asked,
        )

    curve, chosen = trade_off(measure, wanted_loss=0.01)
    assert chosen.single_share == pytest.approx(share, abs=0.005) and chosen in curve
    assert chosen.perplexity <= 1.01 * 4.0
    assert [point.threshold for point in curve] == sorted({point.threshold for point in curve})
