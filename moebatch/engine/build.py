"""From a model folder and a policy to an engine that can run: the memory of each level, and the
lanes between them."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moebatch.engine.device import IN_MAIN_MEMORY
from moebatch.engine.engine import Engine
from moebatch.engine.lanes.cuda_lane import SWITCH_S, CudaStreams, cuda_lanes
from moebatch.engine.lanes.executor import Executor
from moebatch.engine.lanes.lane import LaneWork, ThreadLane
from moebatch.engine.lanes.read_ahead import ReadAhead
from moebatch.engine.lanes.recorder import Recorder
from moebatch.engine.passes.exchange import CpuAttention
from moebatch.engine.passes.log import PassLog
from moebatch.engine.passes.passes import Passes
from moebatch.engine.passes.pipeline import Pipeline
from moebatch.engine.passes.sweep import PlainSweep
from moebatch.engine.passes.work import PassContext
from moebatch.engine.sampling.constraint import Grammars
from moebatch.engine.sampling.sampler import Sampler
from moebatch.engine.spec import EngineSpec
from moebatch.engine.tail import Tail
from moebatch.engine.text import TextDecoder
from moebatch.engine.weights import ExpertwiseWeights, PagewiseWeights, WeightStream
from moebatch.layout.buffers import KV_TERM, PROJECTIONS_TERM
from moebatch.layout.footprint import ACTIVATIONS_TERM, layer_bytes
from moebatch.layout.ladder import lanes_of
from moebatch.layout.scratch import bucket_rows
from moebatch.model.attention.core import AttentionCore
from moebatch.model.decoder import Decoder
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.routing.gating import GatingCount
from moebatch.schedule.drivers.foresight import Foresight
from moebatch.schedule.lanes import READ, WRITE, Lane
from moebatch.schedule.registry import traits_of
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.cache import Cache
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.page_sources import FilePages, MemoryPages
from moebatch.store.experts.paged import PagedExperts
from moebatch.store.experts.vram import VramExperts
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.layout import KvLayout
from moebatch.store.monitor import Monitor
from moebatch.store.statistics import BusyClock, MoveStatistics, ReadStatistics
from moebatch.store.streamed_layers import StreamedLayers


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine with what it reads and writes, and what tests and reports look at."""

    engine: Engine
    cache: KVCache
    memory: DeviceMemory
    """Of the level that computes."""
    reads: ReadStatistics
    """What has been read from disk since the engine was built."""
    writes: MoveStatistics = field(default_factory=MoveStatistics)
    """What has been written there."""
    experts: ExpertStore | None
    """Those in main memory; None where pages are read straight to where they are computed."""
    opened: ExitStack = field(default_factory=ExitStack)
    """Ends lanes and readers, and gives files back."""
    gating_count: GatingCount | None
    """What was left out of the choices of gates; None if nothing may be."""
    foresight: Foresight = field(default_factory=Foresight)
    """How well experts have been foreseen so far."""
    recorder: Recorder | None = None
    """What the lanes do; None where there are none."""
    log: PassLog | None = None
    """What the passes had to do whose timeline is kept."""

    @property
    def vram_peak_bytes(self) -> int | None:
        """Most memory of a GPU that was in use at once; None without one."""
        return self.memory.used_bytes if self.memory.level == "vram" else None

    def check_integrity(self) -> None:
        """Asserts that each slot and each page has one owner."""
        if self.experts is not None:
            self.experts.check_integrity()
        self.cache.check_integrity()

    def close(self) -> None:
        """Ends lanes and readers, and gives files back."""
        self.opened.close()


def build_engine(
    spec: EngineSpec,
    *,
    decoder: TextDecoder,
    end_tokens: frozenset[int],
    job_seed: int,
    grammars: Grammars | None = None,
) -> BuiltEngine:
    """Allocates everything that the policy says and loads the weights outside the experts.

    Raises DoesNotFit if the device has no room for what the policy puts there.
    """
    vocab_size = spec.files.shape.vocab_size
    sampler = Sampler(vocab_size=vocab_size, end_tokens=end_tokens, job_seed=job_seed)

    def engine(passes: Passes, tail: Tail | None = None) -> Engine:
        passes.losses = spec.losses
        return Engine(passes=passes, sampler=sampler, decoder=decoder, grammars=grammars, tail=tail)

    with ExitStack() as opening:
        assembly = _Assembly(spec, opening, engine)
        built = assembly.plain() if spec.is_plain else assembly.overlapped()
        return replace(built, opened=opening.pop_all())


class _Assembly:
    """Builds the parts one by one, each from those before it."""

    def __init__(self, spec: EngineSpec, opened: ExitStack, engine: Callable[..., Engine]) -> None:
        self._spec = spec
        self._files, self._policy = spec.files, spec.policy
        self._ladder, self._homes = spec.ladder, spec.homes
        self._device = IN_MAIN_MEMORY if spec.is_plain else spec.device
        self._is_paged = traits_of(spec.policy).is_paged
        self._opened = opened
        self._engine = engine
        self._monitor = Monitor()
        self._memory = self._device.memory()
        self._streamed = self._streamed_layers()
        self._streams = CudaStreams() if self._device.is_cuda else None

    def plain(self) -> BuiltEngine:
        """The synchronous reference, in main memory: without lanes but the one that reads."""
        store = self._store()
        reading = ReadAhead(store)
        self._opened.callback(reading.close)
        decoder, cache = self._decoder(), self._cache()
        sweep = PlainSweep(
            decoder, cache, reading, self._policy, self._spec.observer, self._streamed
        )
        return BuiltEngine(
            engine=self._engine(sweep),
            cache=cache,
            memory=self._memory,
            reads=reading.statistics,
            experts=store,
            gating_count=decoder.gating_count,
        )

    def overlapped(self) -> BuiltEngine:
        """Passes of the policy's schedule on the lanes of the device, which are running then."""
        level, shape = self._spec.approximation.activation_level, self._files.shape
        setup = self._spec.placed.setup(activation_level=level)
        num_traced = self._spec.num_traced_passes
        recorder = Recorder(shape.num_layers, num_traced)
        log = PassLog(shape, num_traced) if num_traced else None
        executor = Executor(setup, recorder, self._monitor)
        store = self._store_below()
        decoder, cache = self._decoder(), self._cache()
        weights = self._weights(setup, store, executor)
        reads = ReadStatistics(is_direct=weights.is_direct)
        writes = MoveStatistics(busy=BusyClock(reads.busy.device))
        context = PassContext(
            decoder=decoder,
            cache=cache,
            policy=self._policy,
            setup=setup,
            predictor=self._spec.new_predictor(),
            weights=weights,
            beside=self._beside(decoder),
            observer=self._spec.observer or log,
            log=log,
            computing=self._streams.computing if self._streams else nullcontext,
        )
        pipeline = self._started(context, executor, {READ: reads, WRITE: writes})
        return BuiltEngine(
            engine=self._engine(pipeline, self._tail(store, cache)),
            cache=cache,
            memory=self._memory,
            reads=reads,
            writes=writes,
            experts=store,
            gating_count=decoder.gating_count,
            foresight=context.foresight,
            recorder=recorder,
            log=log,
        )

    # --- memory ---------------------------------------------------------------------------------

    def _store_below(self) -> ExpertStore | None:
        """None where pages are read straight to where they are computed."""
        if self._ladder.top == "vram":
            return self._store()
        return None if self._is_paged else self._store(self._spec.placed.cache)

    def _store(self, cache: Cache | None = None) -> ExpertStore:
        """Experts in main memory: those that live there, and slots for those on disk."""
        store = ExpertStore(
            self._files.expert_records(),
            num_slots=self._policy.num_slots if self._homes["disk"] else 0,
            resident=self._homes["dram"],
            cache=cache,
            monitor=self._monitor,
            pinned=self._device.is_cuda,
        )
        self._opened.callback(store.close)
        return store

    def _streamed_layers(self) -> StreamedLayers | None:
        """Of the weights outside experts; None where all of them stay."""
        shape, num_bytes = self._files.shape, self._files.dtype.itemsize
        layers = shape.streamed(self._policy.streamed_layers)
        if not layers:
            return None
        streamed = StreamedLayers(
            {layer: layer_bytes(shape, num_bytes, layer) for layer in layers},
            self._memory,
            folder=self._spec.scratch,
            pinned=self._device.is_cuda,
        )
        self._opened.callback(streamed.close)
        return streamed

    def _decoder(self) -> Decoder:
        approximation = self._spec.approximation
        dense = DenseWeights.load(self._files, self._memory, self._streamed)
        approximation.replace_routers(dense)
        decoder = Decoder(
            self._files.shape,
            self._files.config,
            dense,
            self._spec.limits,
            experts=self._files.experts,
            gating=approximation.gating,
            activation_level=approximation.activation_level,
        )
        self._memory.reserve(decoder.scratch_bytes, ACTIVATIONS_TERM)
        return decoder

    def _cache(self) -> KVCache:
        groups, policy, ladder = self._spec.cache_groups, self._policy, self._ladder
        layout = KvLayout(
            levels=self._spec.placed.kv_homes,
            places={ladder.top, ladder.attends_at(policy)},
            window_pages=self._spec.window_pages,
            vram_device=self._device.torch_device,
            folder=self._spec.scratch,
        )
        cache = KVCache(
            groups,
            num_pages=[group.num_pages(policy) for group in groups],
            dtype=self._files.dtype,
            layout=layout,
            shares=self._spec.shares_prefixes,
        )
        self._opened.callback(cache.close)
        self._memory.reserve(cache.bytes_on(ladder.top), KV_TERM)
        return cache

    def _weights(self, setup: Setup, store: ExpertStore | None, executor: Executor) -> WeightStream:
        """The way of experts up the ladder, as the schedule moves them."""
        if not self._is_paged:
            assert store is not None, "experts come one by one through main memory"
            vram = self._vram(store) if self._ladder.top == "vram" else None
            return ExpertwiseWeights(self._ladder, setup, store, vram, self._streamed)
        records = self._files.expert_records()
        source = FilePages(records) if store is None else MemoryPages(store, executor.sleep)
        with ExitStack() as refused:
            refused.callback(source.close)
            pages = PagedExperts(
                source,
                self._memory,
                list(records),
                num_layers=self._files.shape.num_layers,
                resident=self._homes[self._ladder.top],
                has_staging=setup.has_staging,
            )
            refused.pop_all()
        self._opened.callback(pages.close)
        pages.load_residents()
        return PagewiseWeights(setup, pages, store, self._streamed)

    def _vram(self, store: ExpertStore) -> VramExperts:
        experts = VramExperts(
            store,
            self._memory,
            num_slots=self._policy.num_slots,
            resident=self._homes["vram"],
            cache=self._spec.placed.cache,
            chunk_bytes=self._spec.chunk_bytes,
        )
        experts.load_residents()
        return experts

    def _beside(self, decoder: Decoder) -> CpuAttention | None:
        """Attention on the CPU, where all else is computed on the GPU."""
        if self._ladder.attends_at(self._policy) == self._ladder.top:
            return None
        files = self._files

        def on_device(size: tuple[int, ...]) -> Tensor:
            return self._memory.allocate(size, files.dtype, what=PROJECTIONS_TERM)

        core = AttentionCore(
            files.shape,
            self._spec.limits,
            dtype=files.dtype,
            device=torch.device("cpu"),
            sink_scores=decoder.sink_scores,
        )
        return CpuAttention(
            core,
            files.shape,
            num_rows=bucket_rows(self._policy.micro_batch_size),
            dtype=files.dtype,
            on_device=on_device,
            pinned=self._device.is_cuda,
        )

    def _tail(self, store: ExpertStore | None, cache: KVCache) -> Tail | None:
        """Where the cache and the experts that are computed are in the same memory."""
        if store is None or self._ladder.top != "dram" or not self._spec.plans_tail:
            return None
        return Tail(cache, store)

    # --- lanes ----------------------------------------------------------------------------------

    def _started(
        self, context: PassContext, executor: Executor, moved: Mapping[Lane, MoveStatistics]
    ) -> Pipeline:
        """A pipeline whose lanes are running, with all residents there."""
        pipeline = Pipeline(context, executor)
        self._opened.callback(pipeline.close)
        self._add_lanes(executor, self._works(pipeline, context.weights, moved))
        executor.sleep(context.weights.has_residents)
        pipeline.start()
        return pipeline

    def _add_lanes(self, executor: Executor, works: Mapping[Lane, LaneWork]) -> None:
        make = cuda_lanes(executor, self._streams) if self._streams else None
        if make is not None:
            self._opened.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(SWITCH_S)
        for lane, work in works.items():
            if lane.at == self._ladder.top == "dram":
                executor.add_inline(lane.name, work.run)
            elif make is not None:
                executor.add(make(lane, work))
            else:
                executor.add(ThreadLane(lane, executor, work))

    def _works(
        self, pipeline: Pipeline, weights: WeightStream, moved: Mapping[Lane, MoveStatistics]
    ) -> Mapping[Lane, LaneWork]:
        """What each lane does, where it counts what it has `moved`, and how long it has to take on
        an emulated device."""
        movers = weights.movers(lambda: pipeline.driver)
        return {
            lane: LaneWork(
                run=pipeline.do,
                hold=self._device.hold(lane, pipeline.num_bytes),
                mover=movers.get(lane.name),
                num_bytes=pipeline.num_bytes,
                rate=self._device.rate(lane),
                statistics=moved.get(lane, MoveStatistics()),
            )
            for lane in lanes_of(self._ladder, self._policy)
        }
