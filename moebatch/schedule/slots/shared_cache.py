"""Experts that stay wherever there is a slot, until a likelier one wants it.

Layers share all slots, those for experts on their way included. What is worth keeping is what will
be wanted next, as far as is known: a layer that has just been computed waits a whole pass for
its turn, but if its experts are likelier to be chosen then, they stay all the same.
"""

from collections.abc import Iterable, Mapping, Sequence

from moebatch.schedule.slots.expert_load import ExpertKey, Load


class SharedCache:
    """Experts leave in the order of their chances, the least likely first; of equals the one that
    was used last, which in cyclic use is needed last."""

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
        """With what chance each expert of a layer is used when its turn comes."""
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
        """An expert that was kept is kept no more."""
        load.is_cached = False
        del self._held[load.key.layer][load.key]
        self._worst.pop(load.key.layer, None)

    def check_integrity(self, loads: Mapping[ExpertKey, Load]) -> None:
        """Asserts that what is kept is there."""
        kept = {key for key, load in loads.items() if load.is_cached}
        assert kept == {key for held in self._held.values() for key in held}, "kept differs"
        assert all(loads[key].is_ready for key in kept), "what is kept has arrived"

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
            free = (load for load in self._last_first(layer) if not load.is_claimed)
            known = self._worst[layer] = min(free, key=self._chance, default=None)
        return known

    def _last_first(self, layer: int) -> Iterable[Load]:
        return reversed(self._held[layer].values())

    def _worth(self, load: Load) -> tuple[float, int]:
        return self._chance(load), -self._turns.get(load.key.layer, 0)

    def _chance(self, load: Load) -> float:
        chances_E = self._chances.get(load.key.layer)
        return 0.0 if chances_E is None else chances_E[load.key.expert]
