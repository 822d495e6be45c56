"""Levels of memory from the disk up to the one that computes, and the lanes between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moebatch.schedule.kv_route import Place
from moebatch.schedule.registry import traits_of
from moebatch.spec.hardware import LEVELS, Hardware, LevelName, LinkName
from moebatch.spec.policy import Policy

NUM_READERS = 2
"""Reads of a disk in flight: one more hides the time between two of them."""
_PROCESSORS = {"vram": "gpu", "dram": "cpu"}
"""Names of the lanes that compute, by their level."""


class Lane(NamedTuple):
    """What does one thing at a time, or as many as it is wide."""

    name: str
    at: LevelName | LinkName
    """The level that computes, or the link over which bytes go."""
    width: int = 1
    """Things that are done side by side. The rate of a link is that of all of them together."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The levels of a machine: experts are read at the bottom and computed at the top."""

    levels: tuple[LevelName, ...]
    """From the lowest one up; ``dram`` is always among them."""
    stages: bool = False
    """Whether weights are copied into pinned buffers before they go up to ``vram``. They are where
    a GPU is emulated; to a real one they go out of memory that is pinned as a whole."""

    def __post_init__(self) -> None:
        order = tuple(level for level in reversed(LEVELS) if level in self.levels)
        assert self.levels == order, f"levels come from the lowest one up: {self.levels}"
        assert "dram" in self.levels, "every machine has main memory"

    @classmethod
    def of(cls, hardware: Hardware, *, stages: bool = False) -> "Ladder":
        """The levels of a machine."""
        found = tuple(level for level in reversed(LEVELS) if level in hardware.levels)
        return cls(found, stages=stages)

    @property
    def top(self) -> Place:
        """The highest level: everything is computed there that a policy puts nowhere else."""
        return "vram" if "vram" in self.levels else "dram"

    def below(self, level: LevelName) -> LevelName | None:
        """The next lower level, from which a level is filled; None at the bottom."""
        place = self.levels.index(level)
        return self.levels[place - 1] if place else None

    def link_up(self, level: LevelName) -> LinkName | None:
        """The link over which a level is filled from below; None at the bottom."""
        links: dict[LevelName, LinkName] = {"dram": "disk->dram", "vram": "dram->vram"}
        return None if self.below(level) is None else links[level]

    def experts_at(self, policy: Policy) -> Place:
        """The level that computes experts."""
        return self.top if policy.ffn_on_gpu else "dram"

    def copies_through_buffers(self, policy: Policy) -> bool:
        """Whether weights are copied into pinned buffers on their way up."""
        return self.stages or policy.staging

    def attends_at(self, policy: Policy) -> Place:
        """The level that computes the attention of sequences that decode."""
        return self.top if policy.attention_on_gpu else "dram"


def lanes_of(ladder: Ladder, policy: Policy) -> tuple[Lane, ...]:
    """The lanes of a machine under a policy, processors first, then links from the top down.

    A lane that is listed may have nothing to do; one that is not listed is never used.
    """
    return (
        *_processors(ladder, policy),
        *(_gpu_links(ladder, policy) if ladder.top == "vram" else ()),
        *(_disk_links(policy) if "disk" in ladder.levels else ()),
    )


def _processors(ladder: Ladder, policy: Policy) -> Iterator[Lane]:
    computing = {ladder.top, ladder.experts_at(policy), ladder.attends_at(policy)}
    for level in reversed(ladder.levels):
        if level in computing:
            yield Lane(_PROCESSORS[level], level)


def _gpu_links(ladder: Ladder, policy: Policy) -> Iterator[Lane]:
    yield Lane("dram->vram", "dram->vram")
    yield Lane("vram->dram", "vram->dram")
    if traits_of(policy).moves == "block":
        yield Lane("weight block", "dram->vram")
    elif traits_of(policy).moves == "pages" and ladder.copies_through_buffers(policy):
        yield Lane("staging", "dram->vram")


def _disk_links(policy: Policy) -> Iterator[Lane]:
    yield Lane("disk->dram", "disk->dram", NUM_READERS)
    if policy.kv_cache.disk > 0:
        yield Lane("dram->disk", "dram->disk")
