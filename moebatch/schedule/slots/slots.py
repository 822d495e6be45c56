"""Experts in the slots of a level: which are wanted, which is moved next, which can be computed.

Pure bookkeeping: lanes that move bytes ask what to move next and say when it is done, lanes that
compute say what they need. Reader threads drive it as well as a virtual clock does.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import takewhile

from moebatch.schedule.slots.cache import Cache
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey, Load, State
from moebatch.schedule.slots.send_order import SendOrder
from moebatch.schedule.slots.slot_table import SlotTable


class SlotQueue(SlotTable):
    """Slots of one level, and the queue of experts that want to be in them.

    Prefetched experts take free slots, and those of experts that the cache gives up for them.
    Required ones come first, and take the slot of one of these, of a prefetched one, of the one
    that is needed last, when none is free; next those of experts that have been computed already
    and are kept until their step is over. A chunk in flight is never cancelled, so a required
    expert waits for one chunk at most. An expert that is required is never given up before it has
    been computed, but for the one that the driver awaits when there is no other slot.
    """

    def __init__(
        self,
        num_chunks: Mapping[ExpertKey, int],
        *,
        num_slots: int,
        resident: Collection[ExpertKey] = (),
        cache: Cache | None = None,
    ) -> None:
        """`num_slots` are those for experts that come and go; residents, and those that `cache`
        keeps, have their own."""
        super().__init__(num_chunks, num_slots=num_slots, resident=resident, cache=cache or Cache())
        self._order = SendOrder(self)
        self.num_arrived = 0
        """How many experts have arrived so far, those counted that came again."""
        self._arrivals: dict[ExpertKey, int] = {}
        """The last arrival of each expert that ever arrived, in order: they are computed so."""

    def fill_residents(self) -> None:
        """Counts residents as arrived, where nothing is really moved."""
        for load in self.loads.values():
            load.num_issued = load.num_chunks
        self.prefetched.clear()

    # --- what is there --------------------------------------------------------------------------

    def state(self, key: ExpertKey) -> State:
        load = self.loads.get(key)
        return load.state if load else "absent"

    def is_ready(self, key: ExpertKey) -> bool:
        """Whether an expert can be computed now."""
        load = self.loads.get(key)
        return load is not None and load.is_ready

    def is_missing(self, key: ExpertKey) -> bool:
        """Whether an expert is asked for and has not arrived."""
        load = self.loads.get(key)
        return load is not None and not load.is_ready

    def holds(self, key: ExpertKey) -> bool:
        """Whether an expert is here or asked for."""
        return key in self.loads

    def slot_of(self, key: ExpertKey) -> int | None:
        load = self.loads.get(key)
        return load.slot if load else None

    def ready(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys` that can be computed now, in the order in which they should be: resident
        ones, then the others as they arrived."""
        loads = self.loads
        found = [load for key in keys if (load := loads.get(key)) is not None and load.is_ready]
        found.sort(key=lambda load: (not load.is_resident, self._arrivals.get(load.key, 0)))
        return [load.key for load in found]

    def arrived_after(self, number: int) -> list[ExpertKey]:
        """Those that have arrived since so many had, each once, in order."""
        last_first = reversed(self._arrivals.items())
        come = takewhile(lambda arrival: arrival[1] > number, last_first)
        return [key for key, _ in come][::-1]

    def is_settled(self, layer: int) -> bool:
        """Whether no more experts of a layer can arrive before others are computed."""
        passing = self.passing.values()
        of_layer = self.of(layer)
        if all(load.is_ready for load in of_layer):
            return True
        moving = any(load.slot is not None and not load.is_ready for load in of_layer)
        others = (load for load in passing if load.key.layer != layer)
        leaving = any(load.is_kept or load.num_users or load.is_evicted for load in others)
        return not (moving or leaving or self.has_free_slot)

    @property
    def are_held(self) -> bool:
        """Whether all slots hold experts that are required, so that none can come before one of
        them has been computed; not those that a layer's cache has for itself."""
        cache = self.cache
        held = (
            load.is_required and load.is_ready and (cache.is_shared or not load.is_cached)
            for load in self.passing.values()
        )
        num_slots = self.num_streaming_slots + (cache.num_slots if cache.is_shared else 0)
        return 0 < num_slots <= sum(held)

    # --- what is in use -------------------------------------------------------------------------

    def use(self, key: ExpertKey, *, is_last: bool = False) -> int:
        """A computation with an expert that has arrived is launched, the last one of its step or
        not; returns its slot."""
        load = self.loads[key]
        assert load.is_ready and load.slot is not None, f"{key} is not there"
        load.num_users += 1
        load.is_required, load.is_leaving = False, is_last
        return load.slot

    def finish(self, key: ExpertKey, *, keep: bool) -> None:
        """A computation has ended; the expert stays if it may be used again, if its layer's cache
        keeps it, or becomes resident where a slot has been added for one."""
        load = self.loads[key]
        load.num_users -= 1
        load.is_leaving = False
        self.offer_home(load)
        load.is_kept = keep and not load.is_required
        if not (load.is_resident or load.is_claimed):
            self._computed(load)

    def release(self, layer: int) -> None:
        """Experts of a layer that were kept are not needed any more, nor are prefetched ones."""
        # What the cache gives up meanwhile was not prefetched: it leaves, or a later step wants it.
        for load, was_prefetched in [(load, load.is_prefetched) for load in self.of(layer)]:
            was_kept, load.is_kept = load.is_kept, False
            if was_prefetched:
                self._let_go(load)
            elif was_kept and not load.is_claimed:
                self._computed(load)

    def _computed(self, load: Load) -> None:
        """A load has been used as often as its step needs it."""
        leaving = self.cache.take(load)
        if leaving is not None:
            self._let_go(leaving)

    def _let_go(self, load: Load) -> None:
        """A load is not needed for this step any more."""
        if load.is_wanted_again:
            load.is_wanted_again = False
        else:
            self._part_with(load)

    def _part_with(self, load: Load) -> None:
        """A load is not needed: it stays in case, or leaves."""
        if not self.cache.keep_idle(load):
            self.evict(load)

    # --- what is wanted -------------------------------------------------------------------------

    def prefetch(self, upcoming: Iterable[ExpertKey]) -> None:
        """Experts that are likely to be needed, in this order, as far as there are slots."""
        passing = self.passing.values()
        taken = sum(not (load.is_required or load.is_leaving or load.is_cached) for load in passing)
        room = self.num_streaming_slots - taken
        for key in upcoming:
            load = self.loads.get(key)
            if load is not None:
                load.is_wanted_again |= bool(load.num_users or load.is_kept or load.is_cached)
            elif room <= 0:
                return
            else:
                self.prefetched.append(self.add(key))
                room -= 1

    def require(self, key: ExpertKey) -> None:
        """An expert that is certain to be computed."""
        load = self.loads.get(key) or self.add(key)
        load.is_required, load.is_evicted, load.is_kept = True, False, False
        if load.has_chunks_left and load not in self.required:
            self.unlist(load)
            self.required.append(load)

    def hurry(self, key: ExpertKey) -> None:
        """A required expert without which nothing goes on: it comes first, and where there is no
        other slot takes that of a required one that is not in use."""
        self._order.awaited = load = self.loads[key]
        if load.has_chunks_left:
            self.unlist(load)
            self.required.insert(0, load)

    def withdraw(self, layer: int, *, keep: Collection[int] = ()) -> None:
        """Prefetched experts of a layer are not wanted any more."""
        for load in self.of(layer):
            if load.key.expert in keep:
                continue
            if load.is_prefetched:
                self._part_with(load)
            elif load.is_cached:
                load.is_wanted_again = False

    def forget(self) -> None:
        """Nothing is required any more, after a pass that was given up."""
        for load in self.loads.values():
            load.is_required = load.is_kept = load.is_wanted_again = False
            load.is_leaving, load.num_users = False, 0
        self._order.awaited = None
        self.prefetched[:0] = self.required
        self.required.clear()

    # --- what moves -----------------------------------------------------------------------------

    def next_chunk(self, available: Callable[[Load], bool] = lambda load: True) -> Chunk | None:
        """The most urgent chunk that has a slot to go to; it counts as in flight from now on.

        `available` says whether the next chunk of a load can be had from where it comes.
        """
        load = self._order.next(available)
        if load is None:
            return None
        assert load.slot is not None, "it has been given one"
        chunk = Chunk(load, load.num_issued, load.slot)
        load.num_issued += 1
        load.num_in_flight += 1
        if not load.has_chunks_left:
            self.unlist(load)
        return chunk

    def finish_chunk(self, chunk: Chunk) -> None:
        load = chunk.load
        load.num_in_flight -= 1
        if load.is_ready:
            self.num_arrived += 1
            self._arrivals.pop(load.key, None)  # it goes to the end
            self._arrivals[load.key] = self.num_arrived
        if load.is_evicted:
            self.evict(load)

    def lose_chunk(self, chunk: Chunk) -> None:
        """A chunk could not be moved: its expert has to come anew, if it is still wanted."""
        load = chunk.load
        load.num_in_flight -= 1
        load.num_issued = 0
        if load.is_resident:
            self.unlist(load)
            self.prefetched.append(load)
        else:
            self.evict(load)
