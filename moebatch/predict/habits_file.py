"""A model's habits, kept beside it.

Shape letters: L MoE layers, B batches, E experts of a layer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.layout.habits import Habits
from moebatch.predict.array_file import whole_numbers
from moebatch.predict.owner import Arrays, Kind
from moebatch.spec.policy import CACHE_RULES, PREDICTORS

HABITS = Kind(
    title="file of habits",
    file="habits",
    version=2,
    remedy="moebatch calibrate {folder} --text FILE",
)


def save_habits(path: Path, habits: Habits, owner: ModelOwner) -> None:
    """Writes them, whole or not at all. Raises StorageError."""
    arrays = {"chosen": habits.chosen_BL.astype(np.float32)}
    arrays |= {f"missing.{rule}": f.astype(np.float32) for rule, f in habits.missing.items()}
    arrays["missing.known"] = habits.missing_known.astype(np.float32)
    for name, of_L in habits.accuracy.items():
        arrays[f"accuracy.{name}"] = np.array(of_L, np.float32)
    HABITS.save(path, owner, arrays, batches=list(habits.batches))


def load_habits(path: Path, owner: ModelOwner) -> Habits:
    """Those at `path`. Raises CheckpointError where they are missing, damaged or of another
    model."""
    arrays, description = HABITS.load(path, owner)
    batches = description.get("batches")
    reason = _reason(arrays, batches, owner)
    if reason:
        raise HABITS.refusal(path, owner, reason)
    assert isinstance(batches, list), "checked above"
    figures = {name: array.astype(np.float64) for name, array in arrays.items()}
    accuracy = {name: figures.get(f"accuracy.{name}") for name in PREDICTORS}
    return Habits(
        batches=tuple(batches),
        chosen_BL=figures["chosen"],
        missing={rule: figures[f"missing.{rule}"] for rule in CACHE_RULES},
        missing_known=figures["missing.known"],
        accuracy={name: tuple(of_L) for name, of_L in accuracy.items() if of_L is not None},
    )


def _reason(arrays: Arrays, batches: Any, owner: ModelOwner) -> str | None:
    if not whole_numbers(batches) or not batches or sorted({0, *batches}) != [0, *batches]:
        return "its description is damaged"
    sizes = len(batches), len(owner.moe_layers), owner.num_experts + 1
    expected = {"chosen": sizes[:2], "accuracy.none": sizes[1:2]}
    expected |= {f"missing.{rule}": sizes for rule in (*CACHE_RULES, "known")}
    expected |= dict.fromkeys(_accuracies(arrays), sizes[1:2])
    if {name: array.shape for name, array in arrays.items()} != expected:
        return "its figures are not those of the model's layers"
    if not all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays.values()):
        return "its figures are damaged"
    return None


def _accuracies(arrays: Arrays) -> Iterator[str]:
    names = (f"accuracy.{name}" for name in PREDICTORS)
    return (name for name in names if name in arrays)
