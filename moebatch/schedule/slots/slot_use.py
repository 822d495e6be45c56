"""Computing with experts in slots: which are there, which is in use, which may leave."""

from collections.abc import Iterable

from moebatch.schedule.slots.expert_load import ExpertKey, Load, State
from moebatch.schedule.slots.slot_table import SlotTable


class SlotUse:
    """The half of a `SlotQueue` that lanes which compute need."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    # --- what is there --------------------------------------------------------------------------

    def state(self, key: ExpertKey) -> State:
        """Where an expert is."""
        load = self._table.loads.get(key)
        return load.state if load else "absent"

    def is_ready(self, key: ExpertKey) -> bool:
        """Whether an expert can be computed now."""
        load = self._table.loads.get(key)
        return load is not None and load.is_ready

    def is_missing(self, key: ExpertKey) -> bool:
        """Whether an expert is asked for and has not arrived."""
        load = self._table.loads.get(key)
        return load is not None and not load.is_ready

    def holds(self, key: ExpertKey) -> bool:
        """Whether an expert is here or asked for."""
        return key in self._table.loads

    def slot_of(self, key: ExpertKey) -> int | None:
        """The slot of an expert, if it has one."""
        load = self._table.loads.get(key)
        return load.slot if load else None

    def first_ready(self, keys: Iterable[ExpertKey]) -> ExpertKey | None:
        """The one of `keys` to be computed first: a resident one, or the first that arrived."""
        loads = (self._table.loads.get(key) for key in keys)
        ready = (load for load in loads if load is not None and load.is_ready)
        first = min(ready, key=lambda load: (not load.is_resident, load.arrival), default=None)
        return first.key if first else None

    def is_settled(self, layer: int) -> bool:
        """Whether no more experts of a layer can arrive before others are computed."""
        passing = self._table.passing.values()
        of_layer = [load for load in passing if load.key.layer == layer]
        if all(load.is_ready for load in of_layer):
            return True
        moving = any(load.slot is not None and not load.is_ready for load in of_layer)
        others = (load for load in passing if load.key.layer != layer)
        leaving = any(load.is_kept or load.num_users or load.is_evicted for load in others)
        return not (moving or leaving or self._table.has_free_slot)

    # --- what is in use -------------------------------------------------------------------------

    def use(self, key: ExpertKey, *, is_last: bool = False) -> int:
        """A computation with an expert that has arrived is launched, the last one of its step or
        not; returns its slot."""
        load = self._table.loads[key]
        assert load.is_ready and load.slot is not None, f"{key} is not there"
        load.num_users += 1
        load.is_required, load.is_leaving = False, is_last
        return load.slot

    def finish(self, key: ExpertKey, *, keep: bool) -> None:
        """A computation has ended; the expert stays if it may be used again, if its layer's cache
        keeps it, or becomes resident where a slot has been added for one."""
        load = self._table.loads[key]
        load.num_users -= 1
        load.is_leaving = False
        self._table.offer_home(load)
        load.is_kept = keep and not (load.is_required or load.is_resident)
        if not (load.is_resident or load.is_claimed):
            self._computed(load)

    def release(self, layer: int) -> None:
        """Experts of a layer that were kept are not needed any more, nor are prefetched ones."""
        for load in self._table.of(layer):
            was_kept, load.is_kept = load.is_kept, False
            if was_kept and not load.is_claimed:
                self._computed(load)
            elif load.is_prefetched:
                self._let_go(load)

    def _computed(self, load: Load) -> None:
        """A load has been used as often as its step needs it."""
        leaving = self._table.cache.take(load)
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
        if not self._table.cache.keep_idle(load):
            self._table.evict(load)
