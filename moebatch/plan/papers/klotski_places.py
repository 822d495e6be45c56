"""Where Klotski lets experts, keys and values live: its adaptive tensor placement (section 5).

The level that computes holds the weights outside experts, then keys and values, then the experts of
the first layers. Main memory below a GPU holds the experts of the next layers and then what is left
of keys and values, as the paper's text says (its program has it the other way round); the disk
holds the rest.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from moebatch.layout.buffers import KV_WINDOW_TERM, PROGRAM_TERM, SLOTS_TERM
from moebatch.layout.footprint import ACTIVATIONS_TERM, Footprint, cache_bytes, slot_bytes
from moebatch.plan.problem import Problem
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Placement, Policy

RESERVED_BYTES = 2_000_000_000
"""GPU memory that is left for the program and activations; where they need more, they get it."""
_RESERVED_TERMS = (PROGRAM_TERM, ACTIVATIONS_TERM)
_KEPT_BYTES = 64

_Kind = Literal["weights", "kv_cache"]
_ORDER: Mapping[LevelName, tuple[tuple[_Kind, LevelName], ...]] = {
    "vram": (("kv_cache", "vram"), ("weights", "vram"), ("weights", "dram"), ("kv_cache", "dram")),
    "dram": (("kv_cache", "dram"), ("weights", "dram")),
}
"""By the level that computes: what is moved up where, one after the other."""


def placed(problem: Problem, policy: Policy) -> Policy | None:
    """`policy`, whose places are the `lowest`, with Klotski's shares, experts by whole layers; None
    if it does not fit.

    If all experts find room where they are computed, there are no slots.
    """
    if _may_hold_all(problem):
        resident = _filled_up(problem, replace(policy, num_slots=0))
        if resident.weights.on(problem.ladder.top) == 1 and problem.fits(resident):
            return resident
    streaming = _filled_up(problem, policy)
    return streaming if problem.fits(streaming) else None


def lowest(problem: Problem) -> tuple[Placement, Placement]:
    """All experts, and all keys and values, as far down as they may be."""
    may_sink = (problem.has_disk, problem.keeps_kv_on_disk)
    weights, kv_cache = (Placement(disk=1.0) if may else Placement(dram=1.0) for may in may_sink)
    return weights, kv_cache


def _may_hold_all(problem: Problem) -> bool:
    experts = problem.num_experts * problem.dtypes.expert_bytes(problem.shape)
    return experts <= problem.capacity_bytes(problem.ladder.top)


def _filled_up(problem: Problem, policy: Policy) -> Policy:
    """Moves layers of experts and of the cache up from the lowest level, while there is room."""
    footprints = problem.footprints(policy)
    stacks = _stacks(problem, policy)
    for kind, level in _ORDER[problem.ladder.top]:
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


def _kept_free(footprint: Footprint, level: LevelName) -> int:
    """Bytes beside what a footprint counts."""
    if level != "vram":
        return _KEPT_BYTES
    counted = sum(footprint.terms.get(term, 0) for term in _RESERVED_TERMS)
    return max(_KEPT_BYTES, RESERVED_BYTES - counted)


class _Stack:
    """Things of one kind and size, all on their lowest level at first."""

    def __init__(self, at_first: Placement, number: int, unit_bytes: int) -> None:
        self._lowest: LevelName = "disk" if at_first.disk else "dram"
        self._number, self._unit_bytes = number, unit_bytes
        self._counts: dict[LevelName, int] = {self._lowest: number}

    def move(self, level: LevelName, room_bytes: int, *, freed_bytes: int) -> None:
        """As many as there is room for; with the last one of them `freed_bytes` more are free."""
        if level == self._lowest:
            return
        left = self._counts[self._lowest]
        all_fit = left * self._unit_bytes <= room_bytes + freed_bytes
        moved = left if all_fit else max(0, room_bytes // self._unit_bytes)
        self._counts |= {self._lowest: left - moved, level: moved}

    def added_bytes(self, level: LevelName) -> int:
        """Bytes that a level holds more than at first; negative where some have left."""
        at_first = self._number if level == self._lowest else 0
        return (self._counts.get(level, 0) - at_first) * self._unit_bytes

    def placement(self) -> Placement:
        """Shares of the levels."""
        return Placement(**{level: count / self._number for level, count in self._counts.items()})


def _stacks(problem: Problem, policy: Policy) -> dict[_Kind, _Stack]:
    """Whole layers of experts, and of keys and values, which layers that encode do not keep."""
    shape, dtypes = problem.shape, problem.dtypes
    num_keeping = shape.num_keeping_layers
    of_experts = shape.num_experts * slot_bytes(shape, dtypes)
    of_cache = int(cache_bytes(problem.memory.groups, dtypes, policy) // num_keeping)
    return {
        "weights": _Stack(policy.weights, len(shape.moe_layers), of_experts),
        "kv_cache": _Stack(policy.kv_cache, num_keeping, of_cache),
    }
