"""A text model that lies beside one that sees, as Qwen3.5 and Qwen3-VL are published, is read
alone."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebatch.spec.request import Request
from tests.engine.test_engine import NEW_TOKENS, policy, requests, run, tokens_of
from tests.model.oracle import greedy_answers, load
from tests.tiny import write_checkpoint


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe"])
def test_answers_are_those_of_the_whole_model(tmp_path: Path, family: str) -> None:
    """What belongs to images, and what guesses further tokens ahead, may be anything."""
    folder = write_checkpoint(tmp_path / "model", family)
    rows = requests((1, 17, 40, 96))
    expected = answers(folder, rows)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    kinds = {name.split(".")[1] for name in tensors if name.startswith("model.")}
    assert kinds == {"language_model", "visual"}
    last = "model.language_model.layers.2."
    behind = {name.replace(last, "mtp.layers.0."): name for name in tensors if last in name}
    broken = {
        **{name: tensors[name] for name in tensors if ".visual." in name},
        **{name: tensors[source] for name, source in behind.items()},
        "mtp.fc.weight": torch.ones(32, 64),
    }
    tensors |= {name: torch.full_like(tensor, torch.nan) for name, tensor in broken.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    for resident in (0.0, 1.0):
        chosen = policy(num_slots=9, resident=resident)
        assert tokens_of(run(folder, chosen, rows)) == expected


def test_the_length_that_yarn_begins_at_may_stand_beside_its_parameters(tmp_path: Path) -> None:
    """Among what is said of the text model."""
    folder = write_checkpoint(tmp_path / "model", "qwen3_vl_moe")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    scaling = text.pop("rope_parameters") | {"rope_type": "yarn", "factor": 4.0}
    text |= {"rope_scaling": scaling, "original_max_position_embeddings": 24}
    path.write_text(json.dumps(config))
    rows = requests((1, 17, 40, 96))
    assert tokens_of(run(folder, policy(num_slots=9), rows)) == answers(folder, rows)


def test_experts_of_qwen3_vl_may_lie_by_columns(tmp_path: Path) -> None:
    """As released: [E, D, 2F] and [E, F, D]."""
    folder = write_checkpoint(tmp_path / "model", "qwen3_vl_moe")
    rows = requests((1, 17, 40, 96))
    path, expected = folder / "model.safetensors", answers(folder, rows)
    tensors = load_file(path)
    stacks = {name: each.mT.contiguous() for name, each in tensors.items() if ".experts." in name}
    save_file(tensors | stacks, path, metadata={"format": "pt"})
    assert answers(folder, rows) == expected
    for resident in (0.0, 1.0):
        chosen = policy(num_slots=9, resident=resident)
        assert tokens_of(run(folder, chosen, rows)) == expected


def answers(folder: Path, rows: Sequence[Request]) -> list[tuple[int, ...]]:
    """What transformers' whole model says."""
    model = load(folder)
    return greedy_answers(model, rows, NEW_TOKENS)
