"""Which experts are in slots, which come next, and in what order they can be computed.

Pure bookkeeping: whoever moves bytes asks what to move next and says when it is done, whoever
computes says what it needs. Reader threads drive it as well as a virtual clock does.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    """It has been computed, and stays until its step is over or somebody needs its slot."""
    num_users: int = 0
    """Computations launched with it that have not ended."""
    is_wanted_again: bool = False
    """It was announced for a later step while in use for this one."""
    is_dropped: bool = False
    arrival: int = 0
    """Arrived experts are computed in this order."""

    @property
    def is_ready(self) -> bool:
        """Whether all of it has arrived."""
        return self.num_issued == self.num_chunks and self.num_in_flight == 0

    @property
    def has_chunks_left(self) -> bool:
        """Whether some of it is still to be sent."""
        return self.num_issued < self.num_chunks

    @property
    def is_announced(self) -> bool:
        """Likely at most: it has no claim to its slot."""
        return not (self.is_resident or self.is_required or self.is_kept or self.num_users)

    @property
    def state(self) -> State:
        """How near it is to being computed."""
        if self.is_ready:
            return "resident" if self.is_resident else "arrived"
        return "in flight" if self.num_issued else "absent"


class Chunk(NamedTuple):
    """A part of an expert to be moved now."""

    load: Load
    number: int
    slot: int


@dataclass(slots=True)
class _Queues:
    """Loads with chunks left to send: certain ones first, then likely ones, each in order."""

    required: list[Load] = field(default_factory=list)
    announced: list[Load] = field(default_factory=list)

    def discard(self, load: Load) -> None:
        for queue in (self.required, self.announced):
            if load in queue:
                queue.remove(load)


class SlotQueue:
    """Slots of one level, and the queue of experts that want to be in them.

    Announced experts take free slots only. Required ones come first, and take the slot of an
    announced one, of the one that is needed last, when none is free; next those of experts that
    have been computed already and only stay in case. A chunk in flight is never cancelled, so a
    required expert waits for one chunk at most. An expert that is required is never given up before
    it has been computed, but for one that somebody waits for when there is no other slot.

    Who owns a slot: the free list, or exactly one load. `check_integrity` verifies this.
    """

    def __init__(
        self,
        num_chunks: Mapping[ExpertKey, int],
        *,
        num_slots: int,
        resident: Collection[ExpertKey] = (),
    ) -> None:
        """`num_slots` are those for experts that come and go; residents have their own.

        Whoever sets `on_drop` is told of every expert that has left.
        """
        self.num_streaming_slots = num_slots
        self.num_slots = num_slots + len(resident)
        self._num_chunks = num_chunks
        self._free = list(range(self.num_slots))
        self._loads: dict[ExpertKey, Load] = {}
        self._passing: dict[ExpertKey, Load] = {}
        self._queues = _Queues()
        self._num_arrived = 0
        self._awaited: Load | None = None
        self.on_drop: Callable[[ExpertKey], None] = lambda key: None
        for key in resident:
            load = Load(key, num_chunks[key], is_resident=True, slot=self._free.pop())
            self._loads[key] = load
            self._queues.announced.append(load)

    def fill_residents(self) -> None:
        """Counts residents as arrived, where nothing is really moved."""
        for load in self._loads.values():
            load.num_issued = load.num_chunks
        self._queues.announced.clear()

    # --- what is wanted -------------------------------------------------------------------------

    def announce(self, upcoming: Iterable[ExpertKey]) -> None:
        """Experts that are likely to be needed, in this order, as far as there are slots."""
        room = self.num_streaming_slots - sum(
            not load.is_required for load in self._passing.values()
        )
        for key in upcoming:
            if room <= 0:
                return
            load = self._loads.get(key)
            if load is None:
                self._queues.announced.append(self._new(key))
                room -= 1
            elif load.num_users or load.is_kept:
                load.is_wanted_again = True

    def require(self, key: ExpertKey) -> None:
        """An expert that is certain to be computed."""
        load = self._loads.get(key) or self._new(key)
        load.is_required, load.is_dropped, load.is_kept = True, False, False
        if load.has_chunks_left and load not in self._queues.required:
            self._queues.discard(load)
            self._queues.required.append(load)

    def hurry(self, key: ExpertKey) -> None:
        """A required expert without which nothing goes on: it comes first, and where there is no
        other slot takes that of a required one that is not in use."""
        self._awaited = load = self._loads[key]
        if load.has_chunks_left:
            self._queues.discard(load)
            self._queues.required.insert(0, load)

    def withdraw(self, layer: int, *, keep: Collection[int] = ()) -> None:
        """Announced experts of a layer are not wanted any more."""
        for load in [load for load in self._of(layer) if load.key.expert not in keep]:
            if load.is_announced:
                self._drop(load)

    def forget(self) -> None:
        """Nothing is required any more, after a pass that was given up."""
        for load in list(self._loads.values()):
            load.is_required = load.is_kept = False
            load.num_users = 0
        self._queues.announced[:0] = self._queues.required
        self._queues.required.clear()

    # --- computing ------------------------------------------------------------------------------

    def use(self, key: ExpertKey) -> int:
        """A computation with an expert that has arrived is launched; returns its slot."""
        load = self._loads[key]
        assert load.is_ready and load.slot is not None, f"{key} is not there"
        load.num_users += 1
        load.is_required = False
        return load.slot

    def finish(self, key: ExpertKey, *, keep: bool) -> None:
        """A computation has ended; the expert stays if it may be used again."""
        load = self._loads[key]
        load.num_users -= 1
        load.is_kept = keep and not (load.is_required or load.is_resident)
        if load.is_announced:
            self._let_go(load)

    def release(self, layer: int) -> None:
        """Experts of a layer that were kept are not needed any more, nor are announced ones."""
        for load in list(self._of(layer)):
            load.is_kept = False
            if load.is_announced:
                self._let_go(load)

    def state(self, key: ExpertKey) -> State:
        """Where an expert is."""
        load = self._loads.get(key)
        return load.state if load else "absent"

    def is_ready(self, key: ExpertKey) -> bool:
        """Whether an expert can be computed now."""
        load = self._loads.get(key)
        return load is not None and load.is_ready

    def first_ready(self, keys: Iterable[ExpertKey]) -> ExpertKey | None:
        """The one of `keys` to be computed first: a resident one, or the first that arrived."""
        loads = (self._loads.get(key) for key in keys)
        ready = (load for load in loads if load is not None and load.is_ready)
        first = min(ready, key=lambda load: (not load.is_resident, load.arrival), default=None)
        return first.key if first else None

    def slot_of(self, key: ExpertKey) -> int | None:
        """The slot of an expert, if it has one."""
        load = self._loads.get(key)
        return load.slot if load else None

    def is_missing(self, key: ExpertKey) -> bool:
        """Whether an expert is asked for and has not arrived."""
        load = self._loads.get(key)
        return load is not None and not load.is_ready

    def holds(self, key: ExpertKey) -> bool:
        """Whether an expert is here or asked for."""
        return key in self._loads

    def is_settled(self, layer: int) -> bool:
        """Whether no more experts of a layer can arrive before others are computed."""
        of_layer = [load for load in self._passing.values() if load.key.layer == layer]
        if all(load.is_ready for load in of_layer):
            return True
        moving = any(load.slot is not None and not load.is_ready for load in of_layer)
        others = (load for load in self._passing.values() if load.key.layer != layer)
        leaving = any(load.is_kept or load.num_users or load.is_dropped for load in others)
        return not (moving or leaving or self._free)

    # --- moving ---------------------------------------------------------------------------------

    def next_chunk(self, available: Callable[[Load], bool] = lambda load: True) -> Chunk | None:
        """The most urgent chunk that has a slot to go to; it counts as in flight from now on.

        `available` tells whether the next chunk of a load can be had from where it comes.
        """
        load = self._most_urgent(available)
        if load is None:
            return None
        assert load.slot is not None, "it has been given one"
        chunk = Chunk(load, load.num_issued, load.slot)
        load.num_issued += 1
        load.num_in_flight += 1
        if not load.has_chunks_left:
            self._queues.discard(load)
        return chunk

    def finish_chunk(self, chunk: Chunk) -> None:
        """A chunk has arrived."""
        load = chunk.load
        load.num_in_flight -= 1
        if load.is_ready:
            self._num_arrived += 1
            load.arrival = self._num_arrived
        if load.is_dropped and load.num_in_flight == 0:
            self._drop(load)

    def lose_chunk(self, chunk: Chunk) -> None:
        """A chunk could not be moved: its expert has to come anew, if anybody asks for it."""
        load = chunk.load
        load.num_in_flight -= 1
        load.is_required = load.is_kept = False
        self._drop(load)

    def check_integrity(self) -> None:
        """Asserts that each slot has one owner and that the queues hold only live loads."""
        owned = [load.slot for load in self._loads.values() if load.slot is not None]
        assert sorted(owned + self._free) == list(range(self.num_slots)), "slot owners differ"
        for queue in (self._queues.required, self._queues.announced):
            assert all(self._loads.get(load.key) is load for load in queue), "dead load queued"
            assert len(set(map(id, queue))) == len(queue), "load queued twice"

    # --- inside ---------------------------------------------------------------------------------

    def _of(self, layer: int) -> Iterator[Load]:
        return (load for load in list(self._loads.values()) if load.key.layer == layer)

    def _new(self, key: ExpertKey) -> Load:
        load = self._loads[key] = self._passing[key] = Load(key, self._num_chunks[key])
        return load

    def _let_go(self, load: Load) -> None:
        """Nobody needs a load for this step any more."""
        if load.is_wanted_again:
            load.is_wanted_again = False
        else:
            self._drop(load)

    def _drop(self, load: Load) -> None:
        """Gives up a load; its slot is free once no chunk is on its way into it."""
        self._queues.discard(load)
        load.is_dropped = True
        if load.num_in_flight == 0:
            del self._loads[load.key], self._passing[load.key]
            self.on_drop(load.key)
            if load.slot is not None:
                self._free.append(load.slot)
                load.slot = None

    def _most_urgent(self, available: Callable[[Load], bool]) -> Load | None:
        is_full = False
        for load in self._queues.required:
            if not available(load):
                continue
            # What could not be freed for one cannot be freed for another, but for the one awaited.
            is_hopeless = is_full and load is not self._awaited
            if load.slot is not None or (not is_hopeless and self._take_slot(load, displace=True)):
                return load
            is_full = True
        for load in self._queues.announced:
            if available(load) and (load.slot is not None or self._take_slot(load, displace=False)):
                return load
        return None

    def _take_slot(self, load: Load, *, displace: bool) -> bool:
        if displace and not self._free and not self._make_room() and load is self._awaited:
            self._give_back()
        if self._free:
            load.slot = self._free.pop()
        return load.slot is not None

    def _make_room(self) -> bool:
        """Frees the slot of a load that has no claim to it, if one can be freed now: of announced
        ones that of the last, then one of those that have been computed."""
        claims: tuple[Callable[[Load], bool], ...] = (
            lambda load: load.is_announced,
            lambda load: load.is_kept and not load.num_users,
        )
        for unclaimed in claims:
            for load in reversed(self._passing.values()):
                if unclaimed(load) and load.slot is not None and load.num_in_flight == 0:
                    self._drop(load)
                    return True
        return False

    def _give_back(self) -> None:
        """Takes the slot of the last required load that is not in use, which has to come again."""
        for load in reversed(list(self._loads.values())):
            if (
                load.is_required
                and load is not self._awaited
                and not (load.is_resident or load.num_users or load.num_in_flight)
                and load.slot is not None
            ):
                self._free.append(load.slot)
                load.slot, load.num_issued = None, 0
                if load not in self._queues.required:
                    self._queues.required.append(load)
                return
