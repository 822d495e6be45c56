"""Passes that are computed in main memory: experts come from disk."""

from collections.abc import Callable
from contextlib import ExitStack

import torch

from moebatch.engine.executor import Executor
from moebatch.engine.lane import LaneWork, ThreadLane
from moebatch.engine.made import Made
from moebatch.engine.model_files import expert_records, load_dense
from moebatch.engine.order import Order
from moebatch.engine.parts import Parts
from moebatch.engine.pass_log import PassLog
from moebatch.engine.pipeline import Pipeline
from moebatch.engine.reads import ReadSpans
from moebatch.engine.recorder import Recorder
from moebatch.engine.sweep import PlainSweep
from moebatch.engine.tail import Tail
from moebatch.layout.setup import cache_of, setup_of
from moebatch.model.decoder import Decoder
from moebatch.schedule.registry import traits_of
from moebatch.schedule.task import Kind, Task
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts import ExpertStore
from moebatch.store.kv import KVCache
from moebatch.store.kv_layout import KvLayout
from moebatch.store.monitor import Monitor
from moebatch.store.page_sources import FilePages
from moebatch.store.paged_experts import PagedExperts


def plain_sweep(order: Order, opened: ExitStack) -> Made:
    """The synchronous reference. What is to be closed goes to `opened`."""
    files, policy = order.files, order.policy
    records = expert_records(files)
    experts = ExpertStore(records, num_slots=policy.num_slots, resident=order.residents)
    opened.callback(experts.close)
    cache = _cache(order)
    opened.callback(cache.close)
    decoder = _decoder(order)
    sweep = PlainSweep(decoder, cache, experts, policy, order.observer)
    return Made(passes=sweep, experts=experts, cache=cache, gating_count=decoder.gating_count)


def cpu_pipeline(order: Order, recorder: Recorder, log: PassLog | None, opened: ExitStack) -> Made:
    """Lanes: the CPU, which is the thread that runs passes, and the disk. What is to be closed goes
    to `opened`."""
    files, policy = order.files, order.policy
    level = order.approximation.activation_level
    setup = setup_of(files.shape, policy, with_vram=False, activation_level=level)
    reads = ReadSpans(recorder, Kind.CHUNK)
    is_paged = traits_of(policy).is_paged
    records = expert_records(files)
    pages = _pages(order, opened) if is_paged else None
    monitor = Monitor()
    experts = ExpertStore(
        {} if is_paged else records,
        num_slots=0 if is_paged else policy.num_slots,
        resident=() if is_paged else order.residents,
        cache=cache_of(files.shape, policy, with_vram=False),
        monitor=monitor,
        on_read=reads,
    )
    opened.callback(experts.close)
    cache = _cache(order)
    opened.callback(cache.close)
    executor = Executor(
        setup, recorder, monitor, slots=experts.slots, reading_failed=lambda: experts.failure
    )
    parts = Parts(
        decoder=_decoder(order),
        cache=cache,
        policy=policy,
        setup=setup,
        predictor=order.new_predictor(),
        slots=experts.slots,
        below=None,
        experts=None if is_paged else experts,
        pages=pages,
        core=None,
        exchange=None,
        observer=order.observer or log,
        log=log,
    )
    pipeline = Pipeline(parts, executor, recorder)
    opened.callback(pipeline.close)
    reads.task_of, reads.ended = pipeline.chunk_task, executor.noticed
    works = {"cpu": LaneWork(run=pipeline.do)}
    if is_paged or setup.kv_homes:
        title = None if is_paged else "disk->dram (cache)"
        works["disk->dram"] = LaneWork(run=_counted(pipeline, experts), title=title)
        works["dram->disk"] = LaneWork(run=pipeline.do)
    executor.add_lanes(works, lambda name, work: ThreadLane(name, executor, work))
    pipeline.start()
    tail = None if is_paged or not order.plans_tail else Tail(cache, experts)
    return Made(
        passes=pipeline,
        experts=experts,
        cache=cache,
        tail=tail,
        gating_count=parts.decoder.gating_count,
        foresight=parts.foresight,
    )


def _pages(order: Order, opened: ExitStack) -> PagedExperts:
    files = order.files
    records = expert_records(files)
    everything = DeviceMemory(torch.device("cpu"), 2**62, level="dram")
    pages = PagedExperts(
        FilePages(records),
        everything,
        list(records),
        num_layers=files.shape.num_layers,
        resident=order.residents,
    )
    opened.callback(pages.close)
    pages.load_residents()
    return pages


def _counted(pipeline: Pipeline, experts: ExpertStore) -> Callable[[Task], None]:
    """Pages are not read by the store; they count as reading all the same."""

    def run(task: Task) -> None:
        statistics = experts.statistics
        with experts.monitor:
            statistics.busy.enter()
        try:
            pipeline.do(task)
        finally:
            with experts.monitor:
                statistics.busy.leave()
        with experts.monitor:
            statistics.num_bytes += pipeline.num_bytes(task)

    return run


def _decoder(order: Order) -> Decoder:
    files = order.files
    dense = load_dense(files)
    order.approximation.replace_routers(dense)
    return Decoder(
        files.shape,
        files.config,
        dense,
        order.limits,
        expert_dtype=files.expert_dtype,
        gating=order.approximation.gating,
        activation_level=order.approximation.activation_level,
    )


def _cache(order: Order) -> KVCache:
    shape, policy = order.files.shape, order.policy
    layout = KvLayout(
        levels=policy.kv_levels(shape.num_layers),
        window_pages=order.window_pages,
        folder=order.scratch,
    )
    return KVCache(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_pages=policy.num_kv_pages,
        dtype=order.files.dtype,
        layout=layout,
        shares=order.shares_prefixes,
    )
