"""The rows that are answered, and what the passes over them had to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebatch.demo.rows import demo_rows
from moebatch.engine.model_files import ModelFiles
from moebatch.plan.load import PassLoad
from moebatch.rows.prepare import Preparation, prepare
from moebatch.rows.row import ReadyRow
from moebatch.rows.source import open_source
from moebatch.spec.job import Job
from moebatch.spec.request import Request

SEED = 7


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Requests in batches that are answered one after the other."""

    preparation: Preparation
    batches: tuple[tuple[Request, ...], ...]

    @property
    def longest(self) -> int:
        """Most tokens that a sequence may come to."""
        return max(
            len(request.prompt_tokens) + request.sampling.max_tokens
            for batch in self.batches
            for request in batch
        )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a run."""

    decoding: int
    prompt_tokens: int
    seconds: float

    @classmethod
    def of(cls, loads: Sequence[PassLoad], seconds: float) -> "Pass":
        """A pass whose micro-batches had these loads."""
        return cls(
            decoding=round(sum(load.decode_sequences for load in loads)),
            prompt_tokens=round(sum(load.prompt_tokens for load in loads)),
            seconds=seconds,
        )


def read_rows(job: Job, files: ModelFiles, *, batch_size: int, count: int) -> Rows:
    """So many rows of a job's input, in batches."""
    shape = files.shape
    preparation = prepare(job, vocab_size=shape.vocab_size, max_positions=shape.max_positions)
    found = (row for row in preparation.reader.requests(open_source(job.input.path)))
    ready = [row.request for row in found if isinstance(row, ReadyRow)][:count]
    batches = (ready[first : first + batch_size] for first in range(0, len(ready), batch_size))
    return Rows(preparation=preparation, batches=tuple(map(tuple, batches)))


def write_demo_rows(path: Path, count: int) -> None:
    """Questions that neither the built-in model nor its predictors have learnt from."""
    path.write_text("".join(f"{row}\n" for row in demo_rows(SEED, count)))


def prefills(passes: Sequence[Pass]) -> Iterator[Pass]:
    """Passes of prompts alone."""
    return (one for one in passes if one.prompt_tokens and not one.decoding)


def decodes(passes: Sequence[Pass], batch_size: int) -> Iterator[Pass]:
    """Passes in which all of a batch decode."""
    return (one for one in passes if one.decoding == batch_size and not one.prompt_tokens)
