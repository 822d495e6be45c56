"""What has been learnt of a model's routing, kept beside it.

Shape letters: L MoE layers, B batches, D hidden, E experts, V vocabulary, W width.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.layout.habits import Habits
from moebatch.predict.array_file import (
    Arrays,
    Description,
    FileKind,
    Sizes,
    is_whole,
    length_of,
    whole_numbers,
)
from moebatch.predict.guesser import LearnedGuesser, Perceptron, TokenGuesser
from moebatch.predict.path_table import PathTable
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import CACHE_RULES, PREDICTORS

_REMEDY = "run `moebatch calibrate {folder} --text FILE`"
_PREDICTOR = "run `moebatch calibrate {folder} --text FILE --predictor "
TABLE = FileKind(title="correlation table", file="correlation", version=1, remedy=_REMEDY)
HABITS = FileKind(
    title="file of habits", file="habits", version=2, remedy=_REMEDY, holds_amounts=True
)
TOKENS = FileKind(
    title="token table",
    file="tokens",
    version=1,
    remedy=_PREDICTOR + "token`",
    holds_amounts=True,
)
LEARNED = FileKind(
    title="learned predictor", file="learned", version=2, remedy=_PREDICTOR + "learned`"
)
FIRST_GATE = FileKind(
    title="first gate", file="first-gate", version=1, remedy=_PREDICTOR + "next-gate`"
)


# --- correlation table --------------------------------------------------------------------------


def empty_table(model: ModelOwner | ModelShape, path_length: int) -> PathTable:
    """A table without counts. Raises ConfigError if it would be too large."""
    return PathTable.empty(
        model.moe_layers,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        path_length=path_length,
    )


def save_table(path: Path, table: PathTable, owner: ModelOwner) -> None:
    """Writes the table, whole or not at all. Raises StorageError."""
    arrays = {f"paths.{length}": counts for length, counts in enumerate(table.counts)}
    length, tokens = table.path_length, table.num_tokens
    TABLE.save(path, owner, arrays, path_length=length, num_tokens=tokens)


def load_table(path: Path, owner: ModelOwner) -> PathTable:
    """The table at `path`, if it is one of that model.

    Raises CheckpointError where it is missing, damaged or of another model.
    """
    layers, experts = len(owner.moe_layers), owner.num_experts

    def sizes_of(found: Description, arrays: Arrays) -> Sizes | None:
        if found.get("path_length") != len(arrays) - 1 or not is_whole(found.get("num_tokens")):
            return None
        return {f"paths.{n}": ((layers, experts**n, experts), "uint32") for n in range(len(arrays))}

    arrays, description = TABLE.load(path, owner, sizes_of)
    return PathTable(
        moe_layers=owner.moe_layers,
        num_experts=experts,
        experts_per_token=owner.experts_per_token,
        counts=tuple(arrays[f"paths.{n}"] for n in range(len(arrays))),
        num_tokens=description["num_tokens"],
    )


# --- habits -------------------------------------------------------------------------------------


def save_habits(path: Path, habits: Habits, owner: ModelOwner) -> None:
    """Writes them, whole or not at all. Raises StorageError."""
    arrays = {"chosen": habits.chosen_BL, "missing.known": habits.missing_known}
    arrays |= {f"missing.{rule}": figures for rule, figures in habits.missing.items()}
    arrays |= {f"accuracy.{name}": np.array(of_L) for name, of_L in habits.accuracy.items()}
    as_float32 = {name: array.astype(np.float32) for name, array in arrays.items()}
    HABITS.save(path, owner, as_float32, batches=list(habits.batches))


def load_habits(path: Path, owner: ModelOwner) -> Habits:
    """Those at `path`. Raises CheckpointError where they are missing, damaged or of another
    model."""

    def sizes_of(found: Description, arrays: Arrays) -> Sizes | None:
        batches = found.get("batches")
        if not whole_numbers(batches) or not batches or sorted({0, *batches}) != [0, *batches]:
            return None
        sizes = len(batches), len(owner.moe_layers), owner.num_experts + 1
        expected = {"chosen": sizes[:2], "accuracy.none": sizes[1:2]}
        expected |= {f"missing.{rule}": sizes for rule in (*CACHE_RULES, "known")}
        known = (name for name in PREDICTORS if f"accuracy.{name}" in arrays)
        expected |= {f"accuracy.{name}": sizes[1:2] for name in known}
        return {name: (size, "float32") for name, size in expected.items()}

    arrays, description = HABITS.load(path, owner, sizes_of)
    figures = {name: array.astype(np.float64) for name, array in arrays.items()}
    accuracy = {name: figures.get(f"accuracy.{name}") for name in PREDICTORS}
    return Habits(
        batches=tuple(description["batches"]),
        chosen_BL=figures["chosen"],
        missing={rule: figures[f"missing.{rule}"] for rule in CACHE_RULES},
        missing_known=figures["missing.known"],
        accuracy={name: tuple(of_L) for name, of_L in accuracy.items() if of_L is not None},
    )


# --- predictors ---------------------------------------------------------------------------------


def load_tokens(path: Path, owner: ModelOwner, *, vocab_size: int) -> TokenGuesser:
    """A token table of that model. Raises CheckpointError."""
    size = (len(owner.moe_layers), vocab_size, owner.num_experts)
    arrays, _ = TOKENS.load(path, owner, lambda found, arrays: {"shares": (size, "float16")})
    return TokenGuesser(arrays["shares"])


def save_learned(path: Path, guesser: LearnedGuesser, owner: ModelOwner) -> None:
    """Writes the perceptrons of all layers. Raises StorageError."""
    arrays = {
        f"{kind}.{position}.{name}": tensor.to(torch.float16).numpy()
        for kind, perceptrons in (("ahead", guesser.ahead), ("beginning", guesser.beginning))
        for position, perceptron in enumerate(perceptrons)
        for name, tensor in zip(Perceptron._fields, perceptron, strict=True)
    }
    LEARNED.save(path, owner, arrays, stride=guesser.stride)


def load_learned(path: Path, owner: ModelOwner, *, hidden_size: int) -> LearnedGuesser:
    """Perceptrons of that model, in float32. Raises CheckpointError."""
    num_layers, num_experts = len(owner.moe_layers), owner.num_experts

    def sizes_of(found: Description, arrays: Arrays) -> Sizes | None:
        stride = found.get("stride")
        if not isinstance(stride, int) or not is_whole(stride) or not 1 <= stride <= num_layers:
            return None
        inputs = {f"ahead.{position}": hidden_size for position in range(num_layers)}
        inputs |= {f"beginning.{position}": 2 * hidden_size for position in range(stride)}
        sizes = {}
        for place, input_size in inputs.items():
            width = length_of(arrays, f"{place}.bias_W")
            shapes = (width, input_size), (width,), (num_experts, width), (num_experts,)
            for name, shape in zip(Perceptron._fields, shapes, strict=True):
                sizes[f"{place}.{name}"] = (shape, "float16")
        return sizes

    arrays, description = LEARNED.load(path, owner, sizes_of)

    def perceptrons(kind: str, count: int) -> list[Perceptron]:
        names = ([f"{kind}.{p}.{name}" for name in Perceptron._fields] for p in range(count))
        return [Perceptron(*(torch.from_numpy(arrays[n]).float() for n in of)) for of in names]

    ahead, beginning = (
        perceptrons("ahead", num_layers),
        perceptrons("beginning", description["stride"]),
    )
    return LearnedGuesser(ahead, beginning, owner.experts_per_token)


def load_first_gate(path: Path, owner: ModelOwner, *, hidden_size: int) -> Tensor:
    """That gate of that model, [E, D] in float32. Raises CheckpointError."""
    size = (owner.num_experts, hidden_size)
    arrays, _ = FIRST_GATE.load(path, owner, lambda found, arrays: {"gate": (size, "float16")})
    return torch.from_numpy(arrays["gate"]).float()
