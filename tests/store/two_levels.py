"""Experts of a device above main memory, moved by a thread as the lane of a link does it."""

import threading

import torch

from moebatch.checkpoint.record import Record
from moebatch.engine.lanes.read_ahead import ReadAhead
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.slots.transfer import ChunkStream, ThroughMemory
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.vram import VramExperts
from moebatch.store.monitor import End
from tests.store.expert_files import CHUNK_BYTES, assert_is

CPU = torch.device("cpu")


class TwoLevels:
    """Main memory, a device above it, and a thread that moves chunks up as a lane does."""

    def __init__(
        self,
        records: dict[ExpertKey, Record],
        *,
        dram_slots: int,
        vram_slots: int,
        in_dram: tuple[ExpertKey, ...] = (),
        in_vram: tuple[ExpertKey, ...] = (),
        device: torch.device = CPU,
        pinned: bool = False,
    ) -> None:
        self.dram = ExpertStore(records, num_slots=dram_slots, resident=in_dram, pinned=pinned)
        self.reading = ReadAhead(self.dram)
        self.vram = VramExperts(
            self.dram,
            DeviceMemory(device, 2**24),
            num_slots=vram_slots,
            resident=in_vram,
            chunk_bytes=CHUNK_BYTES,
        )
        self.vram.load_residents()
        self.monitor = self.dram.monitor
        self.num_moved_bytes = 0
        path = self._path = ThroughMemory(self.dram.slots, self.vram.slots)
        self._stream = ChunkStream(slots=self.vram.slots, path=lambda: path)
        self._is_closing = False
        self._is_cuda = device.type == "cuda"
        self._mover = threading.Thread(target=self._move)
        self._mover.start()

    def prefetch(self, keys: list[ExpertKey]) -> None:
        with self.monitor:
            self.vram.slots.prefetch(keys)
            self._path.prefetch(keys)
            self.monitor.changed()

    def compute(self, layer: int, experts: list[int]) -> list[int]:
        """Requires experts, compares every byte of each, and returns the order of their arrival."""
        waiting = [ExpertKey(layer, expert) for expert in experts]
        with self.monitor:
            self.vram.slots.withdraw(layer, keep=experts)
            for key in waiting:
                self.vram.slots.require(key)
                self._path.require(key)
            self.monitor.changed()
        order = []
        while waiting:
            key = self._use_first(waiting)
            waiting.remove(key)
            assert_is(key, self.vram.tensors(key))
            order.append(key.expert)
            with self.monitor:
                self.vram.slots.finish(key, keep=False)
                self.vram.slots.check_integrity()
                self.dram.slots.check_integrity()
                self.monitor.changed()
        return order

    def close(self) -> None:
        with self.monitor:
            self._is_closing = True
            self.monitor.changed()
        self._mover.join()
        self.reading.close()
        self.dram.close()

    def _use_first(self, waiting: list[ExpertKey]) -> ExpertKey:
        with self.monitor:
            self._path.hurry(waiting)
            self.monitor.changed()
            self.reading.sleep(lambda: any(map(self.vram.slots.is_ready, waiting)))
            key = self.vram.slots.ready(waiting)[0]
            self.vram.slots.use(key)
            return key

    def _move(self) -> None:
        while (chunk := self._next_chunk()) is not None:
            self.vram.copy(chunk)
            if self._is_cuda:
                torch.cuda.synchronize()
            self.num_moved_bytes += self.vram.chunk_bytes(chunk.load.key, chunk.number)
            with self.monitor:
                self._stream.moved(chunk)
                self.monitor.changed()

    def _next_chunk(self) -> Chunk | None:
        with self.monitor:
            chunk = self.monitor.take(self._find_chunk)
        return chunk if isinstance(chunk, Chunk) else None

    def _find_chunk(self) -> Chunk | End | None:
        if self._is_closing:
            return End()
        return self._stream.next_chunk()
