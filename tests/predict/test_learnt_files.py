"""Damaged files of what was learnt: each is refused in one line, whatever stands in it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.engine.approximation_files import (
    load_gating,
    load_pregates,
    save_gating,
    save_pregates,
)
from moebatch.errors import CheckpointError
from moebatch.layout.habits import Habits
from moebatch.model.routing.gating import GatingPoint, LearntGating
from moebatch.model.routing.pregates import PreGates
from moebatch.predict.guesser import LearnedGuesser, Perceptron
from moebatch.predict.learnt_files import (
    FIRST_GATE,
    TOKENS,
    load_first_gate,
    load_habits,
    load_learned,
    load_table,
    load_tokens,
    save_habits,
    save_learned,
    save_table,
)
from moebatch.predict.trace import RoutingTrace
from moebatch.spec.policy.policy import CACHE_RULES
from tests.predict.test_path_table import pencil_table
from tests.predict.test_table_file import OWNER, change

L, E, K, D, V, W = 2, 3, 2, 4, 5, 6
Loader = Callable[[Path], object]


def perceptron(num_inputs: int) -> Perceptron:
    return Perceptron(torch.ones(W, num_inputs), torch.ones(W), torch.ones(E, W), torch.ones(E))


def habits() -> Habits:
    figures = np.ones((2, L, E + 1))
    return Habits(
        batches=(1, 2),
        chosen_BL=np.ones((2, L)),
        missing=dict.fromkeys(CACHE_RULES, figures),
        missing_known=figures,
        accuracy={"none": (0.5,) * L},
    )


def gating() -> LearntGating:
    point = GatingPoint(threshold=0.0, perplexity=5.0, single_share=0.3, mean_experts=1.7)
    return LearntGating(
        sensitivities={0: 1.0, 1: 0.25}, curve=(point,), wanted_loss=0.01, threshold=0.0
    )


def save_trace(path: Path, owner: ModelOwner) -> None:
    RoutingTrace.of([np.zeros((L, 3, K), np.int64)], (0, 1), num_experts=E).save(path)


KINDS: Mapping[str, tuple[Callable[[Path, ModelOwner], None], Loader]] = {
    "table": (
        lambda path, owner: save_table(path, pencil_table(), owner),
        lambda path: load_table(path, OWNER),
    ),
    "habits": (
        lambda path, owner: save_habits(path, habits(), owner),
        lambda path: load_habits(path, OWNER),
    ),
    "tokens": (
        lambda path, owner: TOKENS.save(path, owner, {"shares": np.ones((L, V, E), np.float16)}),
        lambda path: load_tokens(path, OWNER, vocab_size=V),
    ),
    "learned": (
        lambda path, owner: save_learned(
            path, LearnedGuesser([perceptron(D)] * L, [perceptron(2 * D)], K), owner
        ),
        lambda path: load_learned(path, OWNER, hidden_size=D),
    ),
    "first gate": (
        lambda path, owner: FIRST_GATE.save(path, owner, {"gate": np.ones((E, D), np.float16)}),
        lambda path: load_first_gate(path, OWNER, hidden_size=D),
    ),
    "gating": (
        lambda path, owner: save_gating(path, gating(), owner),
        lambda path: load_gating(path, OWNER),
    ),
    "pre-gates": (
        lambda path, owner: save_pregates(
            path,
            PreGates(activation_level=1, moe_layers=(0, 1), gates_ED=[torch.ones(E, D)] * L),
            owner,
        ),
        lambda path: load_pregates(path, OWNER, hidden_size=D),
    ),
    "trace": (save_trace, RoutingTrace.load),
}


def rewrite(path: Path, of_each: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The same file with other arrays."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    arrays = {name: of_each(array) for name, array in load_file(path).items()}
    save_file(arrays, path, metadata=header["__metadata__"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "of_each",
    [
        lambda array: array.to(torch.bfloat16),
        lambda array: array.float().to(torch.float8_e4m3fn),
        lambda array: array.flatten()[0].clone(),
        lambda array: array[..., None],
        lambda array: array[:0],
    ],
    ids=["bfloat16", "float8", "a number", "a dimension more", "nothing"],
)
def test_arrays_of_another_kind_are_refused(
    tmp_path: Path, kind: str, of_each: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    save, load = KINDS[kind]
    path = tmp_path / "file.safetensors"
    save(path, OWNER)
    load(path)
    rewrite(path, of_each)
    with pytest.raises(
        CheckpointError, match=r"file\.safetensors: .*`moebatch calibrate "
    ) as caught:
        load(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "description"),
    [
        ("table", {"path_length": 0}),
        ("table", {"num_tokens": -1}),
        ("habits", {"batches": [2, 1]}),
        ("habits", {"batches": [1, 1]}),
        ("habits", {"batches": []}),
        ("habits", {"batches": [0, 1]}),
        ("learned", {"stride": 0}),
        ("learned", {"stride": True}),
        ("gating", {"threshold": -0.1}),
        ("gating", {"wanted_loss": None}),
        ("pre-gates", {"activation_level": L}),
        ("trace", {"num_experts": -1}),
        ("trace", {"moe_layers": 2}),
    ],
)
def test_a_description_that_cannot_be_is_refused(
    tmp_path: Path, kind: str, description: dict[str, Any]
) -> None:
    save, load = KINDS[kind]
    path = tmp_path / "file.safetensors"
    save(path, OWNER)
    change(path, **description)
    with pytest.raises(CheckpointError, match="its description is damaged"):
        load(path)


def test_layers_beyond_the_last_are_not_foreseen(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    ahead, beginning = [perceptron(D)] * L, [perceptron(2 * D)] * (L + 1)
    save_learned(path, LearnedGuesser(ahead, beginning, K), OWNER)
    with pytest.raises(CheckpointError, match="its description is damaged"):
        load_learned(path, OWNER, hidden_size=D)


@pytest.mark.parametrize("kind", ["habits", "tokens"])
@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_habits_and_shares_are_amounts(tmp_path: Path, kind: str, wrong: float) -> None:
    save, load = KINDS[kind]
    path = tmp_path / "file.safetensors"
    save(path, OWNER)
    rewrite(path, lambda array: array.fill_(wrong))
    with pytest.raises(CheckpointError, match="holds numbers that are negative, infinite or NaN"):
        load(path)
