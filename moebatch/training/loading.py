"""Weights of a model folder all in memory at once, where there is room for that."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.quoting import reason
from moebatch.training.whole_model import WholeModel

ExpertsWay = Literal["eager", "grouped_mm"]
"""How transformers computes experts. One by one (eager) is the only way in which choices that are
left out are passed over; all in one product (grouped_mm) is about three times as fast with
gradients (16 experts, 4 of which are chosen, 1,024 tokens, float32)."""


def load_whole(files: ModelFiles, *, dtype: torch.dtype, experts: ExpertsWay) -> WholeModel:
    """The model with all of its weights. Raises CheckpointError.

    Args:
        dtype: that of the model where its loss is asked about as it runs; float32 where something
            learns, whose steps are too small for other numbers.
        experts: how those are computed, which depends on what is to be done with the model.
    """
    from transformers import AutoModelForCausalLM

    folder = files.checkpoint.folder
    try:
        with _no_bars():
            module = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                experts_implementation=experts,
            )
    except Exception as error:  # Damaged files make its libraries raise anything.
        raise CheckpointError(f"{folder}: transformers cannot load it: {reason(error)}") from error
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # some are still the mapped files themselves
    return WholeModel(module, files.shape)


@contextmanager
def _no_bars() -> Iterator[None]:
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()
