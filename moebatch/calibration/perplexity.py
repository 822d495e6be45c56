"""How surely a model expects a text, measured by the engine that runs jobs, within their memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moebatch.calibration.reading_policy import (
    read_through,
    reading_engine,
    text_engine,
    text_job,
)
from moebatch.calibration.texts import SEQUENCE_TOKENS, read_sequences
from moebatch.engine.passes.text_losses import TextLosses
from moebatch.errors import InputError
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
    sequences = read_sequences(
        text.path, opened.reader, num_tokens=text.num_tokens, sequence_tokens=SEQUENCE_TOKENS
    )
    if max(map(len, sequences)) < 2:
        raise InputError.at(text.path, "has no two tokens in a row")
    losses = TextLosses(sequences)
    spec = replace(text_engine(opened, sequences), observer=observer, losses=losses)
    with reading_engine(spec, opened, log) as engine:
        read_through(engine, sequences, range(len(sequences)), folder=model)
    return Perplexity(value=losses.perplexity, num_tokens=losses.num_tokens)
