"""Pre-gates from calibration to a run: learnt, kept, asked for, and told of."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moebatch.calibration import gate_lessons
from moebatch.calibration.calibrate import Calibration
from moebatch.calibration.order import CalibrationOrder
from moebatch.checkpoint.model_files import open_model
from moebatch.engine.approximation import Approximation
from moebatch.engine.approximation_files import PREGATES, load_pregates, save_pregates
from moebatch.errors import CheckpointError, ConfigError, DoesNotFit, InputError
from moebatch.job.identity import manifest_of
from moebatch.job.opened import load_approximation
from moebatch.job.question import job_question
from moebatch.job.run import JobRun
from moebatch.plan.methods import answer_question
from moebatch.plan.options import PlanOptions
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.job import Job, load_job
from moebatch.training.learning_gates import LearningGates, Recipe, learn
from moebatch.training.reading import Reading
from moebatch.training.whole_model import WholeModel, gate_matrix, load_whole
from tests.calibration.test_calibrate import TEXT, owner_of
from tests.model.oracle import greedy, load
from tests.model.pregated import moe_layers_of, random_pregates, router_of, with_pregates
from tests.tiny import write_checkpoint

Checkpoint = Callable[..., Path]


def readings(count: int, length: int = 24, vocab: int = 320) -> list[Reading]:
    """Sequences in which each token is followed by the next one."""
    return [
        Reading(tuple((start + i) % vocab for i in range(length - start % 5)))
        for start in range(count)
    ]


def whole(folder: Path) -> WholeModel:
    return load_whole(open_model(folder, "auto"), dtype=torch.float32, experts="grouped_mm")


def job_file(folder: Path, model: Path, gating: str = "pre-gated") -> Path:
    rows = [
        {
            "custom_id": str(i),
            "prompt": f"The river counts {i} of",
            "max_tokens": 6,
            "temperature": 0,
        }
        for i in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "model": {"path": str(model), "dtype": "float32"},
        "input": {"path": "rows.jsonl"},
        "output": {"path": f"{gating}.jsonl", "format": "plain"},
        "sampling": {"temperature": 0},
        "experts": {"gating": gating},
        "resources": {"dram": "4GiB", "hardware": "generic-cpu"},
    }
    path = folder / f"{gating}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder of its own with pre-gates unlike its gates."""
    folder = write_checkpoint(tmp_path / "model", "mixtral", num_hidden_layers=4)
    (folder / "moebatch").mkdir()
    save_pregates(PREGATES.path(folder), random_pregates(load(folder), 2), owner_of(folder))
    return folder


@pytest.mark.parametrize(
    ("family", "level"), [("qwen3_moe", 0), ("qwen3_moe", 2), ("deepseek_v3", 1), ("gpt_oss", 1)]
)
def test_gates_that_learn_choose_as_they_do_in_the_decoder(
    tiny_checkpoint: Checkpoint, family: str, level: int
) -> None:
    """Before they learn they are the checkpoint's, moved; nothing else of the model changes."""
    folder = tiny_checkpoint(family, num_hidden_layers=4)
    model, tokens = whole(folder), torch.tensor([readings(1)[0].tokens])
    exact = model.logits(tokens)
    gates = LearningGates(model, level)
    moved, expected = model.logits(tokens), exact
    if level:
        expected = with_pregates(load(folder), gates.pregates())(tokens).logits
        assert not torch.allclose(moved, exact, atol=0.1), "moved gates choose otherwise"
    assert torch.allclose(moved, expected, atol=1e-3)
    learn(model, gates, readings(20), Recipe(num_steps=1, batch_tokens=50))
    gates.close()
    assert torch.equal(model.logits(tokens), exact)


def test_gates_learn_what_is_wanted_of_them(tiny_checkpoint: Checkpoint) -> None:
    model = whole(tiny_checkpoint("olmoe", num_hidden_layers=4))
    gates, texts = LearningGates(model, 1), readings(30)
    before = model.perplexity(texts)
    told: list[float] = []
    recipe = Recipe(num_steps=20, batch_tokens=200, rate=3e-3)
    num_tokens = learn(model, gates, texts, recipe, told.append)
    assert model.perplexity(texts) < before
    assert num_tokens >= 20 * 200 and told[-1] == 1.0
    short, tail = Reading((1, 2, 3, 4, 5), 1), Reading((1, 2, 3, 4, 5), 4)
    assert model.perplexity([short]) != pytest.approx(model.perplexity([tail]))


@pytest.mark.few(family=("deepseek_v3",))
@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_moe", "deepseek_v3", "qwen3_next", "granitemoehybrid", "nemotron_h"),
        *("kimi_linear", "minimax", "bailing_hybrid", "laguna", "cohere2_moe", "hy_v4"),
        *("jamba", "axk2"),
    ],
)
def test_calibration_teaches_and_keeps_pregates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(gate_lessons, "USUAL", Recipe(num_steps=3, batch_tokens=200))
    layers: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": None}
    if family == "granitemoehybrid":
        layers["layer_types"] = ["mamba", "mamba", "attention", "mamba"]
    elif family in ("kimi_linear", "bailing_hybrid"):
        layers["layer_types"] = ["linear_attention", "full_attention"] * 2
    elif family in ("laguna", "cohere2_moe"):
        layers = {}
    elif family == "jamba":
        layers = {"num_hidden_layers": 4, "expert_layer_period": 1}
    elif family == "nemotron_h":
        mixers = ("linear_attention", "full_attention") * 2
        layers = {"layers_block_type": ["mamba", *chain(*((each, "moe") for each in mixers))]}
    folder = write_checkpoint(tmp_path / "model", family, **layers)
    rows = [{"messages": [{"role": "user", "content": f"Count {i}"}]} for i in range(30)]
    for i, row in enumerate(rows):
        row["messages"].append({"role": "assistant", "content": f"{i} and {i + 1}"})
    text = tmp_path / "rows.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = CalibrationOrder(model=folder, text=text, pregate=True, level=2)
    summary = Calibration(order, lambda line: None).execute()
    lesson = summary.pregates
    assert lesson is not None and lesson.file == PREGATES.path(folder)
    assert len(set(lesson.perplexity.values())) == 4, "all four are measured apart"
    answered = sum(len(f"{i} and {i + 1}") for i in range(27, 30))
    assert 0 < lesson.num_expected <= answered + 3 * 8, "of answers, not of prompts"
    found = load_pregates(lesson.file, owner_of(folder), hidden_size=32)
    assert found.activation_level == 2
    model = load(folder)
    own = [gate_matrix(router_of(model, layer)) for layer in moe_layers_of(model)]
    for gate_ED, before_ED in zip(found.gates_ED, own, strict=True):
        assert 0 < (gate_ED - before_ED).abs().max() < 0.1


def test_what_cannot_learn_is_refused_before_anything_is_read(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    order = CalibrationOrder(
        model=tiny_checkpoint("mixtral"), text=tmp_path / "none.txt", pregate=True
    )
    with pytest.raises(DoesNotFit, match=r"needs [^$]*, there are 400 MiB; raise --dram"):
        Calibration(replace(order, dram="400MiB"), lambda line: None).execute()
    with pytest.raises(ConfigError, match="--level: must be less than 3, the layers that have"):
        Calibration(replace(order, level=3), lambda line: None).execute()
    corrected = replace(order, model=tiny_checkpoint("lfm2_moe"))
    with pytest.raises(CheckpointError, match="gates of this model are corrected from outside"):
        Calibration(corrected, lambda line: None).execute()
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:100])
    with pytest.raises(InputError, match="too few to hold a tenth out"):
        order = replace(order, text=short, output=tmp_path / "table")
        Calibration(order, lambda line: None).execute()


def test_a_job_with_pregates_answers_as_transformers_does_and_says_so(
    tmp_path: Path, model: Path
) -> None:
    told: list[str] = []
    exact, job = (load_job(job_file(tmp_path, model, how)) for how in ("exact", "pre-gated"))
    run = JobRun(job, told.append)
    summary = run.execute()
    JobRun(exact, lambda line: None).execute()
    oracle = load(model)
    with_pregates(oracle, load_pregates(PREGATES.path(model), owner_of(model), hidden_size=32))
    tokenizer = load_tokenizer(model, vocab_size=320)
    for i, row in enumerate(answers(job.output.path)):
        tokens, _ = greedy(oracle, tokenizer.encode(f"The river counts {i} of"), 6)
        assert row["response"]["text"] == tokenizer.decode(tokens)
    assert answers(job.output.path) != answers(exact.output.path)
    assert any("gating is pre-gated, activation level 2" in line for line in told)
    assert summary.gating is not None and summary.policy is not None
    assert summary.policy.schedule == "pregated"
    options = PlanOptions(has_job=True)
    assert answer_question(job_question(job, options), options, None).policy.schedule == "pregated"


def test_other_pregates_are_another_job(tmp_path: Path, model: Path) -> None:
    exact, job = (load_job(job_file(tmp_path, model, how)) for how in ("exact", "pre-gated"))
    before = identity(job)
    assert before != identity(exact)
    save_pregates(PREGATES.path(model), random_pregates(load(model), 2, seed=1), owner_of(model))
    assert identity(job) != before


def identity(job: Job) -> Mapping[str, str]:
    return manifest_of(job, open_model(job.model.path, "float32"), approximation(job)).fields


def approximation(job: Job) -> Approximation:
    return load_approximation(job, open_model(job.model.path, "float32"))


def test_pregates_that_are_missing_stale_or_damaged_are_refused(
    tmp_path: Path, model: Path
) -> None:
    job = load_job(job_file(tmp_path, model))
    path = PREGATES.path(model)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(CheckpointError, match=r"run `moebatch calibrate .* --pregate`"):
        approximation(job)
    other = replace(owner_of(model), fingerprint="another")
    save_pregates(path, random_pregates(load(model), 1), other)
    with pytest.raises(CheckpointError, match="was made for another model, or for another state"):
        approximation(job)
    path.unlink()
    with pytest.raises(CheckpointError, match="no such file; run"):
        approximation(job)
    with pytest.raises(CheckpointError, match="no such file; run"):
        job_question(job, PlanOptions(has_job=True))
