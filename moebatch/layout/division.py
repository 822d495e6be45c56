"""How a policy divides experts and layers of keys and values among levels: as whole ones, as they
are when it runs, or in parts, as a solver of shares sees them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from moebatch.layout.ladder import Ladder
from moebatch.schedule.registry import traits_of
from moebatch.spec.machine.hardware import LEVELS, LevelName
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Policy, kv_counts, whole

_PAGED_SPARE = 2
"""Whole experts of a paged schedule need up to two slots more than shares of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """What lies where, and the room through which the rest passes."""

    experts: Mapping[LevelName, float]
    """Experts that live on each level."""
    kv_layers: Mapping[LevelName, tuple[float, ...]]
    """Layers of each group whose keys and values live there."""
    kv_homes: frozenset[LevelName]
    """Levels on which some do, or may."""
    num_slots: float
    """Where experts are computed, for those that live elsewhere."""
    num_slots_below: float
    """In main memory, for those that go from disk to a GPU."""
    num_staged: float
    """Experts of the largest layer that comes in pages; 0 where none does."""
    spare_experts: Mapping[LevelName, float]
    """Room for what rounding may bring down to a level beyond its share."""
    spare_layers: Mapping[LevelName, tuple[float, ...]]
    """The same of each group, and for more of its layers in a stretch of layers than in the mean.
    """

    @classmethod
    def of(
        cls, shape: ModelShape, groups: Sequence[CacheGroup], policy: Policy, ladder: Ladder
    ) -> "Division":
        """Whole experts and layers, as a run has them; layers are in `groups`."""
        experts = whole_experts(shape, policy, ladder)
        homes = kv_counts(policy.kv_cache, shape.num_keeping_layers)
        # Layers follow each other on each level: of a group as many are below each end.
        ends = [*accumulate(homes.values(), initial=shape.num_encoding_layers)]
        below_ends = [[bisect_left(group.layers, end) for end in ends] for group in groups]
        paged = comes_in_pages(policy, ladder)
        most = most_streamed(shape, experts[ladder.experts_at(policy)])
        below = ladder.experts_at(policy) == "vram" and experts["disk"] > 0
        return cls(
            experts=experts,
            kv_layers={
                level: tuple(num[place + 1] - num[place] for num in below_ends)
                for place, level in enumerate(homes)
            },
            kv_homes=frozenset(level for level, count in homes.items() if count),
            num_slots=2 * most if paged else policy.num_slots,
            num_slots_below=policy.num_slots if below else 0,
            num_staged=most if paged else 0,
            spare_experts={},
            spare_layers={},
        )

    @classmethod
    def in_parts(
        cls,
        shape: ModelShape,
        groups: Sequence[CacheGroup],
        policy: Policy,
        *,
        ladder: Ladder,
        weight_levels: Sequence[LevelName],
        kv_levels: Sequence[LevelName],
    ) -> "Division":
        """Parts of experts and layers, so that all of it is affine in the shares: what some shares
        on `weight_levels` and `kv_levels` need is there for all of them."""
        num_experts = len(shape.moe_layers) * shape.num_experts
        paged = comes_in_pages(policy, ladder)
        share = policy.weights.on(ladder.experts_at(policy))
        streamed = shape.num_experts * (1 - share)
        below = ladder.experts_at(policy) == "vram" and "disk" in weight_levels
        spare = 1 + _PAGED_SPARE * paged
        return cls(
            experts={level: policy.weights.on(level) * num_experts for level in LEVELS},
            kv_layers={
                level: tuple(policy.kv_cache.on(level) * len(group.layers) for group in groups)
                for level in LEVELS
            },
            kv_homes=frozenset(kv_levels),
            num_slots=2 * streamed if paged else policy.num_slots,
            num_slots_below=policy.num_slots if below else 0,
            num_staged=streamed + 1 if paged else 0,
            # What does not fit above ends on the lowest level.
            spare_experts={weight_levels[-1]: spare} if len(weight_levels) > 1 else {},
            spare_layers=_spare_layers(groups, kv_levels),
        )


def whole_experts(shape: ModelShape, policy: Policy, ladder: Ladder) -> dict[LevelName, int]:
    """Whole experts by level: what is left of one goes to main memory below a GPU, and to the disk
    below main memory. Where those on the GPU change, all of them live below it as well."""
    total = len(shape.moe_layers) * shape.num_experts
    if ladder.experts_at(policy) == "vram":
        on_gpu = whole(policy.weights.vram, total)
        on_disk = min(total - on_gpu, whole(policy.weights.disk, total))
        lent = on_gpu if policy.cache == "static" else 0
        return {"vram": on_gpu, "dram": total - lent - on_disk, "disk": on_disk}
    in_memory = whole(policy.weights.dram, total)
    return {"vram": 0, "dram": in_memory, "disk": total - in_memory}


def most_streamed(shape: ModelShape, num_resident: int) -> int:
    """Experts that are not resident, of the layer that has most of them; residents are spread
    evenly over layers."""
    return shape.num_experts - num_resident // max(1, len(shape.moe_layers))


def comes_in_pages(policy: Policy, ladder: Ladder) -> bool:
    """Whether experts come layer by layer into two halves of a buffer."""
    return traits_of(policy).is_paged and ladder.experts_at(policy) == ladder.top


def _spare_layers(
    groups: Sequence[CacheGroup], levels: Sequence[LevelName]
) -> dict[LevelName, tuple[float, ...]]:
    """A level has a stretch of layers, in which there may be more of a group than in the mean, and
    what does not fit on those above, if no level below it has a share."""
    if len(levels) == 1:
        return {}
    keeping = tuple(sorted({layer for group in groups for layer in group.layers}))
    return {
        level: tuple(
            _unevenness(group.layers, keeping) + num_above * len(group.layers) / len(keeping)
            for group in groups
        )
        for num_above, level in enumerate(levels)
    }


@cache  # plans ask thousands of times
def _unevenness(layers: tuple[int, ...], keeping: tuple[int, ...]) -> float:
    """Layers that a stretch of those that keep something has more of at most than an even
    distribution would give it."""
    mean = len(layers) / len(keeping)
    counts = accumulate((layer in layers for layer in keeping), initial=0)
    more = [count - number * mean for number, count in enumerate(counts)]
    return max(more) - min(more)
