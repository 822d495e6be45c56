"""What a schedule and its simulation have to know of a model under a policy."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, TypeVar

from moebatch.layout.cache_sizes import even_sizes
from moebatch.layout.division import most_streamed
from moebatch.layout.ladder import Ladder, lanes_of
from moebatch.layout.routing import distinct_experts
from moebatch.schedule.registry import traits_of
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.cache import Cache, Rule, make_cache
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Policy
from moebatch.spec.policy.rounding import whole

if TYPE_CHECKING:
    from moebatch.schedule.drivers.simulate import Room

CHUNK_BYTES = 16 * 2**20
"""A required expert waits for one such piece of another at most."""
MAX_CHUNKS = 8
"""Pieces of an expert in a simulation; more only take longer to simulate."""
FORESEEN_STEPS = 2
"""As far ahead as predictors look, by their papers."""
Key = TypeVar("Key")
Hottest = Mapping[int, Sequence[int]]
"""All experts of each MoE layer in an order."""


def spread(keys: Sequence[Key], count: int) -> list[Key]:
    """`count` of the experts, evenly over the layers, so that no stretch of a pass loads more."""
    return [keys[i * len(keys) // count] for i in range(count)]


def setup_of(
    shape: ModelShape,
    policy: Policy,
    ladder: Ladder,
    *,
    activation_level: int = 0,
) -> Setup:
    """A model under a policy, for schedules. Experts are computed at the top of the ladder.

    Args:
        activation_level: so many layers with experts ahead gates choose (Pre-gated MoE).
    """
    on_disk = _on_disk(shape, policy, ladder)
    hot = shape.num_experts if policy.num_hot is None else min(policy.num_hot, shape.num_experts)
    return Setup(
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        moe_layers=frozenset(shape.moe_layers),
        num_hot=hot,
        depth=_depth(shape, policy, hot),
        window=_window(policy, on_disk),
        lanes=lanes_of(ladder, policy),
        kv_homes=_kv_homes(shape, policy, ladder),
        streamed=shape.streamed(policy.streamed_layers),
        compute=ladder.top,
        most_together=ladder.most_together(policy),
        activation_level=activation_level,
        num_encoding=shape.num_encoding_layers,
    )


def room_of(shape: ModelShape, policy: Policy, ladder: Ladder, *, expert_bytes: int) -> "Room":
    """Slots, residents and pieces of experts, for the simulator."""
    from moebatch.schedule.drivers.simulate import Room  # which a plan does without

    resident = residents(shape, policy, ladder)
    on_disk = _on_disk(shape, policy, ladder)
    everything = frozenset(expert_keys(shape))
    return Room(
        num_slots=policy.num_slots,
        resident=frozenset(resident),
        num_slots_below=policy.num_slots if on_disk else 0,
        # Those that live on the GPU have nothing to do in main memory, so they need not come there.
        resident_below=everything - on_disk if on_disk else None,
        cache_sizes=cache_sizes(shape, policy, ladder),
        cache_rule=_rule(policy),
        num_chunks=max(1, min(MAX_CHUNKS, ceil(expert_bytes / CHUNK_BYTES))),
    )


def expert_keys(shape: ModelShape) -> list[ExpertKey]:
    """All experts of all layers, in order."""
    return [
        ExpertKey(layer, expert)
        for layer in shape.moe_layers
        for expert in range(shape.num_experts)
    ]


def residents(
    shape: ModelShape, policy: Policy, ladder: Ladder, *, hottest: Hottest | None = None
) -> list[ExpertKey]:
    """Experts that live where they are computed, spread evenly over the layers; none where those
    that stay change.

    Args:
        hottest: experts by layer, those that are chosen most often first; by number if not known.
    """
    if policy.cache != "static":
        return []
    keys = expert_keys(shape)
    staying = spread(keys, _num_staying(shape, policy, ladder))
    if not hottest:
        return staying
    counts = Counter(key.layer for key in staying)
    return [
        ExpertKey(layer, e) for layer in shape.moe_layers for e in hottest[layer][: counts[layer]]
    ]


def cache_of(shape: ModelShape, policy: Policy, ladder: Ladder) -> Cache:
    """What keeps experts that have been computed, where those that stay change; else nothing."""
    return make_cache(cache_sizes(shape, policy, ladder), _rule(policy))


def cache_sizes(shape: ModelShape, policy: Policy, ladder: Ladder) -> dict[int, int]:
    """Slots by layer for experts that have been computed and stay; empty where they do not
    change."""
    if policy.cache == "static":
        return {}
    layers = tuple(shape.moe_layers)
    sizes = policy.cache_sizes
    if not sizes:
        num_staying = _num_staying(shape, policy, ladder)
        sizes = even_sizes(len(layers), shape.num_experts, num_staying)
    assert len(sizes) == len(layers), "one for each layer with experts"
    return dict(zip(layers, sizes, strict=True))


def staying(shape: ModelShape, policy: Policy, ladder: Ladder) -> tuple[int, ...]:
    """How many experts of each MoE layer stay where they are computed, always the same ones or
    not. Where all slots are shared, half of those for experts on their way count among them: the
    other half holds what has come and is not given up yet (so many fit replayed routings)."""
    sizes = cache_sizes(shape, policy, ladder)
    if policy.cache == "foreseen":
        num_staying = sum(sizes.values()) + policy.num_slots // 2
        return even_sizes(len(sizes), shape.num_experts, num_staying)
    if policy.cache == "static":
        resident = residents(shape, policy, ladder)
        streamed = streamed_per_layer(shape, resident)
        sizes = {layer: shape.num_experts - count for layer, count in streamed.items()}
    return tuple(sizes[layer] for layer in shape.moe_layers)


def cache_fault(shape: ModelShape, policy: Policy, ladder: Ladder) -> str | None:
    """Why sizes that a policy names cannot be those of a cache; None if they can."""
    sizes, num_layers = policy.cache_sizes, len(shape.moe_layers)
    if not sizes:
        return None
    if len(sizes) != num_layers:
        return f"are {len(sizes)}, the model has {num_layers} layers with experts"
    if max(sizes) > shape.num_experts:
        return f"must be at most {shape.num_experts}, the experts of a layer, got {max(sizes)}"
    num_staying = _num_staying(shape, policy, ladder)
    if sum(sizes) != num_staying:
        return f"sum to {sum(sizes)}, the weights that stay are {num_staying} experts"
    return None


def _rule(policy: Policy) -> Rule:
    return "lifo" if policy.cache == "static" else policy.cache


def _num_staying(shape: ModelShape, policy: Policy, ladder: Ladder) -> int:
    share = policy.weights.on(ladder.top)
    return whole(share, len(shape.moe_layers) * shape.num_experts)


def expert_homes(
    shape: ModelShape, policy: Policy, ladder: Ladder, *, hottest: Hottest | None = None
) -> dict[LevelName, list[ExpertKey]]:
    """Where every expert lives, each level spread evenly over layers; the `hottest` of each layer
    where they are computed, if they are known. What is left of one goes to the level below."""
    keys = expert_keys(shape)
    at_top = residents(shape, policy, ladder, hottest=hottest)
    held = frozenset(at_top)
    below = [key for key in keys if key not in held]
    num_on_disk = len(below)
    if ladder.below(ladder.top) == "dram":
        num_on_disk = min(num_on_disk, whole(policy.weights.disk, len(keys)))
    on_disk = spread(below, num_on_disk)
    passing = frozenset(on_disk)
    homes: dict[LevelName, list[ExpertKey]] = {"vram": [], "disk": on_disk}
    homes["dram"] = [key for key in below if key not in passing]
    homes[ladder.top] = at_top
    return homes


def streamed_per_layer(shape: ModelShape, resident: Collection[ExpertKey]) -> dict[int, int]:
    """How many experts of each MoE layer have to come from elsewhere."""
    held = Counter(key.layer for key in resident)
    return {layer: shape.num_experts - held[layer] for layer in shape.moe_layers}


def slots_wanted(shape: ModelShape, policy: Policy, ladder: Ladder) -> int:
    """Slots without which a schedule cannot work as its paper says: two layers' worth where whole
    layers come at a time; one layer's, and room for what is prefetched, where all batches go
    through an expert one after the other; else one in use and one on its way."""
    stay = _num_staying(shape, policy, ladder) if policy.cache == "static" else 0
    most = most_streamed(shape, stay)
    traits = traits_of(policy)
    if traits.foresees == "layer":
        return 2 * most
    if traits.holds_layer:
        return most + min(most, most if policy.num_hot is None else policy.num_hot)
    return min(2, most)


def _on_disk(shape: ModelShape, policy: Policy, ladder: Ladder) -> frozenset[ExpertKey]:
    """Experts on disk under a GPU that come through slots of main memory; pages read the disk
    themselves."""
    if ladder.top == "dram" or traits_of(policy).is_paged:
        return frozenset()
    return frozenset(expert_homes(shape, policy, ladder)["disk"])


def _depth(shape: ModelShape, policy: Policy, num_hot: int) -> int:
    """Steps ahead that slots can hold, of experts that a batch chooses when all of it decodes."""
    foreseen = min(num_hot, round(distinct_experts(shape, policy.batch_size)))
    steps = ceil(policy.num_slots / max(1, foreseen))
    if policy.cache == "foreseen":  # all slots are for any expert that comes
        steps = max(steps, FORESEEN_STEPS)
    return max(1, min(steps, len(shape.moe_layers) - 1))


def _window(policy: Policy, on_disk: frozenset[ExpertKey]) -> int:
    if not on_disk:
        return 0
    return max(1, policy.num_slots // max(Counter(key.layer for key in on_disk).values()))


def _kv_homes(shape: ModelShape, policy: Policy, ladder: Ladder) -> tuple[LevelName, ...]:
    """Empty where nothing has to move. Prompts attend on the GPU wherever decoding does."""
    homes = kv_homes(shape, policy, ladder)
    return () if {*homes, ladder.attends_at(policy)} == {ladder.top} else homes


def kv_homes(shape: ModelShape, policy: Policy, ladder: Ladder) -> tuple[LevelName, ...]:
    """Level of each layer on which it keeps what it does; of one that keeps nothing the one that
    computes."""
    first: tuple[LevelName, ...] = (ladder.top,) * shape.num_encoding_layers
    return (*first, *policy.kv_levels(shape.num_keeping_layers))
