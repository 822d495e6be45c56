"""What adaptive gating has learnt of a model, kept beside it.

Shape letters: L MoE layers, N points of the curve.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.model.gating import GatingPoint, LearntGating
from moebatch.predict.owner import Arrays, Kind

GATING = Kind(
    title="adaptive gating",
    file="gating",
    version=1,
    remedy="moebatch calibrate {folder} --text FILE --gating adaptive",
)
_OF_CURVE = ("threshold", "perplexity", "single_share", "mean_experts")


def save_gating(path: Path, learnt: LearntGating, owner: ModelOwner) -> None:
    """Writes it, whole or not at all. Raises StorageError."""
    sensitivities = [learnt.sensitivities[layer] for layer in owner.moe_layers]
    arrays = {"sensitivities": np.array(sensitivities, dtype=np.float64)}
    for name in _OF_CURVE:
        values = [getattr(point, name) for point in learnt.curve]
        arrays[f"curve.{name}"] = np.array(values, dtype=np.float64)
    wanted, threshold = learnt.wanted_loss, learnt.threshold
    GATING.save(path, owner, arrays, wanted_loss=wanted, threshold=threshold)


def load_gating(path: Path, owner: ModelOwner) -> LearntGating:
    """What was learnt of that model. Raises CheckpointError where it is missing, damaged or of
    another model."""
    arrays, description = GATING.load(path, owner)
    reason = _reason(arrays, description, owner)
    if reason:
        raise GATING.refusal(path, owner, reason)
    columns = (arrays[f"curve.{name}"].tolist() for name in _OF_CURVE)
    points = (dict(zip(_OF_CURVE, row, strict=True)) for row in zip(*columns, strict=True))
    return LearntGating(
        sensitivities=dict(zip(owner.moe_layers, arrays["sensitivities"].tolist(), strict=True)),
        curve=tuple(GatingPoint(**point) for point in points),
        wanted_loss=description["wanted_loss"],
        threshold=description["threshold"],
    )


def _reason(arrays: Arrays, found: dict[str, Any], owner: ModelOwner) -> str | None:
    """Why a file says nothing of use about that model."""
    if not all(_is_amount(found.get(name)) for name in ("wanted_loss", "threshold")):
        return "its description is damaged"
    length = len(arrays.get("curve.threshold", ()))
    sizes = {"sensitivities": (len(owner.moe_layers),)}
    sizes |= {f"curve.{name}": (length,) for name in _OF_CURVE}
    if not length or {name: array.shape for name, array in arrays.items()} != sizes:
        return "its arrays are not those of the model's layers"
    if any(array.dtype != np.float64 for array in arrays.values()):
        return "its numbers are of another type"
    if not all(np.isfinite(array).all() and (array >= 0).all() for array in arrays.values()):
        return "it holds numbers that cannot be"
    return None


def _is_amount(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0
