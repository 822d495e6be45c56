"""Passes whose experts are computed on a GPU, a real one or one that is emulated."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.engine.cuda_lane import CudaStreams, cuda_lanes
from moebatch.engine.exchange import Exchange
from moebatch.engine.executor import Executor, MakeLane
from moebatch.engine.lane import LaneWork, ThreadLane
from moebatch.engine.link import PacedLink, sleep_until
from moebatch.engine.made import Made
from moebatch.engine.model_files import expert_records, load_dense
from moebatch.engine.order import Order
from moebatch.engine.parts import Parts
from moebatch.engine.pass_log import PassLog
from moebatch.engine.pipeline import Pipeline
from moebatch.engine.reads import ReadSpans
from moebatch.engine.recorder import Recorder
from moebatch.layout.scratch import bucket_rows
from moebatch.layout.setup import cache_of, expert_homes, setup_of
from moebatch.model.attention_core import AttentionCore
from moebatch.model.decoder import Decoder
from moebatch.schedule.kv_route import Place
from moebatch.schedule.registry import traits_of
from moebatch.schedule.slots.expert_load import Chunk
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.task import Kind, Task
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts import ExpertStore
from moebatch.store.kv import KVCache
from moebatch.store.kv_layout import KvLayout
from moebatch.store.monitor import Monitor
from moebatch.store.page_sources import MemoryPages
from moebatch.store.paged_experts import PagedExperts
from moebatch.store.vram_experts import VramExperts


def gpu_pipeline(order: Order, recorder: Recorder, log: PassLog | None, opened: ExitStack) -> Made:
    """Lanes: GPU, CPU, the link to the GPU in both directions, staging, and the disk. What is to be
    closed goes to `opened`.

    Raises DoesNotFit if the device has no room for what the policy puts there.
    """
    return _Assembly(order, recorder, log, opened).made()


@dataclass(slots=True)
class _Mover:
    """Moves experts up, chunk by chunk, between the tasks of the link."""

    pipeline: Pipeline
    experts: VramExperts

    def next_chunk(self) -> Chunk | None:
        return self.pipeline.next_chunk()

    def task_of(self, chunk: Chunk) -> Task:
        return self.pipeline.chunk_task(chunk.load.key, chunk.number, Kind.CHUNK)

    def move(self, chunk: Chunk) -> None:
        self.experts.copy(chunk)

    def moved(self, chunk: Chunk) -> None:
        self.pipeline.chunk_moved(chunk)

    def lost(self, chunk: Chunk) -> None:
        self.experts.slots.lose_chunk(chunk)


class _Assembly:
    """Puts a pipeline together, from the memory of the device to the lanes."""

    def __init__(
        self, order: Order, recorder: Recorder, log: PassLog | None, opened: ExitStack
    ) -> None:
        device = order.device
        assert device.hardware is not None and device.hardware.vram is not None, "it has a GPU"
        self._order = order
        self._device = device
        self._recorder = recorder
        self._log = log
        self._opened = opened
        self._memory = DeviceMemory(device.torch_device, device.hardware.vram.capacity_bytes)
        self._homes = expert_homes(order.files.shape, order.policy, hottest=order.hottest)
        self._is_paged = traits_of(order.policy).is_paged
        self._setup = setup_of(
            order.files.shape,
            order.policy,
            with_vram=True,
            has_staging=device.pace("staging") is not None,
            activation_level=order.approximation.activation_level,
        )
        self._reads = ReadSpans(recorder, Kind.FETCH)
        self._streams = CudaStreams() if device.is_cuda else None

    def made(self) -> Made:
        """Everything, its lanes running."""
        store, decoder, cache = self._store(), self._decoder(), self._cache()
        below = store.slots if self._homes["disk"] and not self._is_paged else None
        if below is None:  # nobody asks whether what lives in main memory has been read
            store.wait_for_residents()
        pages = self._pages(store) if self._is_paged else None
        experts = None if self._is_paged else self._experts(store)
        slots = experts.slots if experts else SlotQueue({}, num_slots=0)
        executor = Executor(
            self._setup,
            self._recorder,
            store.monitor,
            slots=slots,
            reading_failed=lambda: store.failure,
        )
        parts = Parts(
            decoder=decoder,
            cache=cache,
            policy=self._order.policy,
            setup=self._setup,
            predictor=self._order.new_predictor(),
            slots=slots,
            below=below,
            experts=experts,
            pages=pages,
            core=self._core(),
            exchange=self._exchange(),
            observer=self._order.observer or self._log,
            log=self._log,
            computing=self._streams.computing if self._streams else nullcontext,
        )
        pipeline = Pipeline(parts, executor, self._recorder)
        self._opened.callback(pipeline.close)
        self._reads.task_of, self._reads.ended = pipeline.chunk_task, executor.noticed
        executor.add_lanes(self._works(pipeline, experts), self._make_lane(executor))
        pipeline.start()
        return Made(
            passes=pipeline,
            experts=store,
            cache=cache,
            memory=self._memory,
            gating_count=parts.decoder.gating_count,
            foresight=parts.foresight,
        )

    # --- memory ---------------------------------------------------------------------------------

    def _store(self) -> ExpertStore:
        """Experts in main memory: those that live there, and slots for those on disk."""
        on_disk = self._homes["disk"]
        store = ExpertStore(
            expert_records(self._order.files),
            num_slots=self._order.policy.num_slots if on_disk else 0,
            resident=self._homes["dram"],
            monitor=Monitor(),
            pinned=self._device.is_cuda,
            on_read=self._reads,
        )
        self._opened.callback(store.close)
        return store

    def _decoder(self) -> Decoder:
        files = self._order.files
        dense = load_dense(files, self._memory)
        self._order.approximation.replace_routers(dense)
        decoder = Decoder(
            files.shape,
            files.config,
            dense,
            self._order.limits,
            expert_dtype=files.expert_dtype,
            gating=self._order.approximation.gating,
            activation_level=self._order.approximation.activation_level,
        )
        self._memory.reserve(decoder.scratch_bytes, "activations")
        return decoder

    def _cache(self) -> KVCache:
        shape, policy = self._order.files.shape, self._order.policy
        places: set[Place] = {"vram"} if policy.attention_on_gpu else {"vram", "dram"}
        layout = KvLayout(
            levels=policy.kv_levels(shape.num_layers),
            places=places,
            window_pages=self._order.window_pages,
            vram_device=self._device.torch_device,
            folder=self._order.scratch,
        )
        cache = KVCache(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_pages=policy.num_kv_pages,
            dtype=self._order.files.dtype,
            layout=layout,
            shares=self._order.shares_prefixes,
        )
        self._opened.callback(cache.close)
        self._memory.reserve(cache.bytes_on("vram"), "keys and values")
        return cache

    def _experts(self, store: ExpertStore) -> VramExperts:
        experts = VramExperts(
            store,
            self._memory,
            num_slots=self._order.policy.num_slots,
            resident=self._homes["vram"],
            cache=cache_of(self._order.files.shape, self._order.policy, with_vram=True),
            chunk_bytes=self._order.chunk_bytes,
        )
        self._opened.callback(experts.close)
        experts.load_residents()
        return experts

    def _pages(self, store: ExpertStore) -> PagedExperts:
        pages = PagedExperts(
            MemoryPages(store),
            self._memory,
            list(store.records),
            num_layers=self._order.files.shape.num_layers,
            resident=self._homes["vram"],
            has_staging=self._setup.has_staging,
        )
        self._opened.callback(pages.close)
        pages.load_residents()
        return pages

    def _core(self) -> AttentionCore | None:
        if self._order.policy.attention_on_gpu:
            return None
        files = self._order.files
        return AttentionCore(
            files.shape, self._order.limits, dtype=files.dtype, device=torch.device("cpu")
        )

    def _exchange(self) -> Exchange | None:
        if self._order.policy.attention_on_gpu:
            return None
        files = self._order.files

        def on_device(size: tuple[int, ...]) -> Tensor:
            return self._memory.allocate(size, files.dtype, what="projections")

        return Exchange(
            files.shape,
            num_rows=bucket_rows(self._order.policy.micro_batch_size),
            dtype=files.dtype,
            on_device=on_device,
            pinned=self._device.is_cuda,
        )

    # --- lanes ----------------------------------------------------------------------------------

    def _works(self, pipeline: Pipeline, experts: VramExperts | None) -> Mapping[str, LaneWork]:
        """What each lane does, and how long it has to take on an emulated device."""

        def num_bytes(task: Task) -> int:
            if task.kind is Kind.CHUNK and experts is not None and task.part is not None:
                return experts.layout.chunks[task.part].num_bytes
            return pipeline.num_bytes(task)

        works = {
            name: LaneWork(
                run=pipeline.do,
                hold=self._hold(name, num_bytes),
                title=f"{name} (cache)" if name == "disk->dram" else None,
            )
            for name in self._lane_names()
        }
        if experts is not None:
            works["dram->vram"].mover = _Mover(pipeline, experts)
        return works

    def _lane_names(self) -> list[str]:
        names = ["gpu", "dram->vram", "vram->dram"]
        if not self._order.policy.attention_on_gpu:
            names.append("cpu")
        if self._setup.has_staging:
            names.append("staging")
        if self._is_paged:
            names.append("weight block")
        if "disk" in self._setup.kv_homes:
            names += ["disk->dram", "dram->disk"]
        return names

    def _hold(self, lane: str, num_bytes: Callable[[Task], int]) -> Callable[[Task, float], None]:
        if lane == "gpu":
            least_s = self._device.least_s
            return lambda task, start_s: sleep_until(start_s + least_s.get(task.kind, 0.0))
        rate = self._device.pace(lane)
        if rate is None:
            return lambda task, start_s: None
        link = PacedLink(rate)
        return lambda task, start_s: link.hold(num_bytes(task), start_s)

    def _make_lane(self, executor: Executor) -> MakeLane:
        if self._streams is not None:
            return cuda_lanes(executor, self._streams)
        return lambda name, work: ThreadLane(name, executor, work)
