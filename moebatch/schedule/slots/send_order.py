"""Which expert is sent next, and whose slot it takes."""

from collections.abc import Callable

from moebatch.schedule.slots.expert_load import Load
from moebatch.schedule.slots.slot_table import SlotTable


class SendOrder:
    """Required experts in their order, then prefetched ones in theirs, as far as there are slots.

    Prefetched experts take free slots, and those that the cache gives up for them. Required ones
    also take the slot of one that has no claim to it; the one that is awaited, in the end, that of
    another required one.
    """

    def __init__(self, table: SlotTable) -> None:
        self.awaited: Load | None = None
        """What nothing goes on without."""
        self._table = table

    def next(self, available: Callable[[Load], bool]) -> Load | None:
        """The most urgent load that has a slot, or is given one now; only of those `available`."""
        is_full = False
        for load in self._table.required:
            if not available(load):
                continue
            # What could not be freed for one cannot be freed for another, but for the one awaited.
            is_hopeless = is_full and load is not self.awaited
            if load.slot is not None or (not is_hopeless and self._find_slot(load)):
                return load
            is_full = True
        for load in self._table.prefetched:
            if available(load) and (load.slot is not None or self._find_spare(load)):
                return load
        return None

    def _find_spare(self, load: Load) -> bool:
        """Gives a prefetched load a slot that no other one needs as much; whether there was one."""
        if not self._table.has_free_slot:
            self._give_way(load, is_certain=False)
        return self._take_free(load)

    def _find_slot(self, load: Load) -> bool:
        """Gives a required load a slot, another's if need be; whether there was one."""
        if not (
            self._table.has_free_slot
            or self._give_way(load, is_certain=True)
            or self._make_room()
            or load is not self.awaited
        ):
            self._take_back()
        return self._take_free(load)

    def _take_free(self, load: Load) -> bool:
        if self._table.has_free_slot:
            self._table.take_slot(load)
        return load.slot is not None

    def _give_way(self, load: Load, *, is_certain: bool) -> bool:
        """Frees the slot of an expert that stays in case; whether there was one."""
        leaving = self._table.cache.give_way(load, is_certain=is_certain)
        if leaving is not None:
            self._table.evict(leaving)
        return leaving is not None

    def _make_room(self) -> bool:
        """Frees the slot of a load that has no claim to it, if one can be freed now: of prefetched
        ones that of the last, then one of those that have been computed."""
        claims: tuple[Callable[[Load], bool], ...] = (
            lambda load: load.is_prefetched,
            lambda load: load.is_kept and not (load.num_users or self._has_own_slot(load)),
        )
        for unclaimed in claims:
            for load in self._table.from_last():
                if load.slot is not None and load.num_in_flight == 0 and unclaimed(load):
                    self._table.evict(load)
                    return True
        return False

    def _take_back(self) -> None:
        """Frees the slot of the last required load that is not in use, which has to come again."""
        for load in self._table.from_last():
            if (
                load.is_required
                and not (load.num_users or load.num_in_flight or self._has_own_slot(load))
                and load.slot is not None
            ):
                if load.is_cached:
                    self._table.cache.leave(load)
                self._table.free_slot(load)
                load.num_issued = 0
                if load not in self._table.required:
                    self._table.required.append(load)
                return

    def _has_own_slot(self, load: Load) -> bool:
        """Whether no other expert gains anything by its leaving."""
        return load.is_cached and not self._table.cache.is_shared
