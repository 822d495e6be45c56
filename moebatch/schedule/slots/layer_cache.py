"""Experts that stay layer by layer: how many of each, and which one leaves when there is one too
many.

Every layer has slots of its own, since layers come in turn: one list for all of them would always
give up what is needed next.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from moebatch.schedule.slots.expert_load import ExpertKey, Load

LayerRule = Literal["lru", "lfu", "lifo"]


class LayerCache:
    """Experts stay in slots of their layer, whatever other layers want; one leaves when another of
    the layer has been computed."""

    is_shared = False
    asks_for_chances = False

    def __init__(self, sizes: Mapping[int, int], rule: LayerRule = "lifo") -> None:
        """`sizes` are slots by layer; a layer that is not there has none."""
        self._sizes = dict(sizes)
        self._leaves = _RULES[rule]
        self._held: dict[int, list[Load]] = {}
        """By layer, the one whose last use is longest ago first."""
        self._uses: Counter[ExpertKey] = Counter()
        self._entries: Counter[ExpertKey] = Counter()
        self._num_entered = 0

    @property
    def num_slots(self) -> int:
        """Of all layers together."""
        return sum(self._sizes.values())

    def expect(self, layer: int, chances_E: Sequence[float]) -> None:
        """Nothing depends on it."""

    def keep_idle(self, load: Load) -> bool:
        """No: slots are for what has been computed."""
        return False

    def give_way(self, newcomer: Load, *, is_certain: bool) -> Load | None:
        """None does."""

    def take(self, load: Load) -> Load | None:
        """Keeps an expert that has just been used, and says which one leaves for it: itself, if it
        does not stay; None if there is room."""
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
        """An expert that was kept is kept no more."""
        load.is_cached = False
        self._held[load.key.layer].remove(load)

    def check_integrity(self, loads: Mapping[ExpertKey, Load]) -> None:
        """Asserts that what is kept is there, and not more than there are slots for."""
        kept = {key for key, load in loads.items() if load.is_cached}
        assert kept == {load.key for held in self._held.values() for load in held}, "kept differs"
        for layer, held in self._held.items():
            assert len(held) <= self._sizes.get(layer, 0), f"layer {layer} keeps too many"
            assert all(load.is_ready for load in held), "what is kept has arrived"

    # --- the one that leaves has the smallest of these ------------------------------------------

    def _by_last_use(self, held: list[Load], load: Load) -> tuple[int, ...]:
        return (held.index(load),)

    def _by_uses(self, held: list[Load], load: Load) -> tuple[int, ...]:
        # Of equals the last that came, or cyclic use would keep nothing.
        return (self._uses[load.key], -self._entries[load.key])

    def _by_entry(self, held: list[Load], load: Load) -> tuple[int, ...]:
        return (-self._entries[load.key],)


_RULES: Mapping[LayerRule, Callable[[LayerCache, list[Load], Load], tuple[int, ...]]] = {
    "lru": LayerCache._by_last_use,
    "lfu": LayerCache._by_uses,
    "lifo": LayerCache._by_entry,
}
