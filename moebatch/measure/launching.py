"""What a task costs beside its work: handing it to its lane, and launching its operators."""

from collections.abc import Sequence

import torch

from moebatch.engine.lanes.cuda_lane import CudaStreams, cuda_lanes
from moebatch.engine.lanes.executor import Executor
from moebatch.engine.lanes.lane import LaneWork
from moebatch.engine.lanes.recorder import Recorder
from moebatch.layout.scratch import Limits
from moebatch.measure.sizes import TINY_MODEL
from moebatch.measure.synthetic import synthetic_layer
from moebatch.measure.timer import Timer
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


def task_s(timer: Timer) -> float:
    """Seconds of a task whose lane has nothing to do for it: the driver's next step, its launch,
    the way to the lane and the note of its end."""
    with torch.inference_mode():
        passes = _BarePasses(timer.device)
        try:
            return timer.seconds(passes.run) / _TASKS
        finally:
            passes.close()


def launch_s(timer: Timer) -> float:
    """Seconds of a launch, in the experts of a layer so small that they have nothing else to do."""
    limits = Limits(pass_tokens=_TOKENS, micro_batch_tokens=_TOKENS, context_tokens=_TOKENS)
    layer = synthetic_layer(TINY_MODEL, limits, torch.float32, timer.device)
    x_TD, decoder = layer.hidden_states(_TOKENS), layer.decoder
    routing = decoder.route(0, x_TD)
    width, hidden = TINY_MODEL.expert_width, TINY_MODEL.hidden_size
    parts = [x_TD.new_zeros(size) for size in ((width, hidden), (width, hidden), (hidden, width))]

    def run() -> None:
        for expert in routing.experts:
            decoder.run_experts(0, routing, {expert: parts})

    launches = Launches(decoder.shape, is_fused=gpu.prepare() is None)
    return timer.seconds(run) / (len(routing.experts) * launches.of_experts([1]))


class _AllChosen:
    """Gates that choose every expert."""

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        return range(_EXPERTS)

    def selected(self, step: int, micro_batch: int, later: int) -> Sequence[int]:
        return range(_EXPERTS)

    def ranked(self, step: int) -> Sequence[int]:
        return range(_EXPERTS)

    def chances(self, layer: int) -> Sequence[float]:
        return [1.0] * _EXPERTS


class _BarePasses:
    """Passes of a schedule whose experts are all where they are computed, in no time."""

    def __init__(self, device: torch.device) -> None:
        compute: Place = "vram" if device.type == "cuda" else "dram"
        keys = [ExpertKey(layer, e) for layer in range(_LAYERS) for e in range(_EXPERTS)]
        setup = Setup(
            num_layers=_LAYERS,
            num_experts=_EXPERTS,
            moe_layers=frozenset(range(_LAYERS)),
            num_hot=_EXPERTS,
            compute=compute,
        )
        slots = SlotQueue(dict.fromkeys(keys, 1), num_slots=0, resident=keys)
        slots.fill_residents()
        self._executor = Executor(setup, Recorder(_LAYERS), Monitor())
        work = LaneWork(run=_nothing)
        if compute == "vram":
            self._executor.add(cuda_lanes(self._executor, CudaStreams())(GPU, work))
        else:
            self._executor.add_inline(CPU.name, _nothing)
        self._driver = Driver(
            find_schedule(DEFAULT_SCHEDULE)(setup),
            setup,
            lanes=self._executor,
            router=_AllChosen(),
            slots=slots,
        )
        self._executor.drive(self._driver)

    def run(self) -> None:
        """One pass."""
        on_cpu = (False,) * _MICRO_BATCHES
        self._executor.run_pass(Sweep(num_micro_batches=_MICRO_BATCHES, on_cpu=on_cpu))

    def close(self) -> None:
        """Ends its threads."""
        self._driver.close()
        self._executor.close()


def _nothing(task: Task) -> None:
    pass
