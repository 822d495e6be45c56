"""What `moebatch calibrate` learns that changes answers, kept beside the model: adaptive gating and
pre-gates.

Shape letters: L MoE layers, N points of the curve, E experts, D hidden.
"""

import math
from pathlib import Path

import numpy as np
import torch

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.model.routing.gating import GatingPoint, LearntGating
from moebatch.model.routing.pregates import PreGates
from moebatch.predict.array_file import Arrays, Description, FileKind, Sizes, is_whole, length_of

GATING = FileKind(
    title="adaptive gating",
    file="gating",
    version=1,
    remedy="run `moebatch calibrate {folder} --text FILE --gating adaptive`",
    holds_amounts=True,
)
PREGATES = FileKind(
    title="file of pre-gates",
    file="pre-gates",
    version=1,
    remedy="run `moebatch calibrate {folder} --text FILE --pregate`",
)
_OF_CURVE = ("threshold", "perplexity", "single_share", "mean_experts")


def save_gating(path: Path, learnt: LearntGating, owner: ModelOwner) -> None:
    """Writes it, whole or not at all. Raises StorageError."""
    columns = {"sensitivities": [learnt.sensitivities[layer] for layer in owner.moe_layers]}
    for name in _OF_CURVE:
        columns[f"curve.{name}"] = [getattr(point, name) for point in learnt.curve]
    arrays = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    wanted, threshold = learnt.wanted_loss, learnt.threshold
    GATING.save(path, owner, arrays, wanted_loss=wanted, threshold=threshold)


def load_gating(path: Path, owner: ModelOwner) -> LearntGating:
    """What was learnt of that model. Raises CheckpointError where it is missing, damaged or of
    another model."""

    def sizes_of(found: Description, arrays: Arrays) -> Sizes | None:
        if not all(_is_amount(found.get(name)) for name in ("wanted_loss", "threshold")):
            return None
        length = max(1, length_of(arrays, "curve.threshold"))
        sizes = {f"curve.{name}": ((length,), "float64") for name in _OF_CURVE}
        return sizes | {"sensitivities": ((len(owner.moe_layers),), "float64")}

    arrays, description = GATING.load(path, owner, sizes_of)
    columns = (arrays[f"curve.{name}"].tolist() for name in _OF_CURVE)
    points = (dict(zip(_OF_CURVE, row, strict=True)) for row in zip(*columns, strict=True))
    return LearntGating(
        sensitivities=dict(zip(owner.moe_layers, arrays["sensitivities"].tolist(), strict=True)),
        curve=tuple(GatingPoint(**point) for point in points),
        wanted_loss=description["wanted_loss"],
        threshold=description["threshold"],
    )


def save_pregates(path: Path, pregates: PreGates, owner: ModelOwner, **further: object) -> None:
    """Writes the gates in float32, [L, E, D], and what else is known of them; nothing else of the
    model. Raises StorageError."""
    gates_LED = torch.stack([gate.float() for gate in pregates.gates_ED])
    level = pregates.activation_level
    PREGATES.save(path, owner, {"gates": gates_LED.numpy()}, activation_level=level, **further)


def load_pregates(path: Path, owner: ModelOwner, *, hidden_size: int) -> PreGates:
    """Pre-gates of that model. Raises CheckpointError where they are missing, damaged, of another
    model or stale."""
    num_layers = len(owner.moe_layers)

    def sizes_of(found: Description, arrays: Arrays) -> Sizes | None:
        level = found.get("activation_level", 0)
        if not is_whole(level) or not 0 < level < num_layers:
            return None
        return {"gates": ((num_layers, owner.num_experts, hidden_size), "float32")}

    arrays, description = PREGATES.load(path, owner, sizes_of)
    return PreGates(
        activation_level=description["activation_level"],
        moe_layers=owner.moe_layers,
        gates_ED=list(torch.from_numpy(arrays["gates"])),
    )


def _is_amount(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0
