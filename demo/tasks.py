"""The tasks of the built-in model: drawing them, solving them, and which are kept from training.

One question in sixteen is held out. The split goes by a hash of the question itself, not of its
phrasing, so the model has never seen a held-out question in other words either.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Final

from demo.kind import Kind
from demo.number_kinds import NUMBER_KINDS
from demo.text_kinds import TEXT_KINDS
from moebatch.errors import MoebatchError
from moebatch.quoting import shown

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (*NUMBER_KINDS, *TEXT_KINDS)}
HELD_OUT_ONE_IN: Final = 16


class UnknownTask(MoebatchError):
    """A prompt that is of no kind of task of this module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A prompt of a kind of task, and the one answer that counts as right."""

    kind: str
    prompt: str
    answer: str


def is_held_out(prompt: str) -> bool:
    """Whether training never sees the question of this prompt, in any phrasing."""
    kind, subject = _recognise(prompt)
    return _is_held_out(kind, subject)


def draw_task(rng: Random, kind: str, *, held_out: bool) -> Task:
    """A random task of one side of the split."""
    chosen = KINDS[kind]
    while True:
        question = chosen.draw(rng)
        if _is_held_out(chosen, question.subject) == held_out:
            prompt = rng.choice(chosen.phrasings).format(question.subject)
            return Task(kind=kind, prompt=prompt, answer=question.answer)


def demo_tasks(seed: int, count: int) -> Iterator[Task]:
    """Held-out tasks without repetition, the kinds mixed but as even in number as can be."""
    rng = Random(seed)
    names = list(islice(cycle(KINDS), count))
    rng.shuffle(names)
    seen: set[str] = set()
    for name in names:
        task = draw_task(rng, name, held_out=True)
        while task.prompt in seen:
            task = draw_task(rng, name, held_out=True)
        seen.add(task.prompt)
        yield task


def solve(prompt: str) -> Task:
    """The task behind a prompt, with its answer worked out from the text alone.

    Raises UnknownTask for a prompt that is no task of this module.
    """
    kind, subject = _recognise(prompt)
    return Task(kind=kind.name, prompt=prompt, answer=kind.solve(subject))


def mark(task_answer: str, model_answer: str) -> bool:
    """Whether an answer is right: exactly, but for white space around it."""
    return task_answer.strip() == model_answer.strip()


def _recognise(prompt: str) -> tuple[Kind, str]:
    for kind in KINDS.values():
        subject = kind.subject_of(prompt)
        if subject is not None:
            return kind, subject
    raise UnknownTask(f"no kind of task has this prompt: {shown(prompt)}")


def _is_held_out(kind: Kind, subject: str) -> bool:
    digest = hashlib.sha256(f"{kind.name}\n{subject}".encode()).digest()
    return int.from_bytes(digest[:8]) % HELD_OUT_ONE_IN == 0
