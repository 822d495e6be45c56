"""Experts that stay in case after they have been computed, and which one leaves for another."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from moebatch.schedule.slots.expert_load import ExpertKey, Load

Rule = Literal["lru", "lfu", "lifo", "foreseen"]
"""Who leaves: the one whose last use is longest ago; the one that was used least often; the one
that came last; the one that is least likely to be used when its layer's turn comes. Where each
expert is used in each pass, the first rule keeps nothing until it is used again (it thrashes), the
next two keep as many as there are slots."""


class Cache(Protocol):
    """Which experts stay, as the table of slots asks."""

    @property
    def num_slots(self) -> int:
        """For experts that stay, of all layers together."""

    @property
    def is_shared(self) -> bool:
        """Whether what stays lies in slots that others can have."""

    @property
    def asks_for_chances(self) -> bool:
        """Whether `expect` is of any use."""

    def expect(self, layer: int, chances_E: Sequence[float]) -> None:
        """With what chance each expert of a layer is used when its turn comes."""

    def take(self, load: Load) -> Load | None:
        """Keeps an expert that has just been used, and says which one leaves for it at once:
        itself, if it does not stay; None if there is room."""

    def keep_idle(self, load: Load) -> bool:
        """Keeps an expert that is not wanted now, if that is any use; whether it does."""

    def give_way(self, newcomer: Load, *, is_certain: bool) -> Load | None:
        """The one whose slot a newcomer without one should have; None if it is worth less."""

    def leave(self, load: Load) -> None:
        """An expert that was kept is kept no more."""

    def check_integrity(self, loads: Mapping[ExpertKey, Load]) -> None:
        """Asserts that what is kept is there, and not more than there are slots for."""
