"""Who owns which slot of a level: the free list, or exactly one load."""

from collections.abc import Callable, Collection, Iterator, Mapping

from moebatch.schedule.expert_load import ExpertKey, Load


class SlotTable:
    """Slots of one level, and the loads that are in them or wait for them.

    Loads with chunks left to send stand in one of two lists: certain ones in `required`, likely
    ones in `announced`, each in the order in which they are to come.
    """

    def __init__(
        self,
        num_chunks: Mapping[ExpertKey, int],
        *,
        num_slots: int,
        resident: Collection[ExpertKey],
    ) -> None:
        """`num_slots` are those for experts that come and go; residents have their own."""
        self.num_slots = num_slots + len(resident)
        self.loads: dict[ExpertKey, Load] = {}
        self.passing: dict[ExpertKey, Load] = {}
        """Those that are not resident."""
        self.required: list[Load] = []
        self.announced: list[Load] = []
        self.on_drop: Callable[[ExpertKey], None] = lambda key: None
        self._num_chunks = num_chunks
        self._free = list(range(self.num_slots))
        for key in resident:
            load = self.loads[key] = Load(key, num_chunks[key], is_resident=True)
            self.take_slot(load)
            self.announced.append(load)

    def of(self, layer: int) -> list[Load]:
        """All loads of a layer."""
        return [load for load in self.loads.values() if load.key.layer == layer]

    def add(self, key: ExpertKey) -> Load:
        """A new load, without a slot."""
        load = self.loads[key] = self.passing[key] = Load(key, self._num_chunks[key])
        return load

    def drop(self, load: Load) -> None:
        """Gives up a load; its slot is free once no chunk is on its way into it."""
        self.unlist(load)
        load.is_dropped = True
        if load.num_in_flight == 0:
            del self.loads[load.key], self.passing[load.key]
            self.on_drop(load.key)
            if load.slot is not None:
                self.free_slot(load)

    def unlist(self, load: Load) -> None:
        """A load has nothing left to send, or nobody wants it."""
        for listed in (self.required, self.announced):
            if load in listed:
                listed.remove(load)

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot has no owner."""
        return bool(self._free)

    def take_slot(self, load: Load) -> None:
        """A free slot becomes that of a load."""
        load.slot = self._free.pop()

    def free_slot(self, load: Load) -> None:
        """The slot of a load has no owner any more."""
        assert load.slot is not None, f"{load.key} has no slot"
        self._free.append(load.slot)
        load.slot = None

    def from_last(self) -> Iterator[Load]:
        """Loads that are not resident, the one that was added last first."""
        return reversed(self.passing.values())

    def check_integrity(self) -> None:
        """Asserts that each slot has one owner and that the lists hold only live loads."""
        owned = [load.slot for load in self.loads.values() if load.slot is not None]
        assert sorted(owned + self._free) == list(range(self.num_slots)), "slot owners differ"
        for listed in (self.required, self.announced):
            assert all(self.loads.get(load.key) is load for load in listed), "dead load listed"
            assert len(set(map(id, listed))) == len(listed), "load listed twice"
