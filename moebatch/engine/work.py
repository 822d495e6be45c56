"""What each kind of task does to the pass in work.

Shape letters: T tokens of the pass, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from moebatch.engine.broken import BrokenRows
from moebatch.engine.exchange import Exchange, load_bytes, off_bytes
from moebatch.engine.layout import AttentionInput
from moebatch.model.attention_core import AttentionCore
from moebatch.model.decoder import Decoder
from moebatch.model.router import Routing
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots import ExpertKey
from moebatch.schedule.task import Kind, Task
from moebatch.store.kv import KVCache


class Experts(Protocol):
    """Experts where they are computed."""

    def tensors(self, key: ExpertKey) -> tuple[Tensor, ...]:
        """Matrices of an expert that has arrived."""


class Pages(Protocol):
    """Weights of steps that come in pages."""

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        """Matrices of an expert whose step is in place."""

    def stage(self, step: int, page: int, num_pages: int) -> None:
        """Copies a page into pinned memory."""

    def page(self, step: int, page: int, num_pages: int) -> None:
        """Brings a page to where it is computed."""

    def block(self, step: int) -> None:
        """Brings all pages at once."""

    def num_bytes(self, step: int, page: int = 0, num_pages: int = 1) -> int:
        """Bytes of a page."""

    def forget(self) -> None:
        """Nothing that has been brought is used any more."""


class PassWork:
    """One pass: its hidden states, its micro-batches, and what gates have said so far.

    Tasks of different lanes are for different micro-batches, or wait for each other, so nothing
    here is locked.
    """

    def __init__(
        self,
        x_TD: Tensor,
        inputs: Sequence[AttentionInput],
        *,
        setup: Setup,
        decoder: Decoder,
        cache: KVCache,
        experts: Experts | None,
        pages: Pages | None,
        core: AttentionCore | None,
        exchange: Exchange | None,
    ) -> None:
        self.x_TD = x_TD
        self.broken = BrokenRows(is_lazy=x_TD.is_cuda)
        self._inputs = inputs
        self._setup = setup
        self._decoder = decoder
        self._cache = cache
        self._experts = experts
        self._pages = pages
        self._core = core
        self._exchange = exchange
        self._routings: dict[int, dict[int, Routing]] = {}
        self._joined: dict[int, Routing] = {}
        self._attended: dict[int, list[slice]] = {}
        on_cpu = [k for k, item in enumerate(inputs) if self._is_beside(item)]
        self._place_on_cpu = {k: place for place, k in enumerate(on_cpu)}
        self._do: Mapping[Kind, Callable[[Task], None]] = {
            Kind.ATTEND: self._attend,
            Kind.PRE: self._pre,
            Kind.OFF: self._off,
            Kind.ATTN: self._attn,
            Kind.LOAD: self._load,
            Kind.OUT: self._out,
            Kind.POST: self._post,
            Kind.GATE: self._gate,
            Kind.EXPERT: self._expert,
            Kind.COMBINE: self._combine,
            Kind.DENSE: self._dense,
            Kind.STAGE: self._stage,
            Kind.PAGE: self._page,
            Kind.BLOCK: self._block,
            Kind.KV_READ: self._kv,
            Kind.KV_UP: self._kv,
            Kind.KV_DOWN: self._kv,
            Kind.KV_WRITE: self._kv,
        }

    def run(self, task: Task) -> None:
        """Does what the task says, on the thread of its lane."""
        self._do[task.kind](task)

    def num_bytes(self, task: Task) -> int:
        """Bytes that a task of a link moves, experts left out."""
        shape, itemsize = self._decoder.shape, self._decoder.dtype.itemsize
        match task.kind:
            case Kind.OFF:
                return off_bytes(shape, self._num_tokens(task), itemsize)
            case Kind.LOAD:
                return load_bytes(shape, self._num_tokens(task), itemsize)
            case Kind.STAGE | Kind.PAGE | Kind.BLOCK:
                assert self._pages is not None, "weights go up in pages"
                return self._pages.num_bytes(task.step, *_page_of(task))
            case Kind.KV_READ | Kind.KV_UP | Kind.KV_DOWN | Kind.KV_WRITE:
                view = self._input(task).view
                assert view is not None, "layers live elsewhere"
                return self._cache.num_bytes(task.kind, view, self._layer(task))
            case _:
                return 0

    def routing(self, step: int, k: int) -> Routing:
        """What a gate has said."""
        return self._routings[step][k]

    # --- attention ------------------------------------------------------------------------------

    def _attend(self, task: Task) -> None:
        layer, item = self._layer(task), self._input(task)
        direct = self._is_direct(item, layer)
        kv = self._cache.tensors(item.group.place, layer, item.window)
        micro_batch = item.micro_batch(direct=direct)
        self._decoder.attend(layer, self.x_TD, micro_batch, kv.keys_RGC, kv.values_RGC)
        self._has_attended(task)

    def _pre(self, task: Task) -> None:
        micro_batch = self._input(task).direct
        self._decoder.project(
            self._layer(task), self.x_TD, micro_batch, into=self._ring.qkv(self._number(task))
        )

    def _off(self, task: Task) -> None:
        self._ring.off(self._number(task), self._num_tokens(task))

    def _attn(self, task: Task) -> None:
        assert self._core is not None, "the CPU attends"
        layer, item, number = self._layer(task), self._input(task), self._number(task)
        direct = self._is_direct(item, layer)
        kv = self._cache.tensors(item.group.place, layer, item.window)
        self._core.attend(
            layer,
            self._ring.host_qkv(number),
            item.micro_batch(direct=direct),
            kv.keys_RGC,
            kv.values_RGC,
            self._ring.host_out(number),
        )

    def _load(self, task: Task) -> None:
        self._ring.load(self._number(task), self._num_tokens(task))

    def _out(self, task: Task) -> None:
        out_NHC = self._ring.out(self._number(task))
        item = self._input(task)
        self._decoder.add_attention(self._layer(task), self.x_TD, item.direct, out_NHC)
        self._has_attended(task)

    def _kv(self, task: Task) -> None:
        view, layer = self._input(task).view, self._layer(task)
        assert view is not None, "layers live elsewhere"
        move = {
            Kind.KV_READ: self._cache.read,
            Kind.KV_UP: self._cache.up,
            Kind.KV_DOWN: self._cache.down,
            Kind.KV_WRITE: self._cache.write,
        }[task.kind]
        move(view, layer)

    # --- experts --------------------------------------------------------------------------------

    def _gate(self, task: Task) -> None:
        rows = self._input(task).group.rows
        routing = self._decoder.route(self._layer(task), self.x_TD, rows)
        assert task.micro_batch is not None, "a gate is that of a micro-batch"
        self._routings.setdefault(task.step, {})[task.micro_batch] = routing

    def _expert(self, task: Task) -> None:
        assert self._experts is not None and task.expert is not None, "experts come one by one"
        layer = self._layer(task)
        if task.micro_batch is None:
            routing = self._joined_at(task.step)
        else:
            routing = self._routings[task.step][task.micro_batch]
        tensors = self._experts.tensors(ExpertKey(layer, task.expert))
        self._decoder.run_expert(layer, routing, task.expert, tensors)

    def _combine(self, task: Task) -> None:
        layer, routing = self._layer(task), self._joined_at(task.step)
        self._decoder.combine(layer, self.x_TD, routing)
        self.broken.look(self.x_TD, layer, routing)
        self._forget(task.step)

    def _dense(self, task: Task) -> None:
        layer = self._layer(task)
        for rows in self._attended.pop(task.step):
            self._decoder.add_dense(layer, self.x_TD, rows)
        self.broken.look(self.x_TD, layer, None)

    def _post(self, task: Task) -> None:
        """Everything after attention, for one micro-batch, from weights that are all there."""
        layer, item = self._layer(task), self._input(task)
        if self._is_beside(item):
            self._out(task)
        rows = item.group.rows
        self._attended.pop(task.step, None)
        if not self._setup.is_moe(task.step):
            self._decoder.add_dense(layer, self.x_TD, rows)
            return
        assert self._pages is not None, "weights go up in pages"
        routing = self._decoder.route(layer, self.x_TD, rows)
        for expert in routing.tokens:
            self._decoder.run_expert(layer, routing, expert, self._pages.tensors(task.step, expert))
        self._decoder.combine(layer, self.x_TD, routing)
        self.broken.look(self.x_TD, layer, routing, rows)

    def _stage(self, task: Task) -> None:
        assert self._pages is not None, "weights go up in pages"
        self._pages.stage(task.step, *_page_of(task))

    def _page(self, task: Task) -> None:
        assert self._pages is not None, "weights go up in pages"
        self._pages.page(task.step, *_page_of(task))

    def _block(self, task: Task) -> None:
        assert self._pages is not None, "weights go up in pages"
        self._pages.block(task.step)

    # --- names ----------------------------------------------------------------------------------

    @property
    def _ring(self) -> Exchange:
        assert self._exchange is not None, "the CPU attends"
        return self._exchange

    def _layer(self, task: Task) -> int:
        return self._setup.layer(task.step)

    def _input(self, task: Task) -> AttentionInput:
        assert task.micro_batch is not None, "a task of a micro-batch"
        return self._inputs[task.micro_batch]

    def _num_tokens(self, task: Task) -> int:
        return self._input(task).direct.num_tokens

    def _number(self, task: Task) -> int:
        """Counts micro-batches that attend on the CPU, in the order of their turns."""
        assert task.micro_batch is not None, "a task of a micro-batch"
        return task.step * len(self._place_on_cpu) + self._place_on_cpu[task.micro_batch]

    def _is_beside(self, item: AttentionInput) -> bool:
        return self._setup.compute == "vram" and item.group.place == "dram"

    def _is_direct(self, item: AttentionInput, layer: int) -> bool:
        return item.view is None or self._cache.is_direct(item.group.place, layer)

    def _has_attended(self, task: Task) -> None:
        self._attended.setdefault(task.step, []).append(self._input(task).group.rows)

    def _joined_at(self, step: int) -> Routing:
        if step not in self._joined:
            self._joined[step] = Routing.join(list(self._routings[step].values()))
        return self._joined[step]

    def _forget(self, step: int) -> None:
        self._joined.pop(step, None)
        self._routings.pop(step, None)
        self._attended.pop(step, None)


def _page_of(task: Task) -> tuple[int, int]:
    """Page and number of pages."""
    return task.page or 0, task.num_pages or 1
