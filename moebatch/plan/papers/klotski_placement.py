"""Where Klotski puts what: its adaptive tensor placement (section 5), for a given batch.

The level that computes holds the weights outside experts, then keys and values, then the experts
of the first layers. Main memory below a GPU holds the experts of the next layers and what is left
of keys and values, in the order that the caller says; the disk holds the rest.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from moebatch.layout.buffers import (
    ACTIVATIONS_TERM,
    KV_WINDOW_TERM,
    PROGRAM_TERM,
    SLOTS_TERM,
)
from moebatch.layout.footprint import Footprint, kv_page_bytes, slot_bytes
from moebatch.plan.problem import Problem
from moebatch.spec.hardware import LevelName
from moebatch.spec.policy import Placement, Policy

CpuPriority = Literal["experts", "kv"]
"""What main memory holds first: the paper's text says experts, its program does the other."""
PREFETCH_EXPERTS = 8
"""Experts for which the level that computes has room on their way."""
RESERVED_BYTES = 2_000_000_000
"""GPU memory that is left for the program and activations; where they need more, they get it."""
_RESERVED_TERMS = (PROGRAM_TERM, ACTIVATIONS_TERM)
_ROUNDING_BYTES = 64

_Kind = Literal["weights", "kv_cache"]


def placed(problem: Problem, policy: Policy, priority: CpuPriority = "experts") -> Policy | None:
    """`policy` with Klotski's shares, experts by whole layers; None if it does not fit.

    If all experts find room where they are computed, there are no slots.
    """
    if _may_hold_all(problem):
        resident = _filled_up(problem, replace(policy, num_slots=0), priority)
        if resident.weights.on(problem.ladder.top) == 1 and _fits(problem, resident):
            return resident
    streaming = _filled_up(problem, policy, priority)
    return streaming if _fits(problem, streaming) else None


def lowest_weights(problem: Problem) -> Placement:
    """All experts as far down as they can be."""
    readable = problem.hardware.disk and "disk->dram" in problem.hardware.links
    return Placement(disk=1.0) if readable else Placement(dram=1.0)


def lowest_cache(problem: Problem) -> Placement:
    """All keys and values as far down as they may be."""
    writable = problem.kv_on_disk and "dram->disk" in problem.hardware.links
    return lowest_weights(problem) if writable else Placement(dram=1.0)


def _filled_up(problem: Problem, policy: Policy, priority: CpuPriority) -> Policy:
    """Moves layers of experts and of the cache up from the lowest level, while there is room."""
    policy = replace(policy, weights=lowest_weights(problem), kv_cache=lowest_cache(problem))
    footprints = problem.footprints(policy)
    stacks = _stacks(problem, policy)
    for kind, level in _order(problem, priority):
        footprint = footprints[level]
        room = problem.capacity_bytes(level) - footprint.total_bytes
        room -= _kept_free(footprint, level) + sum(s.added_bytes(level) for s in stacks.values())
        stacks[kind].move(level, room, freed_bytes=_freed(problem, footprint, kind, level))
    return replace(
        policy, weights=stacks["weights"].placement(), kv_cache=stacks["kv_cache"].placement()
    )


def _freed(problem: Problem, footprint: Footprint, kind: _Kind, level: LevelName) -> int:
    """Bytes that a level needs no more when nothing of a kind is left below it: windows of the
    cache, or slots through which experts pass from disk to a GPU."""
    if kind == "kv_cache":
        return footprint.terms.get(KV_WINDOW_TERM, 0)
    passes = level != problem.ladder.top
    return footprint.terms.get(SLOTS_TERM, 0) if passes else 0


@dataclass(kw_only=True, slots=True)
class _Stack:
    """Things of one kind and size, all on their lowest level at first."""

    lowest: LevelName
    unit_bytes: int
    number: int
    moved: dict[LevelName, int] = field(default_factory=dict)

    def move(self, level: LevelName, room_bytes: int, *, freed_bytes: int) -> None:
        """As many as there is room for; with the last one of them `freed_bytes` more are free."""
        if level == self.lowest:
            return
        left = self.number - sum(self.moved.values())
        all_fit = left * self.unit_bytes <= room_bytes + freed_bytes
        self.moved[level] = left if all_fit else max(0, room_bytes // self.unit_bytes)

    def added_bytes(self, level: LevelName) -> int:
        """Bytes that a level holds more than at first; negative where some have left."""
        if level == self.lowest:
            return -sum(self.moved.values()) * self.unit_bytes
        return self.moved.get(level, 0) * self.unit_bytes

    def placement(self) -> Placement:
        """Shares of the levels."""
        left = self.number - sum(self.moved.values())
        counts = {self.lowest: left, **self.moved}
        return Placement(**{level: count / self.number for level, count in counts.items()})


def _stacks(problem: Problem, policy: Policy) -> dict[_Kind, _Stack]:
    """Whole layers of experts, and of keys and values."""
    shape, dtypes = problem.shape, problem.dtypes
    return {
        "weights": _Stack(
            lowest=_only_level(policy.weights),
            unit_bytes=shape.num_experts * slot_bytes(shape, dtypes),
            number=len(shape.moe_layers),
        ),
        "kv_cache": _Stack(
            lowest=_only_level(policy.kv_cache),
            unit_bytes=policy.num_kv_pages * kv_page_bytes(shape, dtypes) // shape.num_layers,
            number=shape.num_layers,
        ),
    }


def _only_level(placement: Placement) -> LevelName:
    return "disk" if placement.disk else "dram"


def _order(problem: Problem, priority: CpuPriority) -> list[tuple[_Kind, LevelName]]:
    """What is moved up where, one after the other."""
    level = problem.ladder.top
    order: list[tuple[_Kind, LevelName]] = [("kv_cache", level), ("weights", level)]
    if level == "vram":
        below: list[tuple[_Kind, LevelName]] = [("weights", "dram"), ("kv_cache", "dram")]
        order += below if priority == "experts" else reversed(below)
    return order


def _kept_free(footprint: Footprint, level: LevelName) -> int:
    """Bytes beside what a footprint counts."""
    if level != "vram":
        return _ROUNDING_BYTES
    counted = sum(footprint.terms.get(term, 0) for term in _RESERVED_TERMS)
    return max(_ROUNDING_BYTES, RESERVED_BYTES - counted)


def _may_hold_all(problem: Problem) -> bool:
    experts = problem.num_experts * problem.dtypes.expert_bytes(problem.shape)
    return experts <= problem.capacity_bytes(problem.ladder.top)


def _fits(problem: Problem, policy: Policy) -> bool:
    return all(
        footprint.total_bytes <= problem.capacity_bytes(level)
        for level, footprint in problem.footprints(policy).items()
    )
