"""A model under a policy: what schedules and their simulation have to know of it."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, TypeVar

from moebatch.layout.cache_sizes import even_sizes
from moebatch.layout.division import most_streamed
from moebatch.layout.ladder import Ladder, lanes_of
from moebatch.layout.routing import distinct_experts
from moebatch.schedule.lanes import STAGING
from moebatch.schedule.registry import traits_of
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.cache import Cache, Rule, make_cache
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Policy, whole

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


def expert_keys(shape: ModelShape) -> list[ExpertKey]:
    """All experts of all layers, in order."""
    return [
        ExpertKey(layer, expert)
        for layer in shape.moe_layers
        for expert in range(shape.num_experts)
    ]


def streamed_per_layer(shape: ModelShape, resident: Collection[ExpertKey]) -> dict[int, int]:
    """How many experts of each MoE layer have to come from elsewhere."""
    held = Counter(key.layer for key in resident)
    return {layer: shape.num_experts - held[layer] for layer in shape.moe_layers}


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model under a policy on the levels of a machine. Experts are computed at the top."""

    shape: ModelShape
    policy: Policy
    ladder: Ladder

    def setup(self, *, activation_level: int = 0) -> Setup:
        """What schedules know of it; gates choose for so many layers with experts ahead (Pre-gated
        MoE)."""
        shape, policy, ladder = self.shape, self.policy, self.ladder
        hot = shape.num_experts
        if policy.num_hot is not None:
            hot = min(policy.num_hot, hot)
        return Setup(
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            moe_layers=frozenset(shape.moe_layers),
            num_hot=hot,
            depth=self._depth(hot),
            window=self._window,
            lanes=lanes_of(ladder, policy),
            kv_homes=self._moving_kv_homes,
            streamed=shape.streamed(policy.streamed_layers),
            compute=ladder.top,
            most_together=ladder.most_together(policy),
            activation_level=activation_level,
            num_encoding=shape.num_encoding_layers,
        )

    def room(self, *, expert_bytes: int) -> "Room":
        """Slots, residents and pieces of experts, for the simulator."""
        from moebatch.schedule.drivers.simulate import Room  # which a plan does without

        on_disk, everything = self._on_disk, frozenset(expert_keys(self.shape))
        return Room(
            num_slots=self.policy.num_slots,
            resident=frozenset(self.residents()),
            num_slots_below=self.policy.num_slots if on_disk else 0,
            # Those that live on the GPU have nothing to do in main memory, so they need not come
            # there.
            resident_below=everything - on_disk if on_disk else None,
            cache_sizes=self.cache_sizes,
            cache_rule=self._rule,
            num_chunks=max(1, min(MAX_CHUNKS, ceil(expert_bytes / CHUNK_BYTES))),
            reading=self._reading,
        )

    # --- experts that stay ----------------------------------------------------------------------

    def residents(self, hottest: Hottest | None = None) -> list[ExpertKey]:
        """Experts that live where they are computed, spread evenly over the layers: the `hottest`
        of each, or by number if these are not known. None where those that stay change."""
        if self.policy.cache != "static":
            return []
        staying = spread(expert_keys(self.shape), self._num_staying)
        if not hottest:
            return staying
        counts, layers = Counter(key.layer for key in staying), self.shape.moe_layers
        return [ExpertKey(layer, e) for layer in layers for e in hottest[layer][: counts[layer]]]

    @property
    def cache(self) -> Cache:
        """What keeps experts that have been computed, where those that stay change; else
        nothing."""
        return make_cache(self.cache_sizes, self._rule)

    @property
    def cache_sizes(self) -> dict[int, int]:
        """Slots by layer for experts that have been computed and stay; empty where they do not
        change."""
        if self.policy.cache == "static":
            return {}
        layers, sizes = tuple(self.shape.moe_layers), self.policy.cache_sizes
        if not sizes:
            sizes = even_sizes(len(layers), self.shape.num_experts, self._num_staying)
        assert len(sizes) == len(layers), "one for each layer with experts"
        return dict(zip(layers, sizes, strict=True))

    @property
    def staying(self) -> tuple[int, ...]:
        """How many experts of each MoE layer stay where they are computed, always the same ones or
        not. Where all slots are shared, half of those for experts on their way count among them:
        the other half holds what has come and is not given up yet (so many fit replayed
        routings)."""
        shape, sizes = self.shape, self.cache_sizes
        if self.policy.cache == "foreseen":
            num_staying = sum(sizes.values()) + self.policy.num_slots // 2
            return even_sizes(len(sizes), shape.num_experts, num_staying)
        if self.policy.cache == "static":
            streamed = streamed_per_layer(shape, self.residents())
            sizes = {layer: shape.num_experts - count for layer, count in streamed.items()}
        return tuple(sizes[layer] for layer in shape.moe_layers)

    @property
    def cache_fault(self) -> str | None:
        """Why sizes that a policy names cannot be those of a cache; None if they can."""
        sizes, num_layers = self.policy.cache_sizes, len(self.shape.moe_layers)
        if not sizes:
            return None
        if len(sizes) != num_layers:
            return f"are {len(sizes)}, the model has {num_layers} layers with experts"
        most, num_staying = self.shape.num_experts, self._num_staying
        if max(sizes) > most:
            return f"must be at most {most}, the experts of a layer, got {max(sizes)}"
        if sum(sizes) != num_staying:
            return f"sum to {sum(sizes)}, the weights that stay are {num_staying} experts"
        return None

    @property
    def slots_wanted(self) -> int:
        """Slots without which a schedule cannot work as its paper says: two layers' worth where
        whole layers come at a time; one layer's, and room for what is prefetched, where all batches
        go through an expert one after the other; else one in use and one on its way."""
        policy, traits = self.policy, traits_of(self.policy)
        most = most_streamed(self.shape, self._num_staying if policy.cache == "static" else 0)
        if traits.foresees == "layer":
            return 2 * most
        if traits.holds_layer:
            return most + min(most, most if policy.num_hot is None else policy.num_hot)
        return min(2, most)

    @property
    def _rule(self) -> Rule:
        return "lifo" if self.policy.cache == "static" else self.policy.cache

    @property
    def _num_staying(self) -> int:
        share = self.policy.weights.on(self.ladder.top)
        return whole(share, len(self.shape.moe_layers) * self.shape.num_experts)

    # --- where things live ----------------------------------------------------------------------

    def expert_homes(self, hottest: Hottest | None = None) -> dict[LevelName, list[ExpertKey]]:
        """Where every expert lives, each level spread evenly over layers; the `hottest` of each
        layer where they are computed, if they are known. What is left of one goes to the level
        below."""
        keys, top = expert_keys(self.shape), self.ladder.top
        at_top = self.residents(hottest)
        held = frozenset(at_top)
        below = [key for key in keys if key not in held]
        num_on_disk = len(below)
        if self.ladder.below(top) == "dram":
            num_on_disk = min(num_on_disk, whole(self.policy.weights.disk, len(keys)))
        on_disk = spread(below, num_on_disk)
        passing = frozenset(on_disk)
        homes: dict[LevelName, list[ExpertKey]] = {"vram": [], "disk": on_disk}
        homes["dram"] = [key for key in below if key not in passing]
        homes[top] = at_top
        return homes

    @property
    def kv_homes(self) -> tuple[LevelName, ...]:
        """Level of each layer on which it keeps what it does; of one that keeps nothing the one
        that computes."""
        first: tuple[LevelName, ...] = (self.ladder.top,) * self.shape.num_encoding_layers
        return (*first, *self.policy.kv_levels(self.shape.num_keeping_layers))

    @property
    def _moving_kv_homes(self) -> tuple[LevelName, ...]:
        """Empty where nothing has to move. Prompts attend on the GPU wherever decoding does."""
        homes, top = self.kv_homes, self.ladder.top
        return () if {*homes, self.ladder.attends_at(self.policy)} == {top} else homes

    @property
    def _on_disk(self) -> frozenset[ExpertKey]:
        """Experts on disk under a GPU that come through slots of main memory; pages read the disk
        themselves."""
        if self.ladder.top == "dram" or traits_of(self.policy).is_paged:
            return frozenset()
        return frozenset(self.expert_homes()["disk"])

    @property
    def _reading(self) -> Kind | None:
        """Tasks of which kind do so, on their way into pinned buffers or up."""
        if self.ladder.top == "dram" or not self.policy.weights.disk:
            return None
        match traits_of(self.policy).moves:
            case "experts":
                return None
            case "block":
                return Kind.BLOCK
            case "pages":
                return Kind.STAGE if STAGING in lanes_of(self.ladder, self.policy) else Kind.PAGE

    def _depth(self, num_hot: int) -> int:
        """Steps ahead that slots can hold, of experts that a batch chooses when all of it
        decodes."""
        policy = self.policy
        foreseen = min(num_hot, round(distinct_experts(self.shape, policy.batch_size)))
        steps = ceil(policy.num_slots / max(1, foreseen))
        if policy.cache == "foreseen":  # all slots are for any expert that comes
            steps = max(steps, FORESEEN_STEPS)
        return max(1, min(steps, len(self.shape.moe_layers) - 1))

    @property
    def _window(self) -> int:
        by_layer = Counter(key.layer for key in self._on_disk).values()
        return max(1, self.policy.num_slots // max(by_layer)) if by_layer else 0
