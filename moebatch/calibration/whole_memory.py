"""Whether what is learnt from gradients can be: all of a model has to be in memory for that."""

import torch

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import DoesNotFit
from moebatch.layout.footprint import Footprint
from moebatch.store.memory import resident_bytes
from moebatch.training.memory import whole_footprint
from moebatch.units import format_bytes


def require_whole(
    files: ModelFiles,
    *,
    option: str,
    dtype: torch.dtype,
    longest: int,
    learns: bool,
    budget_bytes: int,
) -> None:
    """Raises DoesNotFit, before anything is loaded, where there is too little memory for a model in
    `dtype`, with gradients of sequences of at most `longest` tokens; for gates that learn, if
    `learns`. `option` is what asked for it."""
    footprint = whole_footprint(files, dtype=dtype, longest=longest, learns=learns)
    held = resident_bytes()
    if held + footprint.total_bytes > budget_bytes:
        raise DoesNotFit(_message(option, footprint, held, budget_bytes))


def _message(option: str, footprint: Footprint, held: int, budget_bytes: int) -> str:
    terms = ", ".join(f"{name} {format_bytes(of)}" for name, of in footprint.terms.items())
    return (
        f"dram: {option} learns from gradients, for which all of the model has to be in memory: "
        f"that needs {format_bytes(held + footprint.total_bytes)} ({terms}, the program "
        f"{format_bytes(held)}), there are {format_bytes(budget_bytes)}; raise --dram, leave "
        f"{option} out, or calibrate the same model folder where there is more memory and copy the "
        "file"
    )
