"""What tasks of gates, experts and dense MLPs do, and those that bring weights in pages."""

from collections.abc import Callable, Mapping

from moebatch.engine.attention_work import AttentionWork
from moebatch.engine.broken import BrokenRows
from moebatch.engine.parts import Pages, Parts
from moebatch.engine.pass_rows import PassRows
from moebatch.model.router import Routing
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.task import Kind, Task


class ExpertWork:
    """All of one pass that follows attention, and what its gates have said so far."""

    def __init__(self, rows: PassRows, parts: Parts, attention: AttentionWork) -> None:
        self.broken = BrokenRows(is_lazy=rows.x_TD.is_cuda)
        self._rows = rows
        self._attention = attention
        self._decoder = parts.decoder
        self._experts = parts.experts
        self._paged = parts.pages
        self._routings: dict[int, dict[int, Routing]] = {}
        self._joined: dict[int, Routing] = {}

    @property
    def tasks(self) -> Mapping[Kind, Callable[[Task], None]]:
        """What to do by the kind of a task."""
        return {
            Kind.POST: self._post,
            Kind.GATE: self._gate,
            Kind.EXPERT: self._expert,
            Kind.COMBINE: self._combine,
            Kind.DENSE: self._dense,
            Kind.STAGE: self._stage,
            Kind.PAGE: self._page,
            Kind.BLOCK: self._block,
        }

    def num_bytes(self, task: Task) -> int:
        """Bytes that one of these tasks moves over its link, experts one by one left out."""
        if task.kind in (Kind.STAGE, Kind.PAGE, Kind.BLOCK):
            return self._pages.num_bytes(task.step, *_page_of(task))
        return 0

    def routing(self, step: int, k: int) -> Routing:
        """What a gate has said."""
        return self._routings[step][k]

    # --- experts one by one ---------------------------------------------------------------------

    def _gate(self, task: Task) -> None:
        assert task.micro_batch is not None, "a gate is that of a micro-batch"
        layer, rows = self._rows.layer(task), self._rows.rows(task)
        routing = self._decoder.route(layer, self._rows.x_TD, rows)
        self._routings.setdefault(task.step, {})[task.micro_batch] = routing

    def _expert(self, task: Task) -> None:
        assert self._experts is not None and task.expert is not None, "experts come one by one"
        layer = self._rows.layer(task)
        if task.micro_batch is None:
            routing = self._joined_at(task.step)
        else:
            routing = self._routings[task.step][task.micro_batch]
        tensors = self._experts.tensors(ExpertKey(layer, task.expert))
        self._decoder.run_expert(layer, routing, task.expert, tensors)

    def _combine(self, task: Task) -> None:
        layer, routing = self._rows.layer(task), self._joined_at(task.step)
        self._decoder.combine(layer, self._rows.x_TD, routing)
        self.broken.look(self._rows.x_TD, layer, routing)
        self._forget(task.step)

    def _dense(self, task: Task) -> None:
        layer = self._rows.layer(task)
        for rows in self._attention.attended(task.step):
            self._decoder.add_dense(layer, self._rows.x_TD, rows)
        self.broken.look(self._rows.x_TD, layer, None)

    def _joined_at(self, step: int) -> Routing:
        if step not in self._joined:
            self._joined[step] = Routing.join(list(self._routings[step].values()))
        return self._joined[step]

    def _forget(self, step: int) -> None:
        self._joined.pop(step, None)
        self._routings.pop(step, None)
        self._attention.attended(step)

    # --- weights in pages -----------------------------------------------------------------------

    def _post(self, task: Task) -> None:
        """Everything after attention, for one micro-batch, from weights that are all there."""
        layer, item = self._rows.layer(task), self._rows.input(task)
        if self._rows.is_beside(item):
            self._attention.out(task)
        self._attention.attended(task.step)
        x_TD, rows = self._rows.x_TD, item.group.rows
        if not self._rows.setup.is_moe(task.step):
            self._decoder.add_dense(layer, x_TD, rows)
            return
        routing = self._decoder.route(layer, x_TD, rows)
        for expert in routing.tokens:
            tensors = self._pages.tensors(task.step, expert)
            self._decoder.run_expert(layer, routing, expert, tensors)
        self._decoder.combine(layer, x_TD, routing)
        self.broken.look(x_TD, layer, routing, rows)

    def _stage(self, task: Task) -> None:
        self._pages.stage(task.step, *_page_of(task))

    def _page(self, task: Task) -> None:
        self._pages.page(task.step, *_page_of(task))

    def _block(self, task: Task) -> None:
        self._pages.block(task.step)

    @property
    def _pages(self) -> Pages:
        assert self._paged is not None, "weights go up in pages"
        return self._paged


def _page_of(task: Task) -> tuple[int, int]:
    """Page and number of pages."""
    return task.page or 0, task.num_pages or 1
