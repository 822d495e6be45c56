"""What the tasks of one pass do: attention where it is computed, keys and values on their way,
gates, experts.

Shape letters: T tokens of the pass, D hidden.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moebatch.engine.passes.broken import BrokenRows
from moebatch.engine.passes.exchange import CpuAttention, ExchangeBuffers
from moebatch.engine.passes.layout import AttentionInput
from moebatch.engine.passes.log import PassLog
from moebatch.engine.weights import WeightStream
from moebatch.model.batch import MicroBatch
from moebatch.model.decoder import Decoder
from moebatch.model.routing.router import Routing
from moebatch.predict.predictor import Predictor, RoutingObserver
from moebatch.schedule.drivers.foresight import Foresight
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.kv_route import FROM_ATTENTION, TO_ATTENTION
from moebatch.schedule.task import Kind, Task
from moebatch.spec.policy.policy import Policy
from moebatch.store.kv.cache import KVCache


@dataclass(frozen=True, kw_only=True, slots=True)
class PassContext:
    """Model, memory and what goes between them; all of it is there before the first pass."""

    decoder: Decoder
    cache: KVCache
    policy: Policy
    setup: Setup
    predictor: Predictor
    weights: WeightStream
    beside: CpuAttention | None
    """Where decoding sequences attend on the CPU beside a GPU."""
    observer: RoutingObserver | None = None
    log: PassLog | None = None
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Where the thread that launches computes what comes before a pass and after it."""
    foresight: Foresight = field(default_factory=Foresight)
    """How well experts are foreseen at the level that computes."""


class PassWork:
    """One pass: its hidden states, its micro-batches, and what gates have chosen so far.

    Tasks of different lanes are for different micro-batches, or wait for each other, so nothing
    here is locked.
    """

    def __init__(
        self, x_TD: Tensor, inputs: Sequence[AttentionInput], context: PassContext
    ) -> None:
        """`inputs` are those of the micro-batches, in their order."""
        self.broken = BrokenRows(is_lazy=x_TD.is_cuda)
        """Rows whose numbers stopped being numbers."""
        self._x_TD = x_TD
        self._inputs = inputs
        self._decoder, self._cache = context.decoder, context.cache
        self._beside, self._weights = context.beside, context.weights
        self._setup = context.setup
        self._attended: dict[int, list[slice]] = {}
        """By step, rows that have attended, in their order."""
        self._routings: dict[int, dict[int, Routing]] = {}
        self._joined: dict[int, Routing] = {}
        on_cpu = [k for k, item in enumerate(inputs) if self._is_beside(item)]
        self._place_on_cpu = {k: place for place, k in enumerate(on_cpu)}

    def run(self, task: Task) -> None:
        """Does what the task says, on the thread of its lane."""
        _DO[task.kind](self, task)

    def num_bytes(self, task: Task) -> int:
        """Bytes that a task of a link moves, weights left out."""
        match task.kind:
            case Kind.OFF | Kind.LOAD:
                assert self._beside is not None, "the CPU attends"
                layer, is_up = self._layer(task), task.kind is Kind.LOAD
                return self._num_tokens(task) * self._beside.token_bytes(layer, is_up=is_up)
            case Kind.KV_READ | Kind.KV_UP | Kind.KV_DOWN | Kind.KV_WRITE:
                view = self._input(task).view
                assert view is not None, "layers live elsewhere"
                return self._cache.num_bytes(task.kind, view, self._layer(task))
            case _:
                return 0

    def routing(self, step: int, k: int) -> Routing:
        """What a gate has chosen."""
        return self._routings[step][k]

    # --- attention ------------------------------------------------------------------------------

    def _attend(self, task: Task) -> None:
        layer, item = self._layer(task), self._input(task)
        parts = self._cache.parts(item.group.place, layer, item.window)
        rows = self._micro_batch(item, layer)
        self._decoder.attend(layer, self._x_TD, rows, parts)
        self._has_attended(task)

    def _pre(self, task: Task) -> None:
        micro_batch, into = self._input(task).direct, self._buffers(task).qkv
        self._decoder.project(self._layer(task), self._x_TD, micro_batch, into=into)

    def _off(self, task: Task) -> None:
        self._buffers(task).off(self._num_tokens(task))

    def _load(self, task: Task) -> None:
        self._buffers(task).load(self._num_tokens(task))

    def _attn(self, task: Task) -> None:
        assert self._beside is not None, "the CPU attends"
        layer, item, buffers = self._layer(task), self._input(task), self._buffers(task)
        kv = self._cache.tensors(item.group.place, layer, item.window)
        self._beside.core.attend(
            layer,
            buffers.host_qkv,
            self._micro_batch(item, layer),
            kv.parts,
            buffers.host_out_NHV,
        )

    def _out(self, task: Task) -> None:
        """Takes in what the CPU has made of a micro-batch."""
        item, out_NHV = self._input(task), self._buffers(task).out_NHV
        self._decoder.add_attention(self._layer(task), self._x_TD, item.direct, out_NHV)
        self._has_attended(task)

    def _kv(self, task: Task) -> None:
        view = self._input(task).view
        assert view is not None, "layers live elsewhere"
        self._cache.move(task.kind, view, self._layer(task))

    def _has_attended(self, task: Task) -> None:
        self._attended.setdefault(task.step, []).append(self._rows(task))

    # --- what follows attention -----------------------------------------------------------------

    def _gate(self, task: Task) -> None:
        routing = self._decoder.route(self._layer(task), self._x_TD, self._rows(task))
        self._routings.setdefault(task.step, {})[task.k] = routing

    def _expert(self, task: Task) -> None:
        if task.micro_batch is None:
            routing = self._joined_at(task.step)
        else:
            routing = self._routings[task.step][task.micro_batch]
        self._run_experts(task, routing, task.experts)

    def _run_experts(self, task: Task, routing: Routing, experts: Iterable[int]) -> None:
        parts = {expert: self._weights.tensors(task.step, expert) for expert in experts}
        self._decoder.run_experts(self._layer(task), routing, parts)

    def _post(self, task: Task) -> None:
        """Everything after attention, for one micro-batch, from weights that are all there."""
        layer, item = self._layer(task), self._input(task)
        if self._is_beside(item):
            self._out(task)
        self._attended.pop(task.step, None)
        x_TD, rows = self._x_TD, self._rows(task)
        if not self._setup.is_moe(task.step):
            self._decoder.add_dense(layer, x_TD, rows)
            return
        routing = self._decoder.route(layer, x_TD, rows)
        self._run_experts(task, routing, routing.tokens)
        self._decoder.combine(layer, x_TD, routing)
        self.broken.look(x_TD, layer, routing, rows)

    def _combine(self, task: Task) -> None:
        layer, routing = self._layer(task), self._joined_at(task.step)
        self._decoder.combine(layer, self._x_TD, routing)
        self.broken.look(self._x_TD, layer, routing)
        del self._joined[task.step], self._routings[task.step]
        self._attended.pop(task.step, None)

    def _dense(self, task: Task) -> None:
        layer = self._layer(task)
        for rows in self._attended.pop(task.step, ()):
            self._decoder.add_dense(layer, self._x_TD, rows)
        self.broken.look(self._x_TD, layer, None)

    def _joined_at(self, step: int) -> Routing:
        if step not in self._joined:
            self._joined[step] = self._decoder.join([*self._routings[step].values()])
        return self._joined[step]

    # --- of a task ------------------------------------------------------------------------------

    def _layer(self, task: Task) -> int:
        return self._setup.layer(task.step)

    def _input(self, task: Task) -> AttentionInput:
        return self._inputs[task.k]

    def _rows(self, task: Task) -> slice:
        """Rows of its micro-batch that go through its layer."""
        return self._input(task).group.rows_in(self._decoder.shape, self._layer(task))

    def _num_tokens(self, task: Task) -> int:
        return self._input(task).direct.num_tokens

    def _micro_batch(self, item: AttentionInput, layer: int) -> MicroBatch:
        """Rows and plans of a layer whose cache lives where it attends, or comes there."""
        is_direct = item.view is None or self._cache.is_direct(item.group.place, layer)
        return item.direct if is_direct else item.windowed

    def _is_beside(self, item: AttentionInput) -> bool:
        """Whether a micro-batch attends on the CPU beside a GPU."""
        return self._setup.compute == "vram" and item.group.place == "dram"

    def _buffers(self, task: Task) -> ExchangeBuffers:
        """Counts micro-batches that attend on the CPU, in the order of their turns."""
        assert self._beside is not None, "the CPU attends"
        number = task.step * len(self._place_on_cpu) + self._place_on_cpu[task.k]
        return self._beside.buffers(number, self._layer(task))


# No table of its methods in each pass: what refers to itself keeps its hidden states until Python
# looks for such.
_DO: Mapping[Kind, Callable[[PassWork, Task], None]] = {
    Kind.ATTEND: PassWork._attend,
    Kind.PRE: PassWork._pre,
    Kind.OFF: PassWork._off,
    Kind.ATTN: PassWork._attn,
    Kind.LOAD: PassWork._load,
    Kind.OUT: PassWork._out,
    **dict.fromkeys((*TO_ATTENTION, *FROM_ATTENTION), PassWork._kv),
    Kind.POST: PassWork._post,
    Kind.GATE: PassWork._gate,
    Kind.EXPERT: PassWork._expert,
    Kind.COMBINE: PassWork._combine,
    Kind.DENSE: PassWork._dense,
}
