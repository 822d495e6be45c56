"""What eight bits instead of four are worth, expert by expert."""

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.calibration.perplexity import TextOrder, measure_perplexity
from moebatch.checkpoint.fingerprint import file_digest
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation_files import GATING, load_gating
from moebatch.errors import CheckpointError, ConfigError, Fault
from moebatch.packing.contents import Contents
from moebatch.packing.expert_encoder import Error, ExpertEncoder
from moebatch.predict.learnt_files import TABLE, load_table
from moebatch.predict.predictor import Chosen, PassTokens, RoutingObserver
from moebatch.schedule.slots.expert_load import ExpertKey

_UNSEEN = 0.5
"""Choices that count for an expert which no token has chosen: the text may have missed it."""


def measure_gains(
    contents: Contents, text: TextOrder | None, log: Callable[[str], None]
) -> dict[ExpertKey, float]:
    """Popularity times sensitivity times squared relative error in four bits, of every expert.

    Popularity is counted in `text`, or comes from the calibration beside the model. Raises
    ConfigError where there is neither.
    """
    files = contents.files
    popular = _popularity(files, text, log)
    sensitive = _sensitivities(files)
    gains = {}
    with ExpertEncoder(contents) as encoder:
        for key in contents.experts:
            error = Error()
            for _ in encoder.encoded(key, contents.encoding_of(key), error):
                pass
            chosen = popular[key.layer]
            share = (chosen[key.expert] + _UNSEEN) / (chosen.sum() + _UNSEEN * len(chosen))
            gains[key] = float(share) * sensitive[key.layer] * error.relative**2
    return gains


def popularity_source(files: ModelFiles, text: TextOrder | None) -> str:
    """Stands for what popularity is taken from."""
    path = TABLE.path(files.checkpoint.folder) if text is None else text.path
    num_tokens = 0 if text is None else text.num_tokens
    return f"{file_digest(path)} {num_tokens} {file_digest(GATING.path(files.checkpoint.folder))}"


def _popularity(
    files: ModelFiles, text: TextOrder | None, log: Callable[[str], None]
) -> Mapping[int, Ints]:
    """How often each expert is chosen, by layer."""
    if text is not None:
        counter = _Counter(files)
        measure_perplexity(files.checkpoint.folder, text, log, counter)
        return counter.counts
    try:
        table = load_table(TABLE.path(files.checkpoint.folder), files.owner)
    except CheckpointError as error:
        message = f"needs to know which experts matter: give --text FILE, or calibrate; {error}"
        fault = Fault(file="moebatch pack", where="--bits", message=message)
        raise ConfigError([fault]) from None
    counts = table.counts[0][:, 0].astype(np.int64)
    return dict(zip(files.shape.moe_layers, counts, strict=True))


def _sensitivities(files: ModelFiles) -> Mapping[int, float]:
    """Fisher sums by layer, from a calibration of adaptive gating; alike where there is none."""
    path = GATING.path(files.checkpoint.folder)
    if path.exists():
        return load_gating(path, files.owner).sensitivities
    return dict.fromkeys(files.shape.moe_layers, 1.0)


class _Counter(RoutingObserver):
    """Counts what gates choose."""

    def __init__(self, files: ModelFiles) -> None:
        shape = files.shape
        self.counts = {layer: np.zeros(shape.num_experts, np.int64) for layer in shape.moe_layers}

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        """Every pass counts."""

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: Tensor | None = None
    ) -> None:
        counts = self.counts[layer]
        counts += np.bincount(experts_RK.ravel(), minlength=len(counts))
