"""Lanes with streams, on a GPU of threads."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.build import _Assembly, build_engine
from moebatch.engine.lanes.cuda_lane import (
    MAX_ISSUED,
    MAX_ISSUED_BEFORE_CHUNK,
    SWITCH_S,
    CudaStreams,
    cuda_lanes,
)
from moebatch.engine.lanes.lane import Board, LaneWork, ThreadLane
from moebatch.engine.lanes.streams import StreamClock
from moebatch.engine.passes.broken import BrokenRows
from moebatch.engine.sampling.sampler import Sampler
from moebatch.engine.spec import EngineSpec
from moebatch.model.batch import BatchPlanner
from moebatch.model.decoder import Decoder
from moebatch.schedule.lanes import GPU, LANES
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey, Load
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span
from moebatch.store.monitor import Monitor
from tests.engine.fake_gpu import FakeEvent, FakeGpu
from tests.engine.test_engine import TokenText, requests, tokens_of
from tests.engine.test_schedules import EMULATED, emulated, run
from tests.model.oracle import greedy_answers, load
from tests.patience import PATIENCE_S, until

Kernel = Callable[[], object]


class Machine(Board):
    """Lanes with a board; kernels of tasks are whatever a test says."""

    def __init__(self) -> None:
        super().__init__(Monitor())
        self.spans: list[Span] = []
        self.issued: list[Task] = []
        self.done: list[Task] = []
        """By their kernels, or by a host lane."""
        self.kernels: dict[Task, Kernel] = {}
        self.lanes: dict[str, ThreadLane] = {}
        self.gpu = FakeGpu()
        self._pending: set[Task] = set()
        self._make = cuda_lanes(self, CudaStreams(self.gpu))

    # --- the board ------------------------------------------------------------------------------

    def has_ended(self, task: Task) -> bool:
        return task not in self._pending

    def can_start(self, task: Task) -> bool:
        return all(self.has_ended(other) for other in task.after)

    def ended(
        self, task: Task, lane: str, start_s: float, end_s: float, slots: tuple[int, ...]
    ) -> None:
        assert self.has_failed or self.can_start(task), f"{task} ended before what it waits for"
        self.spans.append(Span(task, lane, start_s, end_s, slots))
        self._pending.discard(task)

    # --- for tests ------------------------------------------------------------------------------

    def lane(self, name: str, **options: Any) -> None:
        (lane,) = (one for one in LANES if one.name == name)
        work = LaneWork(run=self._issue if lane.is_of_gpu else self._run_here, **options)
        self.lanes[name] = self._make(lane, work)

    def launch(self, name: str, *tasks: Task) -> None:
        with self.monitor:
            for task in tasks:
                self._pending.add(task)
                self.lanes[name].launch(task)

    def wait(self, condition: Callable[[], object]) -> None:
        def holds() -> object:
            with self.monitor:
                return condition()

        until(holds)

    def finish(self) -> None:
        self.wait(lambda: not self._pending or self._failure)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()

    def _issue(self, task: Task) -> None:
        with self.monitor:
            self.issued.append(task)
            self.monitor.changed()
        self.gpu.launch(lambda: self._compute(task))

    def _run_here(self, task: Task) -> None:
        with self.monitor:
            self.issued.append(task)
            self.monitor.changed()
        self._compute(task)

    def _compute(self, task: Task) -> None:
        self.kernels.get(task, lambda: None)()
        with self.monitor:
            self.done.append(task)
            self.monitor.changed()


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of threads and the host have the same clock, so that no anchor is off: how far it is
    depends on how busy the machine is."""

    def anchor(self: StreamClock) -> None:
        self._base = self._gpu.event(blocking=False)
        self._base.record(self._stream)
        self._base.synchronize()
        self._base_s = self._base.come_s

    monkeypatch.setattr(StreamClock, "_anchor", anchor)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.close()


class Gate:
    """A kernel that ends when a test wants it to."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def __call__(self) -> None:
        assert self._opened.wait(PATIENCE_S), "nobody opens"

    def open(self) -> None:
        self._opened.set()


def task(number: int, *after: Task) -> Task:
    return Task(Kind.ATTEND, 0, number, after=after)


def test_streams_wait_for_each_other_and_the_host_does_not(machine: Machine) -> None:
    for name in ("gpu", "vram->dram", "weight block"):
        machine.lane(name)
    first = task(0)
    second = task(1, first)
    third = task(2, first, second)
    machine.kernels[first] = gate = Gate()
    machine.launch("gpu", first)
    machine.launch("vram->dram", second)
    machine.launch("weight block", third)
    machine.wait(lambda: len(machine.issued) == 3)
    assert not machine.done
    assert all(lane.is_running for lane in machine.lanes.values())
    assert not any(machine.has_ended(each) for each in (first, second, third))
    gate.open()
    machine.finish()
    assert machine.done == [first, second, third]
    assert [span.task for span in machine.spans] == [first, second, third]


def test_ends_are_told_in_an_order_that_makes_sense(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the thread that waits for the first is late."""
    late, synchronize = Gate(), FakeEvent.synchronize

    def be_late(self: FakeEvent) -> None:
        synchronize(self)
        if threading.current_thread().name == "gpu (ends)":
            late()

    monkeypatch.setattr(FakeEvent, "synchronize", be_late)
    machine.lane("gpu")
    machine.lane("vram->dram")
    first = task(0)
    second = task(1, first)
    machine.launch("gpu", first)
    machine.launch("vram->dram", second)
    machine.wait(lambda: machine.done == [first, second])
    threading.Timer(0.02, late.open).start()
    machine.finish()
    assert [span.task for span in machine.spans] == [first, second]


def test_a_host_lane_begins_when_a_kernel_is_done_and_a_stream_when_the_host_is(
    machine: Machine,
) -> None:
    for name in ("gpu", "cpu", "dram->vram"):
        machine.lane(name)
    down, other = task(0), task(3)
    here = task(1, down)
    up = task(2, here)
    machine.kernels[down] = gate = Gate()
    machine.launch("gpu", down)
    machine.launch("cpu", here)
    machine.launch("dram->vram", up)
    machine.launch("gpu", other)
    machine.wait(lambda: other in machine.issued)
    assert machine.issued == [down, other]
    gate.open()
    machine.finish()
    assert [each for each in machine.done if each is not other] == [down, here, up]


def test_only_so_many_tasks_are_issued_at_once(machine: Machine) -> None:
    machine.lane("gpu")
    most = 0

    def count() -> None:
        nonlocal most
        with machine.monitor:
            most = max(most, len(machine.issued) - len(machine.done))

    tasks = [task(number) for number in range(3 * MAX_ISSUED)]
    machine.kernels = dict.fromkeys(tasks, count)
    gate = Gate()
    machine.kernels[tasks[0]] = gate
    machine.launch("gpu", *tasks)
    machine.wait(lambda: len(machine.issued) == MAX_ISSUED)
    gate.open()
    machine.finish()
    assert machine.done == tasks
    assert 1 <= most <= MAX_ISSUED


class Chunks:
    """A mover of one expert of so many chunks."""

    def __init__(self, machine: Machine, count: int, kernel: Kernel) -> None:
        self.lost_chunks: list[Chunk] = []
        self._machine = machine
        self._load = Load(ExpertKey(0, 0), count)
        self._kernel = kernel
        self.num_moved = 0
        self.most_on_their_way = 0

    def next_chunk(self) -> Chunk | None:
        if self._load.num_issued == self._load.num_chunks:
            return None
        self._load.num_issued += 1
        on_their_way = self._load.num_issued - self.num_moved
        self.most_on_their_way = max(self.most_on_their_way, on_their_way)
        return Chunk(self._load, self._load.num_issued - 1, 7)

    def task_of(self, chunk: Chunk) -> Task:
        return Task(Kind.CHUNK, 0, expert=0, part=chunk.number)

    def move(self, chunk: Chunk) -> None:
        self._machine.gpu.launch(self._kernel)

    def moved(self, chunk: Chunk) -> None:
        self.num_moved += 1

    def lost(self, chunk: Chunk) -> None:
        self.lost_chunks.append(chunk)


def test_chunks_go_on_beside_a_task_that_cannot_start_few_at_a_time(machine: Machine) -> None:
    chunks = Chunks(machine, 20, lambda: None)
    machine.lane("gpu")
    computed = task(0)
    up = task(1, computed)
    machine.kernels[computed] = gate = Gate()
    machine.launch("gpu", computed)
    machine.wait(lambda: computed in machine.issued)
    machine.lane("dram->vram", mover=chunks)
    machine.launch("dram->vram", up)
    machine.wait(lambda: chunks.num_moved == 20)
    # It could have been issued; chunks would then have had to wait for it.
    assert machine.issued == [computed]
    gate.open()
    machine.finish()
    assert chunks.most_on_their_way == MAX_ISSUED_BEFORE_CHUNK
    assert {span.slots for span in machine.spans if span.task.kind is Kind.CHUNK} == {(7,)}


def test_more_chunks_are_on_their_way_where_they_are_small(machine: Machine) -> None:
    """So many as take the link 3 ms."""
    gate = Gate()
    chunks = Chunks(machine, 50, gate)
    small = {"num_bytes": lambda task: 10**7, "rate": 25e9}
    machine.lane("dram->vram", mover=chunks, **small)
    machine.wait(lambda: chunks.most_on_their_way == 8)
    threading.Timer(0.02, gate.open).start()
    machine.wait(lambda: chunks.num_moved == 50)
    assert chunks.most_on_their_way == 8


def test_a_failure_on_the_device_is_told_and_ends_what_was_issued(machine: Machine) -> None:
    machine.lane("gpu")
    tasks = [task(number) for number in range(3 * MAX_ISSUED)]

    def fail() -> None:
        raise ValueError("an illegal address")

    machine.kernels[tasks[5]] = fail
    machine.launch("gpu", *tasks)
    machine.wait(lambda: machine._failure)
    machine.wait(lambda: not machine.lanes["gpu"].is_running)
    assert str(machine._failure) == "device-side failure"
    assert machine.done == tasks[:5]
    with machine.monitor:
        machine.lanes["gpu"].abandon()


def test_a_lane_runs_while_it_issues_whatever_has_failed_before(machine: Machine) -> None:
    gate, issuing, goes_on = Gate(), threading.Event(), threading.Event()

    def fail() -> None:
        gate()
        raise ValueError("an illegal address")

    def work(each: Task) -> None:
        if each == task(0):
            machine.gpu.launch(fail)
        else:
            issuing.set()
            assert goes_on.wait(PATIENCE_S)

    lane = machine.lanes["gpu"] = machine._make(GPU, LaneWork(run=work))
    machine.launch("gpu", task(0), task(1))
    assert issuing.wait(PATIENCE_S)
    gate.open()
    machine.wait(lambda: machine._failure)
    with machine.monitor:
        was_running = lane.is_running
    goes_on.set()
    assert was_running
    machine.wait(lambda: not lane.is_running)


def test_what_was_issued_is_done_before_a_failure_of_issuing_is_told(machine: Machine) -> None:
    order: list[str] = []
    gate = Gate()

    def work(task: Task) -> None:
        machine.gpu.launch(gate)
        machine.gpu.launch(lambda: order.append("kernel"))
        threading.Timer(0.01, gate.open).start()
        raise ValueError("out of memory")

    failed = machine.failed

    def note(error: BaseException) -> None:
        order.append("told")
        failed(error)

    machine.failed = note  # type: ignore[method-assign]
    machine.lanes["gpu"] = machine._make(GPU, LaneWork(run=work))
    machine.launch("gpu", task(0), task(1))
    machine.wait(lambda: machine._failure)
    assert order == ["kernel", "told"]
    assert not machine.lanes["gpu"].is_running


def test_after_a_failure_that_was_forgotten_lanes_go_on(machine: Machine) -> None:
    machine.lane("gpu")
    refused = task(0)
    run = machine._issue

    def refuse(each: Task) -> None:
        if each is refused:
            raise MemoryError
        run(each)

    machine.lanes["cpu"] = machine._make(GPU, LaneWork(run=refuse))
    machine.launch("cpu", refused, task(1))
    machine.wait(lambda: machine._failure)
    with machine.monitor:
        machine.lanes["cpu"].abandon()
        machine._failure = None
        machine._pending.clear()
    machine.launch("cpu", task(2))
    machine.finish()
    assert machine.done == [task(2)]


def test_a_chunk_that_cannot_be_moved_is_told(machine: Machine) -> None:
    class Broken(Chunks):
        def move(self, chunk: Chunk) -> None:
            raise ValueError("no such memory")

    chunks = Broken(machine, 1, lambda: None)
    machine.lane("dram->vram", mover=chunks)
    machine.wait(lambda: machine._failure)
    assert not machine.lanes["dram->vram"].is_running
    assert [chunk.number for chunk in chunks.lost_chunks] == [0]


def test_closing_waits_for_what_was_issued(machine: Machine) -> None:
    machine.lane("gpu")
    tasks = [task(number) for number in range(3)]
    machine.kernels[tasks[0]] = gate = Gate()
    machine.launch("gpu", *tasks)
    machine.wait(lambda: len(machine.issued) == 3)
    threading.Timer(0.01, gate.open).start()
    machine.lanes["gpu"].close()
    assert [span.task for span in machine.spans] == tasks
    assert not machine.lanes["gpu"].is_running


def test_times_are_in_the_order_of_the_stream(machine: Machine) -> None:
    machine.lane("gpu")
    tasks = [task(number) for number in range(50)]
    machine.launch("gpu", *tasks)
    machine.finish()
    assert all(span.start_s <= span.end_s for span in machine.spans)
    for first, second in pairwise(machine.spans):
        assert first.end_s <= second.start_s


def test_lanes_begin_when_all_that_was_loaded_is_there() -> None:
    machine = Machine()
    assert machine.gpu.num_settled == 1


ON_COMPUTE = {
    Decoder: (
        *("embed", "attend", "project", "add_attention", "route", "run_experts", "combine"),
        *("add_dense", "logits"),
    ),
    BatchPlanner: ("plan",),
    BrokenRows: ("look",),
    Sampler: ("sample",),
}
"""All that allocates on the GPU while a job runs."""


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    """Streams for an emulated GPU. Kernels run when they are issued there, and ends come late."""
    gpu = FakeGpu(Random(3))
    streams = CudaStreams(gpu)
    assemble = _Assembly.__init__

    def with_streams(self: _Assembly, *arguments: Any) -> None:
        assemble(self, *arguments)
        self._streams = streams

    def on_compute(step: Callable[..., object]) -> Callable[..., object]:
        @wraps(step)
        def checked(*arguments: object, **options: object) -> object:
            assert gpu.current is streams.compute, f"{step.__name__} is on another stream"
            return step(*arguments, **options)

        return checked

    monkeypatch.setattr(_Assembly, "__init__", with_streams)
    for owner, steps in ON_COMPUTE.items():
        for step in steps:
            monkeypatch.setattr(owner, step, on_compute(getattr(owner, step)))
    return streams


@pytest.mark.few
@pytest.mark.parametrize("name", ["klotski", "cgopipe", "flexgen"])
@pytest.mark.parametrize(
    "title",
    [
        "three levels",
        "CPU attention",
        "CPU attention, cache on the GPU",
        "GPU attention, cache in main memory",
    ],
)
def test_schedules_compute_the_same_on_streams(
    tiny_checkpoint: Callable[..., Path],
    streams: CudaStreams,
    tmp_path: Path,
    name: str,
    title: str,
) -> None:
    folder, rows = tiny_checkpoint("mixtral"), requests((1, 17, 40, 3, 33, 8), max_tokens=6)
    chosen = replace(EMULATED[title], schedule=name)
    outcomes, _ = run(folder, chosen, rows, scratch=tmp_path, clock_s=1e-6)
    model = load(folder)
    assert tokens_of(outcomes) == greedy_answers(model, rows, 6)
    assert not streams.issued


def test_logits_stay_where_they_are_computed(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = torch.Tensor.cpu

    def choices_alone(tensor: torch.Tensor) -> torch.Tensor:
        assert not tensor.is_floating_point(), f"{tuple(tensor.shape)} come down"
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", choices_alone)
    chosen = replace(EMULATED["three levels"], schedule="klotski")
    rows = requests((3, 17), max_tokens=2)
    outcomes, _ = run(tiny_checkpoint("mixtral"), chosen, rows, scratch=tmp_path)
    assert all(outcome.choices for outcome in outcomes)


def test_threads_take_turns_more_often_while_they_issue(
    tiny_checkpoint: Callable[..., Path], streams: CudaStreams, tmp_path: Path
) -> None:
    before = sys.getswitchinterval()
    order = EngineSpec(
        files=open_model(tiny_checkpoint("mixtral"), "float32"),
        policy=replace(EMULATED["three levels"], schedule="klotski"),
        max_tokens=64,
        device=emulated(),
        scratch=tmp_path,
    )
    built = build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    with closing(built):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("step", ["attend", "run_experts"])
def test_when_memory_is_refused_on_streams_passes_shrink(
    tiny_checkpoint: Callable[..., Path],
    streams: CudaStreams,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    refusals = iter([False] * 7 + [True] + [False] * 20 + [True] * 2 + [False] * 10**6)
    real = getattr(Decoder, step)

    def refusing(self: Decoder, *arguments: object) -> object:
        if next(refusals):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, step, refusing)
    folder, rows = tiny_checkpoint("mixtral"), requests((1, 17, 40, 3, 33, 8), max_tokens=6)
    order = EngineSpec(
        files=open_model(folder, "float32"),
        policy=EMULATED["GPU attention, cache in main memory"],
        max_tokens=512,
        device=emulated(),
    )
    built = build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    with closing(built), torch.inference_mode():
        outcomes = sorted(built.engine.run(rows), key=lambda outcome: outcome.request.index)
        assert built.engine.statistics.num_shrunk == 3
        assert not streams.issued
    model = load(folder)
    assert tokens_of(outcomes) == greedy_answers(model, rows, 6)
