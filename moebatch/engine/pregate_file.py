"""Pre-gates that have been learnt, kept beside the model they are for.

Shape letters: L layers with experts, E experts, D hidden.
"""

from pathlib import Path

import torch

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.model.pregates import PreGates
from moebatch.predict.array_file import is_whole
from moebatch.predict.owner import Kind

PREGATES = Kind(
    title="file of pre-gates",
    file="pre-gates",
    version=1,
    remedy="moebatch calibrate {folder} --text FILE --pregate",
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
    arrays, description = PREGATES.load(path, owner)
    num_layers, gates = len(owner.moe_layers), arrays.get("gates")
    size = (num_layers, owner.num_experts, hidden_size)
    if gates is None or gates.shape != size or str(gates.dtype) != "float32":
        raise PREGATES.refusal(path, owner, "its gates are not of the model's size")
    level = description.get("activation_level", 0)
    if not is_whole(level) or not 0 < level < num_layers:
        raise PREGATES.refusal(path, owner, "its description is damaged")
    return PreGates(
        activation_level=level,
        moe_layers=owner.moe_layers,
        gates_ED=list(torch.from_numpy(gates)),
    )
