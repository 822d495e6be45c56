"""How surely a model expects a text, measured by the engine that runs jobs, within their memory."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moebatch.calibration.reading_policy import text_engine, text_job, text_requests
from moebatch.calibration.texts import SEQUENCE_TOKENS, read_sequences
from moebatch.engine.build import build_engine
from moebatch.engine.passes.text_losses import TextLosses
from moebatch.errors import CheckpointError, Fault, InputError
from moebatch.measure.process_limits import detect_machine
from moebatch.model.native import loader
from moebatch.predict.predictor import RoutingObserver


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOrder:
    """A text, and how it is read."""

    path: Path
    """Plain text, or what a job reads its prompts from."""
    num_tokens: int
    """So much of it is read at most."""
    dram_bytes: int | None
    """Most main memory; None is all that is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """What a model makes of a text."""

    value: float
    """exp of the mean loss of a token that has others before it."""
    num_tokens: int
    """Those tokens."""


def measure_perplexity(
    model: Path,
    text: TextOrder,
    log: Callable[[str], None],
    observer: RoutingObserver | None = None,
) -> Perplexity:
    """Reads a text with a model; `observer` learns what its gates choose.

    Raises MoebatchError where text, model or memory are not fit for it.
    """
    opened = text_job(model, text.path, output=text.path, dram_bytes=text.dram_bytes)
    reader = opened.reader
    longest = min(SEQUENCE_TOKENS, opened.files.shape.max_positions - 1)
    sequences = read_sequences(
        text.path, reader, num_tokens=text.num_tokens, sequence_tokens=longest
    )
    if max(map(len, sequences)) < 2:
        raise InputError([Fault(file=str(text.path), message="has no two tokens in a row")])
    spec = text_engine(opened, sequences)
    loader.log_compiling(log)
    torch.set_num_threads(detect_machine().num_cores)
    losses = TextLosses(sequences)
    spec = replace(spec, observer=observer, losses=losses)
    built = build_engine(spec, decoder=reader.tokenizer, end_tokens=frozenset(), job_seed=0)
    with closing(built), torch.inference_mode():
        for outcome in built.engine.run(text_requests(sequences, range(len(sequences)))):
            if outcome.error is not None:
                raise CheckpointError(f"{model}: {outcome.error.message}")
    return Perplexity(value=losses.perplexity, num_tokens=losses.num_tokens)
