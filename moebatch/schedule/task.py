"""Tasks: pieces of work on one lane, named so that others can wait for them.

A *step* is one layer of one walk through the model, counted on from pass to pass: step i is layer
i mod L. So a task is the same thing to the lane that runs it and to the tasks that wait for it.
"""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_NAME = re.compile(r"([a-z ]+)\((\d+)((?:, (?:k|e|p|part) ?\d+)*)\)")
_PART = re.compile(r", (k|e|part|p) ?(\d+)")


class Kind(enum.StrEnum):
    """What a task does. k is a micro-batch, e an expert, p a page of a layer's weights."""

    ATTEND = "attend"
    """Attention of k where it is computed, projections and residual included."""
    PRE = "pre"
    """Norm and projections of k, whose attention the CPU computes (CGOPipe)."""
    OFF = "off"
    """Queries, keys and values of k on their way down."""
    ATTN = "attn"
    """Attention of k on the CPU, its new keys and values appended to the cache."""
    LOAD = "load"
    """What the CPU's attention has made of k on its way up."""
    OUT = "out"
    """Output projection and residual of k, after `LOAD`."""
    POST = "post"
    """All that follows attention for k: output projection if it is still to be done, gate, experts,
    combining. Needs all weights of the layer."""
    GATE = "gate"
    """Norm of k, and its tokens choose their experts."""
    EXPERT = "expert"
    """e over the tokens of k that chose it, or over those of the whole pass; several of them where
    a processor computes such together."""
    COMBINE = "combine"
    """Adds up what the experts made of the pass."""
    DENSE = "dense"
    """The MLP of a layer without experts, over the whole pass."""
    CHUNK = "chunk"
    """A part of e on its way to where it is computed."""
    FETCH = "fetch"
    """A part of e on its way from disk to main memory, to go further up later."""
    STAGE = "stage"
    """p copied into pinned buffers."""
    PAGE = "page"
    """p on its way up, out of pinned buffers."""
    BLOCK = "block"
    """All weights of a layer that are not where they are computed, in one piece."""
    LAYER_UP = "layer up"
    """Weights of a layer outside its experts on their way to where they are computed."""
    KV_READ = "kv read"
    """Keys and values of k from disk to main memory."""
    KV_UP = "kv up"
    """Keys and values of k to the level that attends."""
    KV_DOWN = "kv down"
    """New keys and values of k to where they live."""
    KV_WRITE = "kv write"
    """New keys and values of k from main memory to disk."""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work. Equal tasks are the same task; what it waits for is no part of its name."""

    kind: Kind
    step: int
    micro_batch: int | None = None
    expert: int | None = None
    page: int | None = None
    part: int | None = None
    """Which chunk of a transfer, where it goes in several."""
    others: tuple[int, ...] = field(default=(), compare=False)
    """Experts that are computed together with `expert`."""
    num_pages: int | None = field(default=None, compare=False, repr=False)
    """Pages that the layer comes in."""
    after: tuple["Task", ...] = field(default=(), compare=False, repr=False)
    """Tasks that must have ended before; each has been launched already, so nothing can wait in a
    circle. Tasks of one lane run in the order of their launch anyway."""

    def __str__(self) -> str:
        experts = (("e", expert) for expert in self.experts)
        names = ("k", self.micro_batch), *experts, ("p", self.page), ("part", self.part)
        parts = "".join(f", {name}{number}" for name, number in names if number is not None)
        return f"{self.kind}({self.step}{parts})"

    @property
    def k(self) -> int:
        """The micro-batch of a task that is of one."""
        assert self.micro_batch is not None, "a task of a micro-batch"
        return self.micro_batch

    @property
    def experts(self) -> tuple[int, ...]:
        """All that it is about."""
        return () if self.expert is None else (self.expert, *self.others)


@dataclass(frozen=True, slots=True)
class _OfMicroBatch:
    """Makes the tasks of a kind: of step i and micro-batch k, after some others."""

    kind: Kind

    def __call__(self, i: int, k: int, *after: Task) -> Task:
        return Task(self.kind, i, k, after=after)


attend, pre, off, attn = map(_OfMicroBatch, (Kind.ATTEND, Kind.PRE, Kind.OFF, Kind.ATTN))
load, out, post, gate = map(_OfMicroBatch, (Kind.LOAD, Kind.OUT, Kind.POST, Kind.GATE))


def expert(i: int, e: int, k: int | None = None) -> Task:
    """Expert e over tokens of k, or of all micro-batches."""
    return Task(Kind.EXPERT, i, k, e)


def experts(i: int, group: Sequence[int]) -> Task:
    """Some experts together, each over its tokens of all micro-batches."""
    first, *others = group
    return Task(Kind.EXPERT, i, expert=first, others=tuple(others))


def combine(i: int, *after: Task) -> Task:
    """Outputs of experts are added up."""
    return Task(Kind.COMBINE, i, after=after)


def dense(i: int, *after: Task) -> Task:
    """The MLP of a layer without experts."""
    return Task(Kind.DENSE, i, after=after)


def stage(i: int, p: int, *after: Task, num_pages: int | None = None) -> Task:
    """Page p of the weights of step i is copied into pinned memory."""
    return Task(Kind.STAGE, i, page=p, num_pages=num_pages, after=after)


def page(i: int, p: int, *after: Task, num_pages: int | None = None) -> Task:
    """Page p of the weights of step i goes up."""
    return Task(Kind.PAGE, i, page=p, num_pages=num_pages, after=after)


def block(i: int, *after: Task) -> Task:
    """All weights of step i go up."""
    return Task(Kind.BLOCK, i, after=after)


def reason_kind(waited_for: str) -> str:
    """The kind of what was waited for: what stands before the parenthesis, or all of it."""
    return waited_for.partition("(")[0]


def task_named(name: str) -> Task | None:
    """The task whose `str` is `name`, such as ``chunk(12, e5, part2)``; None if that is none, such
    as "launch"."""
    match = _NAME.fullmatch(name)
    if not match or match[1] not in set(Kind):
        return None
    found = [(sign, int(number)) for sign, number in _PART.findall(match[3])]
    parts, experts = dict(found), [number for sign, number in found if sign == "e"]
    return Task(
        Kind(match[1]),
        int(match[2]),
        micro_batch=parts.get("k"),
        expert=experts[0] if experts else None,
        others=tuple(experts[1:]),
        page=parts.get("p"),
        part=parts.get("part"),
    )
