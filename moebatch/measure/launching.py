"""What a task costs beside its work: handing it to its lane, looking at each of its experts, and
launching its operators."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import torch

from moebatch.engine.lanes.cuda_lane import CudaStreams, cuda_lanes
from moebatch.engine.lanes.executor import Executor
from moebatch.engine.lanes.lane import LaneWork
from moebatch.engine.lanes.recorder import Recorder
from moebatch.layout.scratch import Limits
from moebatch.measure.sizes import TINY_MODEL
from moebatch.measure.synthetic import synthetic_layer
from moebatch.measure.timer import CacheSweep, Timer
from moebatch.model.gpu import loader as gpu
from moebatch.plan.pricing.launches import Launches
from moebatch.schedule.drivers.driver import Driver
from moebatch.schedule.lanes import CPU, GPU
from moebatch.schedule.registry import find_schedule
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.steps.kv_route import Place
from moebatch.schedule.task import Task
from moebatch.spec.policy.policy import DEFAULT_SCHEDULE
from moebatch.store.monitor import Monitor

_LAYERS, _EXPERTS, _MICRO_BATCHES = 4, 8, 4
_TASKS = _LAYERS * (2 * _MICRO_BATCHES + _EXPERTS + 1)
"""Of a pass: attention and gate of each micro-batch, every expert, and their sum."""
_TOKENS = 4
_TOGETHER = 16
"""Experts of a task that has many."""


def task_s(timer: Timer, sweep: CacheSweep | None) -> float:
    """Seconds of a task whose lane has nothing to do for it: the driver's next step, its launch,
    the way to the lane and the note of its end.

    With `sweep` they are those between tasks that sweep caches, as what a CPU computes does.
    """
    sweeping = None if sweep is None else _Sweeping(sweep)
    bare = _BarePasses(timer.device, _EXPERTS, work=sweeping or _nothing)
    with torch.inference_mode(), closing(bare) as passes:
        if sweeping is None:
            return timer.seconds(passes.run) / _TASKS
        return timer.seconds_told(partial(sweeping.between_s, passes.run)) / _TASKS


def another_expert_s(timer: Timer, launched_s: float) -> float:
    """Seconds of the host for each expert of a task after the first: its step of the driver, its
    tokens, and where its matrices lie.

    Args:
        launched_s: Seconds of a launch; those that experts add are not a part of it.
    """
    numbers = 1, _TOGETHER
    with torch.inference_mode(), ExitStack() as stack:
        one, many = (
            stack.enter_context(closing(_BarePasses(timer.device, number, most_together=number)))
            for number in numbers
        )
        handed_s, all_handed_s = timer.seconds_of_each(one.run, many.run)
        first, every = (_BareExperts(timer.device, number, number) for number in numbers)
        looked_s, all_looked_s = timer.seconds_of_each(first.run_together, every.run_together)
    launches = every.num_launches(_TOGETHER) - first.num_launches(1)
    driver_s = max(0.0, all_handed_s - handed_s) / _LAYERS
    decoder_s = max(0.0, all_looked_s - looked_s - launches * launched_s)
    return (driver_s + decoder_s) / (_TOGETHER - 1)


def launch_s(timer: Timer, sweep: CacheSweep | None) -> float:
    """Seconds of a launch, in the experts of a layer so small that they have nothing else to do;
    each behind a `sweep` of caches, if there is one."""
    experts = _BareExperts(timer.device, TINY_MODEL.num_experts, TINY_MODEL.experts_per_token)
    if sweep is not None:
        return timer.seconds(experts.run_first, prepare=sweep) / experts.num_launches(1)
    seconds = timer.seconds(experts.run_each)
    return seconds / (len(experts.chosen) * experts.num_launches(1))


def _nothing(task: Task) -> None:
    pass


class _BareExperts:
    """Experts of a layer so small that they have nothing to do but to be launched."""

    def __init__(self, device: torch.device, num_experts: int, experts_per_token: int) -> None:
        sizes = replace(TINY_MODEL, num_experts=num_experts, experts_per_token=experts_per_token)
        limits = Limits(pass_tokens=_TOKENS, micro_batch_tokens=_TOKENS, context_tokens=_TOKENS)
        layer = synthetic_layer(sizes, limits, torch.float32, device)
        self._x_TD, self._decoder = layer.hidden_states(_TOKENS), layer.decoder
        F, D = sizes.expert_width, sizes.hidden_size
        self._parts = [self._x_TD.new_zeros(size) for size in ((F, D), (F, D), (D, F))]
        self._routing = self._decoder.route(0, self._x_TD)
        self._launches = Launches(self._decoder.shape, is_fused=gpu.prepare() is None)

    @property
    def chosen(self) -> Sequence[int]:
        return self._routing.experts

    def num_launches(self, number: int) -> float:
        """Of so many experts that are computed together."""
        return self._launches.of_experts([1] * number)

    def run_each(self) -> None:
        """All of them, one after the other."""
        for expert in self.chosen:
            self._run(expert)

    def run_first(self) -> None:
        self._run(self.chosen[0])

    def _run(self, expert: int) -> None:
        self._decoder.run_experts(0, self._routing, {expert: self._parts})

    def run_together(self) -> None:
        """Chooses, and runs all of them in one call."""
        routing = self._decoder.route(0, self._x_TD)
        self._decoder.run_experts(0, routing, dict.fromkeys(routing.experts, self._parts))


class _AllChosen:
    """Gates that choose every expert."""

    def __init__(self, num_experts: int) -> None:
        self._experts = range(num_experts)

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        return self._experts

    def selected(self, step: int, micro_batch: int, later: int) -> Sequence[int]:
        return self._experts

    def ranked(self, step: int) -> Sequence[int]:
        return self._experts

    def chances(self, layer: int) -> Sequence[float]:
        return [1.0] * len(self._experts)


class _BarePasses:
    """Passes of a schedule whose experts are all where they are computed, in no time."""

    def __init__(
        self,
        device: torch.device,
        num_experts: int,
        *,
        most_together: int = 1,
        work: Callable[[Task], None] = _nothing,
    ) -> None:
        """`work` is what tasks do."""
        compute: Place = "vram" if device.type == "cuda" else "dram"
        keys = [ExpertKey(layer, e) for layer in range(_LAYERS) for e in range(num_experts)]
        setup = Setup(
            num_layers=_LAYERS,
            num_experts=num_experts,
            moe_layers=frozenset(range(_LAYERS)),
            num_hot=num_experts,
            compute=compute,
            most_together=most_together,
        )
        slots = SlotQueue(dict.fromkeys(keys, 1), num_slots=0, resident=keys)
        slots.fill_residents()
        self._executor = Executor(setup, Recorder(_LAYERS), Monitor())
        lane = LaneWork(run=work)
        if compute == "vram":
            self._executor.add(cuda_lanes(self._executor, CudaStreams())(GPU, lane))
        else:
            self._executor.add_inline(CPU.name, work)
        self._driver = Driver(
            find_schedule(DEFAULT_SCHEDULE)(setup),
            setup,
            lanes=self._executor,
            router=_AllChosen(num_experts),
            slots=slots,
        )
        self._executor.drive(self._driver)

    def run(self) -> None:
        on_cpu = (False,) * _MICRO_BATCHES
        self._executor.run_pass(Sweep(num_micro_batches=_MICRO_BATCHES, on_cpu=on_cpu))

    def close(self) -> None:
        """Ends its threads."""
        self._driver.close()
        self._executor.close()


class _Sweeping:
    """Tasks that sweep caches, and note how long it takes from one to the next."""

    def __init__(self, sweep: CacheSweep) -> None:
        self._sweep = sweep
        self._ended_s = self._between_s = 0.0

    def __call__(self, task: Task) -> None:
        self._between_s += time.perf_counter() - self._ended_s
        self._sweep()
        self._ended_s = time.perf_counter()

    def between_s(self, run: Callable[[], None]) -> float:
        """Seconds of a run of such tasks, sweeping left out."""
        self._between_s, self._ended_s = 0.0, time.perf_counter()
        run()
        return self._between_s + time.perf_counter() - self._ended_s
