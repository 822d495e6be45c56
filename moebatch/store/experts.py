"""Which experts are in memory, which come next, and in what order they can be computed."""

import threading
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from moebatch.store.direct import DirectFile
from moebatch.store.memory import Arena
from moebatch.store.record import Piece, Record
from moebatch.store.statistics import ReadStatistics


class ExpertKey(NamedTuple):
    """Which expert of which layer."""

    layer: int
    expert: int


@dataclass(slots=True, eq=False)
class _Load:
    """An expert that is in a slot or on its way into one."""

    key: ExpertKey
    record: Record
    is_resident: bool
    slot: int | None = None
    num_issued: int = 0
    num_in_flight: int = 0
    is_required: bool = False
    is_dropped: bool = False

    @property
    def is_ready(self) -> bool:
        return self.num_issued == len(self.record.pieces) and self.num_in_flight == 0

    @property
    def has_pieces_left(self) -> bool:
        return self.num_issued < len(self.record.pieces)


@dataclass(slots=True)
class _Queues:
    """Loads with pieces left to read: certain ones first, then likely ones, each in order."""

    required: list[_Load] = field(default_factory=list)
    announced: list[_Load] = field(default_factory=list)

    def discard(self, load: _Load) -> None:
        for queue in (self.required, self.announced):
            if load in queue:
                queue.remove(load)


class ExpertStore:
    """Experts in slots, filled by reader threads ahead of the compute.

    The compute side *announces* experts that are likely to be needed and *requires* those that a
    gate has chosen. Required experts are read first, a read in flight is never cancelled, and a
    required expert takes the slot of an announced one when no slot is free. So a run cannot block
    with one slot, and with several the reader works while the experts before it are computed.

    Who owns a slot: the free list, or exactly one load. A load that is resident keeps its slot for
    good; a required one until the compute has asked for the next; an announced one until it is
    required, withdrawn or displaced. `check_integrity` verifies this.
    """

    def __init__(
        self,
        records: Mapping[ExpertKey, Record],
        *,
        num_slots: int,
        resident: Collection[ExpertKey] = (),
        num_readers: int = 2,
    ) -> None:
        assert num_slots >= 1 or len(resident) == len(records), "streaming needs a slot"
        self.statistics = ReadStatistics()
        self._records = records
        self._slot_bytes = slot_bytes(records.values())
        self._num_streaming_slots = num_slots
        self._num_slots = num_slots + len(resident)
        self._arena = Arena(self._num_slots * self._slot_bytes)
        self._files = {path: DirectFile(path) for path in _paths(records.values())}
        self._free = list(range(self._num_slots))
        self._loads: dict[ExpertKey, _Load] = {}
        self._queues = _Queues()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        for key in resident:
            self._enqueue(_Load(key, records[key], is_resident=True, slot=self._free.pop()))
        self._readers = [
            threading.Thread(target=self._read_pieces, name=f"reader-{i}", daemon=True)
            for i in range(num_readers)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def reads_past_page_cache(self) -> bool:
        """Whether every file is read with O_DIRECT."""
        return all(file.is_direct for file in self._files.values())

    def announce(self, upcoming: Iterable[ExpertKey]) -> None:
        """Reads `upcoming` experts ahead, in this order, as far as there are slots to hold them."""
        with self._changed:
            room = self._num_streaming_slots - sum(
                not (load.is_resident or load.is_required) for load in self._loads.values()
            )
            for key in upcoming:
                if room <= 0:
                    break
                if key not in self._loads:
                    self._enqueue(_Load(key, self._records[key], is_resident=False))
                    room -= 1
            self._changed.notify_all()

    def require(
        self, layer: int, experts: Collection[int]
    ) -> Generator[tuple[int, tuple[Tensor, ...]], None, None]:
        """Each of `experts` with its tensors, in the order in which they are at hand.

        Reading starts with the call, so what is announced after it comes behind them.
        The tensors are valid until the next one is asked for. Announced experts of the layer that
        are not among them are given up. Raises what a reader failed with.
        """
        with self._changed:
            self._withdraw(layer, keep=experts)
            waiting = [self._demand(ExpertKey(layer, expert)) for expert in experts]
            self._changed.notify_all()
        return self._as_ready(waiting)

    def forget_required(self) -> None:
        """Makes required experts announced ones again, after a pass that was given up."""
        with self._changed:
            for load in self._loads.values():
                load.is_required = False
            self._queues.announced[:0] = self._queues.required
            self._queues.required.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stops the readers after the pieces in flight and closes the files."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for reader in self._readers:
            reader.join()
        for file in self._files.values():
            file.close()

    def check_integrity(self) -> None:
        """Asserts that each slot has one owner and that the queues hold only live loads."""
        with self._changed:
            owned = [load.slot for load in self._loads.values() if load.slot is not None]
            assert sorted(owned + self._free) == list(range(self._num_slots)), "slot owners differ"
            for queue in (self._queues.required, self._queues.announced):
                assert all(self._loads.get(load.key) is load for load in queue), "dead load queued"

    # --- compute side ---------------------------------------------------------------------------

    def _as_ready(
        self, waiting: list[_Load]
    ) -> Generator[tuple[int, tuple[Tensor, ...]], None, None]:
        while waiting:
            load = self._next_ready(waiting)
            waiting.remove(load)
            assert load.slot is not None
            try:
                yield (
                    load.key.expert,
                    load.record.tensors(self._arena, load.slot * self._slot_bytes),
                )
            finally:
                self._release(load)

    def _enqueue(self, load: _Load) -> None:
        self._loads[load.key] = load
        self._queues.announced.append(load)

    def _demand(self, key: ExpertKey) -> _Load:
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _Load(key, self._records[key], is_resident=False)
        load.is_required, load.is_dropped = True, False
        if load.has_pieces_left:
            self._queues.discard(load)
            self._queues.required.append(load)
        return load

    def _withdraw(self, layer: int, *, keep: Collection[int]) -> None:
        unwanted = [
            load
            for load in self._loads.values()
            if load.key.layer == layer
            and load.key.expert not in keep
            and not (load.is_resident or load.is_required)
        ]
        for load in unwanted:
            self._drop(load)

    def _drop(self, load: _Load) -> None:
        """Gives up an announced load; its slot is free once no read writes to it."""
        self._queues.discard(load)
        load.is_dropped = True
        if load.num_in_flight == 0:
            self._free_slot(load)

    def _free_slot(self, load: _Load) -> None:
        del self._loads[load.key]
        if load.slot is not None:
            self._free.append(load.slot)
            load.slot = None

    def _next_ready(self, waiting: Sequence[_Load]) -> _Load:
        """The first load that can be computed now; waits until there is one."""
        with self._changed:
            start = time.perf_counter()
            while self._failure is None:
                for load in waiting:
                    if load.is_ready:
                        self.statistics.waited_s += time.perf_counter() - start
                        return load
                self._changed.wait()
            raise self._failure

    def _release(self, load: _Load) -> None:
        with self._changed:
            load.is_required = False
            if not load.is_resident:
                self._free_slot(load)
            self._changed.notify_all()

    # --- reader side ----------------------------------------------------------------------------

    def _read_pieces(self) -> None:
        while (issued := self._take_piece()) is not None:
            load, piece, start = issued
            failure: BaseException | None = None
            try:
                target = self._arena.view(start + piece.buffer_offset, piece.num_bytes)
                self._files[piece.path].read(target, piece.file_offset)
            except BaseException as error:
                # Whatever ends a reader must reach the compute side, which waits for it.
                failure = error
            self._finish_piece(load, piece, failure)

    def _take_piece(self) -> tuple[_Load, Piece, int] | None:
        """The most urgent piece that has a slot, and where the slot starts; None at the end."""
        with self._changed:
            while not (self._closing or self._failure):
                load = self._most_urgent()
                if load is not None:
                    piece = load.record.pieces[load.num_issued]
                    load.num_issued += 1
                    load.num_in_flight += 1
                    if not load.has_pieces_left:
                        self._queues.discard(load)
                    self.statistics.busy.enter()
                    assert load.slot is not None
                    return load, piece, load.slot * self._slot_bytes
                self._changed.wait()
            return None

    def _most_urgent(self) -> _Load | None:
        for load in self._queues.required:
            if load.slot is not None or self._take_slot(load, displace=True):
                return load
        for load in self._queues.announced:
            if load.slot is not None or self._take_slot(load, displace=False):
                return load
        return None

    def _take_slot(self, load: _Load, *, displace: bool) -> bool:
        if not self._free and displace:
            self._displace_one()
        if self._free:
            load.slot = self._free.pop()
        return load.slot is not None

    def _displace_one(self) -> None:
        """Frees the slot of the announced load that is needed last, if one can be freed now."""
        for load in reversed(self._loads.values()):
            is_announced = not (load.is_resident or load.is_required)
            if is_announced and load.slot is not None and load.num_in_flight == 0:
                self._drop(load)
                return

    def _finish_piece(self, load: _Load, piece: Piece, failure: BaseException | None) -> None:
        with self._changed:
            self.statistics.busy.leave()
            self.statistics.num_bytes += piece.num_bytes
            self._failure = self._failure or failure
            load.num_in_flight -= 1
            if load.is_dropped and load.num_in_flight == 0:
                self._drop(load)
            self._changed.notify_all()


def slot_bytes(records: Iterable[Record]) -> int:
    """Room that any of `records` fits in: the size of a slot."""
    return max((record.num_bytes for record in records), default=0)


def _paths(records: Iterable[Record]) -> set[Path]:
    return {piece.path for record in records for piece in record.pieces}
