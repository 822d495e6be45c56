"""The cache of experts: which stay after they have been computed, and which one leaves."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from moebatch.schedule.slots.expert_load import ExpertKey, Load

LayerRule = Literal["lru", "lfu", "lifo"]
Rule = Literal[LayerRule, "foreseen"]
"""Who leaves: the one whose last use is longest ago; the one that was used least often; the one
that came last; the one that is least likely to be used when its layer's turn comes. Where each
expert is used in each pass, the first rule keeps nothing until it is used again (it thrashes), the
next two keep as many as there are slots."""


class Cache:
    """Which experts stay, as the table of slots asks. This one keeps none."""

    is_shared = False
    """Whether what stays lies in slots that others can have."""
    asks_for_chances = False
    """Whether `expect` is of any use."""
    num_slots = 0
    """For experts that stay, of all layers together."""

    def expect(self, layer: int, chances_E: Sequence[float]) -> None:
        """With what chance each expert of a layer is used when its turn comes."""

    def take(self, load: Load) -> Load | None:
        """Keeps an expert that has just been used, and says which one leaves for it at once:
        itself, if it does not stay; None if there is room."""
        return load

    def keep_idle(self, load: Load) -> bool:
        """Keeps an expert that is not wanted now, if that is any use; whether it does."""
        return False

    def give_way(self, newcomer: Load, *, is_certain: bool) -> Load | None:
        """The one whose slot a newcomer without one should have; None if it is worth less."""

    def leave(self, load: Load) -> None:
        """An expert that was kept is kept no more."""

    @property
    def kept(self) -> Iterable[ExpertKey]:
        return ()

    def check_integrity(self, loads: Mapping[ExpertKey, Load]) -> None:
        """Asserts that what is kept is there, and not more than there are slots for."""
        kept = {key for key, load in loads.items() if load.is_cached}
        assert kept == set(self.kept), "kept differs"
        assert all(loads[key].is_ready for key in kept), "what is kept has arrived"


def make_cache(sizes: Mapping[int, int], rule: Rule = "lifo") -> Cache:
    """An empty one with `sizes` slots by layer; layers that are not there have none."""
    if rule == "foreseen":
        return SharedCache(sum(sizes.values()))
    return LayerCache(sizes, rule)


class LayerCache(Cache):
    """Experts stay in slots of their layer, whatever other layers want; one leaves when another of
    the layer has been computed.

    Layers come in turn: one list for all of them would always give up what is needed next.
    """

    def __init__(self, sizes: Mapping[int, int], rule: LayerRule = "lifo") -> None:
        self.num_slots = sum(sizes.values())
        self._sizes = dict(sizes)
        self._leaves = _LAYER_RULES[rule]
        self._held: dict[int, list[Load]] = {}
        """By layer, the one whose last use is longest ago first."""
        self._uses: Counter[ExpertKey] = Counter()
        self._entries: Counter[ExpertKey] = Counter()
        self._num_entered = 0

    def take(self, load: Load) -> Load | None:
        held = self._held.setdefault(load.key.layer, [])
        self._uses[load.key] += 1
        if load.is_cached:
            held.remove(load)
        else:
            self._num_entered += 1
            self._entries[load.key] = self._num_entered
        held.append(load)
        load.is_cached = True
        if len(held) <= self._sizes.get(load.key.layer, 0):
            return None
        free = [other for other in held if not other.is_claimed]
        leaving = min(free, key=lambda other: self._leaves(self, held, other))
        self.leave(leaving)
        return leaving

    def leave(self, load: Load) -> None:
        load.is_cached = False
        self._held[load.key.layer].remove(load)

    def check_integrity(self, loads: Mapping[ExpertKey, Load]) -> None:
        super().check_integrity(loads)
        for layer, held in self._held.items():
            assert len(held) <= self._sizes.get(layer, 0), f"layer {layer} keeps too many"

    @property
    def kept(self) -> Iterable[ExpertKey]:
        return (load.key for held in self._held.values() for load in held)

    # --- the one that leaves has the smallest of these ------------------------------------------

    def _by_last_use(self, held: list[Load], load: Load) -> tuple[int, ...]:
        return (held.index(load),)

    def _by_uses(self, held: list[Load], load: Load) -> tuple[int, ...]:
        # Of equals the last that came, or cyclic use would keep nothing.
        return (self._uses[load.key], -self._entries[load.key])

    def _by_entry(self, held: list[Load], load: Load) -> tuple[int, ...]:
        return (-self._entries[load.key],)


_LAYER_RULES: Mapping[LayerRule, Callable[[LayerCache, list[Load], Load], tuple[int, ...]]] = {
    "lru": LayerCache._by_last_use,
    "lfu": LayerCache._by_uses,
    "lifo": LayerCache._by_entry,
}


class SharedCache(Cache):
    """Experts stay wherever there is a slot, until a likelier one wants it; of equals the one
    leaves that was used last, which in cyclic use is needed last.

    Layers share all slots, those for experts on their way included. A layer that has just been
    computed waits a whole pass for its turn, but if its experts are likelier to be chosen then,
    they stay all the same.
    """

    is_shared = True
    asks_for_chances = True

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._held: dict[int, dict[ExpertKey, Load]] = {}
        """By layer, the one whose last use is longest ago first."""
        self._chances: dict[int, Sequence[float]] = {}
        self._turns: dict[int, int] = {}
        """When something of a layer was used last: the later, the later is its next turn."""
        self._num_taken = 0
        self._worst: dict[int, Load | None] = {}
        """Of each layer the one that leaves first, as far as that is known."""

    def expect(self, layer: int, chances_E: Sequence[float]) -> None:
        self._chances[layer] = chances_E
        self._worst.pop(layer, None)

    def take(self, load: Load) -> None:
        """Keeps an expert that has just been used; none has to leave for that."""
        self._num_taken += 1
        self._turns[load.key.layer] = self._num_taken
        self._hold(load)

    def keep_idle(self, load: Load) -> bool:
        """Keeps an expert that has come for nothing: it may be wanted the next time."""
        if load.is_ready:
            self._hold(load)
        return load.is_ready

    def give_way(self, newcomer: Load, *, is_certain: bool) -> Load | None:
        """The least likely one, if the newcomer is likelier, or as likely and needed earlier."""
        worst = min(filter(None, map(self._worst_of, self._held)), key=self._worth, default=None)
        if worst is None or is_certain or self._worth(worst) < self._worth(newcomer):
            return worst
        return None

    def leave(self, load: Load) -> None:
        load.is_cached = False
        del self._held[load.key.layer][load.key]
        self._worst.pop(load.key.layer, None)

    @property
    def kept(self) -> Iterable[ExpertKey]:
        return (key for held in self._held.values() for key in held)

    def _hold(self, load: Load) -> None:
        held = self._held.setdefault(load.key.layer, {})
        held.pop(load.key, None)
        held[load.key] = load
        load.is_cached = True
        self._worst.pop(load.key.layer, None)

    def _worst_of(self, layer: int) -> Load | None:
        """The one of a layer that leaves first; None if all are going to be computed."""
        known = self._worst.get(layer)
        if known is None or known.is_claimed:
            last_first = reversed(self._held[layer].values())
            free = (load for load in last_first if not load.is_claimed)
            known = self._worst[layer] = min(free, key=self._chance, default=None)
        return known

    def _worth(self, load: Load) -> tuple[float, int]:
        return self._chance(load), -self._turns.get(load.key.layer, 0)

    def _chance(self, load: Load) -> float:
        chances_E = self._chances.get(load.key.layer)
        return 0.0 if chances_E is None else chances_E[load.key.expert]
