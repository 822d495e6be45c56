"""Experts in main memory, read from their files by threads of their own."""

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping

from torch import Tensor

from moebatch.errors import OutOfMemory
from moebatch.schedule.slots.cache import Cache
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.store.memory import Arena, is_out_of_memory
from moebatch.store.monitor import End, Monitor
from moebatch.store.record import Record, open_files, slot_bytes
from moebatch.store.statistics import ReadStatistics

OnRead = Callable[[ExpertKey, int, int, int, float, float], None]
"""Told of a read: expert, number of the piece, slot, number of the reader, start and end in seconds
of `time.perf_counter`. Called by the reader, without the lock, before the piece counts as there."""


class ExpertStore:
    """Experts in slots, filled by reader threads ahead of the compute.

    The compute side *announces* experts that are likely to be needed and *requires* those that a
    gate has chosen. Which of them is read next, and into which slot, is the business of `slots`; a
    piece of a `Record` is a chunk there. So a run cannot block with one slot, and with several the
    reader works while the experts before it are computed. An expert is required by one party at a
    time: it may leave when that one has had it.

    `monitor` guards `slots`, here and for everybody else who looks at them; it is told whenever
    something has been read. Whoever waits on it by himself has to look at `failure` as well.
    """

    def __init__(
        self,
        records: Mapping[ExpertKey, Record],
        *,
        num_slots: int,
        resident: Collection[ExpertKey] = (),
        cache: Cache | None = None,
        num_readers: int = 2,
        monitor: Monitor | None = None,
        pinned: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        """`cache` keeps experts that have been computed. `monitor` may be shared with other levels;
        `pinned` slots are what a CUDA device copies from beside other work."""
        self.statistics = ReadStatistics()
        self.records = records
        self.monitor = monitor or Monitor()
        self.failure: BaseException | None = None
        """What a reader has failed with."""
        self.is_pinned = pinned
        num_pieces = {key: len(record.pieces) for key, record in records.items()}
        self.slots = SlotQueue(num_pieces, num_slots=num_slots, resident=resident, cache=cache)
        self.slot_bytes = slot_bytes(records.values())
        """Memory of a slot."""
        self._resident = tuple(resident)
        self._num_first_slots = self.slots.num_slots
        self._arena = Arena(self._num_first_slots * self.slot_bytes, pinned=pinned)
        self._more: list[Arena] = []
        """Slots that were added, each with memory of its own."""
        self._files = open_files(records.values())
        self._on_read = on_read
        self._closing = False
        self._readers = [
            threading.Thread(target=self._read_pieces, args=(i,), name=f"reader-{i}", daemon=True)
            for i in range(num_readers)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def reads_past_page_cache(self) -> bool:
        """Whether every file is read with O_DIRECT."""
        return all(file.is_direct for file in self._files.values())

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self._arena.num_bytes + sum(arena.num_bytes for arena in self._more)

    @property
    def can_grow(self) -> bool:
        """Whether there are experts that come and go, in memory that need not be pinned."""
        with self.monitor:
            return self.slots.can_grow and not self.is_pinned

    def grow(self) -> None:
        """Takes memory for one expert more, `slot_bytes`: one that is computed from now on stays.

        Raises OSError or MemoryError when the system refuses memory.
        """
        assert not self.is_pinned, "memory that a device copies from does not grow"
        arena = Arena(self.slot_bytes)
        with self.monitor:
            self._more.append(arena)
            slot = self.slots.grow()
            assert slot == self._num_first_slots + len(self._more) - 1, "one adds slots"
            self.statistics.num_grown += 1
            self.monitor.changed()

    def announce(self, upcoming: Iterable[ExpertKey]) -> None:
        """Reads `upcoming` experts ahead, in this order, as far as there are slots to hold them."""
        with self.monitor:
            self.slots.announce(upcoming)
            self.monitor.changed()

    def require(
        self, layer: int, experts: Collection[int]
    ) -> Generator[tuple[int, tuple[Tensor, ...]], None, None]:
        """Each of `experts` with its tensors, in the order in which they are at hand.

        Reading starts with the call, so what is announced after it comes behind them.
        The tensors are valid until the next one is asked for. Announced experts of the layer that
        are not among them are given up. Raises what a reader failed with.
        """
        waiting = [ExpertKey(layer, expert) for expert in experts]
        with self.monitor:
            self.slots.withdraw(layer, keep=experts)
            for key in waiting:
                self._require(key)
            self.monitor.changed()
        return self._as_ready(waiting)

    def hold(self, key: ExpertKey) -> None:
        """Waits until an expert is there, before all others, and keeps it until `let_go`.

        Raises what a reader failed with.
        """
        with self.monitor:
            self._require(key)
            if not self.slots.is_ready(key):
                self.slots.hurry(key)
                self.monitor.changed()
                self.wait(lambda: self.slots.is_ready(key))
            self.slots.use(key)

    def let_go(self, key: ExpertKey) -> None:
        """Frees the slot of an expert that was held, if it is not resident."""
        with self.monitor:
            self.slots.finish(key, keep=False)
            self.monitor.changed()

    def wait_for_residents(self) -> None:
        """Returns when all residents have been read. Raises what a reader failed with."""
        with self.monitor:
            self.wait(lambda: all(map(self.slots.is_ready, self._resident)))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition` holds. Called with the lock held.

        Raises what a reader failed with.
        """

        def holds() -> bool:
            if self.failure is not None:
                raise self.failure
            is_over = condition()
            assert is_over or not self._closing, "nothing is read any more"
            return is_over

        self.monitor.wait_for(holds)

    def tensors(self, key: ExpertKey) -> tuple[Tensor, ...]:
        """The tensors of an expert that is there, valid as long as it is in use; no copies."""
        return self.records[key].tensors(*self._place(self._slot(key)))

    def tensor_bytes(self, key: ExpertKey) -> tuple[Tensor, ...]:
        """The same as bytes, uint8 [num_bytes] each."""
        return self.records[key].tensor_bytes(*self._place(self._slot(key)))

    def forget_required(self) -> None:
        """Makes required experts announced ones again, after a pass that was given up."""
        with self.monitor:
            self.slots.forget()
            self.monitor.changed()

    def close(self) -> None:
        """Stops the readers after the pieces in flight and closes the files."""
        with self.monitor:
            self._closing = True
            self.monitor.changed()
        for reader in self._readers:
            reader.join()
        for file in self._files.values():
            file.close()
        self._arena.unpin()

    def check_integrity(self) -> None:
        """Asserts that each slot has one owner and that the queues hold only live loads."""
        with self.monitor:
            self.slots.check_integrity()

    # --- compute side ---------------------------------------------------------------------------

    def _as_ready(
        self, waiting: list[ExpertKey]
    ) -> Generator[tuple[int, tuple[Tensor, ...]], None, None]:
        while waiting:
            key = self._use_first(waiting)
            waiting.remove(key)
            try:
                yield key.expert, self.tensors(key)
            finally:
                self.let_go(key)

    def _use_first(self, waiting: list[ExpertKey]) -> ExpertKey:
        """The first expert that can be computed now; waits until there is one."""
        with self.monitor:
            start = time.perf_counter()
            self.wait(lambda: self.slots.first_ready(waiting) is not None)
            self.statistics.waited_s += time.perf_counter() - start
            key = self.slots.first_ready(waiting)
            assert key is not None, "the lock is held"
            self.slots.use(key)
            return key

    def _require(self, key: ExpertKey) -> None:
        assert self.slots.num_streaming_slots or self.slots.holds(key), "streaming needs a slot"
        self.slots.require(key)

    def _slot(self, key: ExpertKey) -> int:
        slot = self.slots.slot_of(key)
        assert slot is not None and self.slots.is_ready(key), f"{key} is not there"
        return slot

    def _place(self, slot: int) -> tuple[Arena, int]:
        """Memory of a slot, and where in it the slot begins."""
        if slot < self._num_first_slots:
            return self._arena, slot * self.slot_bytes
        return self._more[slot - self._num_first_slots], 0

    # --- reader side ----------------------------------------------------------------------------

    def _read_pieces(self, reader: int) -> None:
        try:
            while (chunk := self._take_chunk()) is not None:
                try:
                    self._read(chunk, reader)
                finally:
                    with self.monitor:
                        self.statistics.busy.leave()
                self._arrived(chunk)
        except BaseException as error:
            # Whatever ends a reader must reach the compute side, which waits for it. Memory that
            # is refused here is no reason to make passes smaller: the reader is gone.
            with self.monitor:
                self.failure = self.failure or _as_refusal(error)
                self.monitor.changed()

    def _read(self, chunk: Chunk, reader: int) -> None:
        key, start_s = chunk.load.key, time.perf_counter()
        piece = self.records[key].pieces[chunk.number]
        arena, start = self._place(chunk.slot)
        target = arena.view(start + piece.buffer_offset, piece.num_bytes)
        self._files[piece.path].read(target, piece.file_offset)
        if self._on_read is not None:
            end_s = time.perf_counter()
            self._on_read(key, chunk.number, chunk.slot, reader, start_s, end_s)

    def _take_chunk(self) -> Chunk | None:
        """The most urgent piece that has a slot; None at the end."""
        with self.monitor:
            chunk = self.monitor.take(self._find_chunk)
        return chunk if isinstance(chunk, Chunk) else None

    def _find_chunk(self) -> Chunk | End | None:
        """What there is to read now, and counts as being read from here on."""
        if self._closing or self.failure:
            return End()
        chunk = self.slots.next_chunk()
        if chunk is not None:
            self.statistics.busy.enter()
        return chunk

    def _arrived(self, chunk: Chunk) -> None:
        piece = self.records[chunk.load.key].pieces[chunk.number]
        with self.monitor:
            self.statistics.num_bytes += piece.num_bytes
            self.slots.finish_chunk(chunk)
            self.monitor.changed()


def _as_refusal(error: BaseException) -> BaseException:
    if is_out_of_memory(error):
        return OutOfMemory(f"the system refuses memory for reading experts: {error}")
    return error
