"""What tasks of gates, experts and dense MLPs do."""

from collections.abc import Callable, Mapping

from moebatch.engine.attention_work import AttentionWork
from moebatch.engine.broken import BrokenRows
from moebatch.engine.pass_context import PassContext, PassRows
from moebatch.model.router import Routing
from moebatch.schedule.task import Kind, Task


class ExpertWork:
    """All of one pass that follows attention, and what its gates have said so far."""

    def __init__(self, rows: PassRows, context: PassContext, attention: AttentionWork) -> None:
        self.broken = BrokenRows(is_lazy=rows.x_TD.is_cuda)
        self._rows = rows
        self._attention = attention
        self._decoder = context.decoder
        self._weights = context.weights
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
        }

    def routing(self, step: int, k: int) -> Routing:
        """What a gate has said."""
        return self._routings[step][k]

    def _gate(self, task: Task) -> None:
        assert task.micro_batch is not None, "a gate is that of a micro-batch"
        layer, rows = self._rows.layer(task), self._rows.rows(task)
        routing = self._decoder.route(layer, self._rows.x_TD, rows)
        self._routings.setdefault(task.step, {})[task.micro_batch] = routing

    def _expert(self, task: Task) -> None:
        assert task.expert is not None, "a task of an expert"
        layer = self._rows.layer(task)
        if task.micro_batch is None:
            routing = self._joined_at(task.step)
        else:
            routing = self._routings[task.step][task.micro_batch]
        tensors = self._weights.tensors(task.step, task.expert)
        self._decoder.run_expert(layer, routing, task.expert, tensors)

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
            tensors = self._weights.tensors(task.step, expert)
            self._decoder.run_expert(layer, routing, expert, tensors)
        self._decoder.combine(layer, x_TD, routing)
        self.broken.look(x_TD, layer, routing, rows)

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
