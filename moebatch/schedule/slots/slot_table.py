"""Who owns which slot of a level: the free list, or exactly one load."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from moebatch.schedule.slots.cache import Cache
from moebatch.schedule.slots.expert_load import ExpertKey, Load


class SlotTable:
    """Slots of one level, and the loads that are in them or wait for them.

    Loads with chunks left to send stand in one of two lists: certain ones in `required`, likely
    ones in `prefetched`, each in the order in which they are to come.
    """

    def __init__(
        self,
        num_chunks: Mapping[ExpertKey, int],
        *,
        num_slots: int,
        resident: Collection[ExpertKey],
        cache: Cache,
    ) -> None:
        self.num_slots = num_slots + len(resident) + cache.num_slots
        self.num_streaming_slots = num_slots
        """Those for experts that come and go."""
        self.num_vacancies = 0
        """Slots among them that are waiting for an expert to stay in one."""
        self.loads: dict[ExpertKey, Load] = {}
        self.passing: dict[ExpertKey, Load] = {}
        """Those that are not resident."""
        self.required: list[Load] = []
        self.prefetched: list[Load] = []
        self.cache = cache
        self.on_evict: Callable[[ExpertKey], None] = lambda key: None
        """Is called with every expert that has left."""
        self._num_chunks = num_chunks
        self._num_passed_over = 0
        self._free = list(range(self.num_slots))
        self._num_streamed = Counter(key.layer for key in num_chunks)
        """By layer, experts that are not resident."""
        for key in resident:
            load = self.loads[key] = Load(key, num_chunks[key], is_resident=True)
            self._num_streamed[key.layer] -= 1
            self.take_slot(load)
            self.prefetched.append(load)

    def of(self, layer: int) -> list[Load]:
        """Loads of a layer that are not resident."""
        return [load for load in self.passing.values() if load.key.layer == layer]

    def add(self, key: ExpertKey) -> Load:
        """A new load, without a slot."""
        load = self.loads[key] = self.passing[key] = Load(key, self._num_chunks[key])
        return load

    def evict(self, load: Load) -> None:
        """Gives up a load; its slot is free once no chunk is on its way into it."""
        self.unlist(load)
        load.is_evicted = True
        if load.is_cached:
            self.cache.leave(load)
        if load.num_in_flight == 0:
            del self.loads[load.key], self.passing[load.key]
            self.on_evict(load.key)
            if load.slot is not None:
                self.free_slot(load)

    def unlist(self, load: Load) -> None:
        """A load has nothing left to send, or is not wanted any more."""
        for listed in (self.required, self.prefetched):
            if load in listed:
                listed.remove(load)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def take_slot(self, load: Load) -> None:
        """A free slot becomes that of a load."""
        load.slot = self._free.pop()

    def free_slot(self, load: Load) -> None:
        """The slot of a load has no owner any more."""
        assert load.slot is not None, f"{load.key} has no slot"
        self._free.append(load.slot)
        load.slot = None

    @property
    def can_grow(self) -> bool:
        """Whether there are experts that neither stay nor will in a slot that waits for one."""
        num_homes = self.num_slots - self.num_streaming_slots + self.num_vacancies
        return num_homes < len(self._num_chunks)

    def grow(self) -> int:
        """One slot more, whose number is returned. An expert that is computed from now on stays
        for good; layers take turns."""
        assert self.can_grow, "all experts are resident"
        self._free.append(self.num_slots)
        self.num_slots += 1
        self.num_streaming_slots += 1
        self.num_vacancies += 1
        return self.num_slots - 1

    def offer_home(self, load: Load) -> None:
        """Makes an expert that has been computed resident, if a slot is waiting for one and its
        layer has no more residents than others: no stretch of a pass should load more. Each expert
        that is computed is asked, so the layer that is due comes within a pass; but not if its
        experts are chosen no more."""
        if load.is_resident or not self.num_vacancies:
            return
        self._num_passed_over += 1
        if self._num_passed_over <= len(self._num_chunks) and not self._is_due(load.key.layer):
            return
        self._num_passed_over = 0
        self._num_streamed[load.key.layer] -= 1
        self.num_vacancies -= 1
        self.num_streaming_slots -= 1
        if load.is_cached:
            self.cache.leave(load)
        load.is_resident = True
        del self.passing[load.key]

    def _is_due(self, layer: int) -> bool:
        """Whether no layer has more experts that are not resident."""
        return self._num_streamed[layer] == max(self._num_streamed.values())

    def from_last(self) -> Iterator[Load]:
        """Loads that are not resident, the one that was added last first."""
        return reversed(self.passing.values())

    def check_integrity(self) -> None:
        """Asserts that each slot has one owner and that the lists hold only live loads."""
        owned = [load.slot for load in self.loads.values() if load.slot is not None]
        assert sorted(owned + self._free) == list(range(self.num_slots)), "slot owners differ"
        residents = [load for load in self.loads.values() if load.is_resident]
        staying = len(residents) + self.cache.num_slots
        assert staying + self.num_streaming_slots == self.num_slots, "residents differ"
        self.cache.check_integrity(self.loads)
        assert all(load.slot is not None for load in residents), "a resident has no slot"
        counted = Counter(key.layer for key in self._num_chunks)
        counted.subtract(load.key.layer for load in residents)
        assert self._num_streamed == counted, "experts that are streamed are miscounted"
        passing = {key for key, load in self.loads.items() if not load.is_resident}
        assert passing == set(self.passing), "residents do not pass"
        listed = [*self.required, *self.prefetched]
        assert all(self.loads.get(load.key) is load for load in listed), "dead load listed"
        assert len(set(map(id, listed))) == len(listed), "load listed twice"
