"""The rows that are answered, and what the passes over them had to do."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from demo.rows import demo_rows
from demo.tasks import KINDS, draw_task
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.layout.load import PassLoad
from moebatch.rows.prompts import open_reader
from moebatch.rows.row import ReadyRow
from moebatch.rows.source import open_source
from moebatch.spec.job import Job
from moebatch.spec.request import Request

_SEED = 7
_SHOTS = 8
_SHORT_ANSWER = 4
Batches = tuple[tuple[Request, ...], ...]
"""Each is answered before the next one begins."""


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


def read_batches(
    job: Job, files: ModelFiles, path: Path, *, batch_size: int, count: int
) -> Batches:
    """The first rows of an input, whole batches of them."""
    shape = files.shape
    reader = open_reader(job, vocab_size=shape.vocab_size, max_positions=shape.max_positions)
    found = reader.requests(open_source(path))
    ready = [row.request for row in found if isinstance(row, ReadyRow)]
    whole = min(count, len(ready)) // batch_size * batch_size
    starts = range(0, whole, batch_size)
    return tuple(tuple(ready[start : start + batch_size]) for start in starts)


def longest(batches: Batches) -> int:
    """Most tokens that a sequence may come to."""
    return max(
        len(request.prompt_tokens) + request.sampling.max_tokens
        for batch in batches
        for request in batch
    )


def questions(count: int) -> Iterator[str]:
    """Short rows that neither the built-in model nor its predictors have learnt from, as lines."""
    return demo_rows(_SEED, count)


def conversations(count: int) -> Iterator[str]:
    """Long rows as lines: questions with their answers, a last one without, for a short answer."""
    rng, kinds = Random(_SEED), tuple(KINDS)
    for number in range(count):
        tasks = [draw_task(rng, rng.choice(kinds), held_out=True) for _ in range(_SHOTS + 1)]
        said = [message for task in tasks for message in turns(task.prompt, task.answer)]
        yield json.dumps(
            {
                "id": str(number),
                "messages": said[:-1],
                "max_tokens": _SHORT_ANSWER,
                "temperature": 0,
            }
        )


def turns(question: str, answer: str) -> list[dict[str, str]]:
    """Both sides of a conversation."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def is_prefill(one: Pass) -> bool:
    """Whether it is a pass of prompts alone."""
    return bool(one.prompt_tokens and not one.decoding)


def is_decode(one: Pass, batch_size: int) -> bool:
    """Whether all of a batch decode, and nothing else is computed."""
    return one.decoding == batch_size and not one.prompt_tokens


def decodes(passes: Sequence[Pass], batch_size: int) -> list[float]:
    """Seconds of passes in which all of a batch decode."""
    return [one.seconds for one in passes if is_decode(one, batch_size)]
