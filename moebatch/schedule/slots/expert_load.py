"""An expert that is in a slot or on its way into one, and the chunks in which it comes."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

State = Literal["resident", "arrived", "in flight", "absent"]
"""In the order in which experts can be computed."""


class ExpertKey(NamedTuple):
    """Which expert of which layer."""

    layer: int
    expert: int


@dataclass(slots=True, eq=False)
class Load:
    """An expert that is in a slot, or on its way into one."""

    key: ExpertKey
    num_chunks: int
    is_resident: bool = False
    slot: int | None = None
    num_issued: int = 0
    num_in_flight: int = 0
    is_required: bool = False
    """A gate has chosen it, and it has not been computed yet."""
    is_kept: bool = False
    """It has been computed, and stays until its step is over or another expert needs its slot."""
    is_cached: bool = False
    """It has been computed, and stays beyond its step for as long as its layer's cache has a place
    for it."""
    is_leaving: bool = False
    """It is being computed, and not needed by its step after that."""
    num_users: int = 0
    """Computations launched with it that have not ended."""
    is_wanted_again: bool = False
    """It was prefetched for a later step while in use for this one."""
    is_evicted: bool = False
    """Given up; its slot is free when the last chunk in flight has arrived."""

    @property
    def is_ready(self) -> bool:
        return self.num_issued == self.num_chunks and self.num_in_flight == 0

    @property
    def has_chunks_left(self) -> bool:
        """Whether some of it is still to be sent."""
        return self.num_issued < self.num_chunks

    @property
    def is_claimed(self) -> bool:
        """Whether it is, or is going to be, computed in its step."""
        return bool(self.is_required or self.is_kept or self.num_users)

    @property
    def is_prefetched(self) -> bool:
        """Likely at most: it has no claim to its slot."""
        return not (self.is_resident or self.is_cached or self.is_claimed)

    @property
    def state(self) -> State:
        """How near it is to being computed."""
        if self.is_ready:
            return "resident" if self.is_resident or self.is_cached else "arrived"
        return "in flight" if self.num_issued else "absent"


class Chunk(NamedTuple):
    """A part of an expert to be moved now."""

    load: Load
    number: int
    slot: int
