"""What the simulator computes, priced by the planner's cost model or by a table."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from moebatch.advance import Advance, unwatched
from moebatch.arrays import Floats
from moebatch.layout.load import PassLoad
from moebatch.layout.placed import streamed_per_layer
from moebatch.layout.routing import chances_of_any, in_layer, num_likely
from moebatch.plan.pricing.task_prices import TaskPrices
from moebatch.plan.problem import Problem
from moebatch.plan.simulation.passes import MicroBatches
from moebatch.schedule.registry import traits_of
from moebatch.schedule.request import Sweep
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.task import Kind, Task
from moebatch.spec.policy.policy import Policy


class Routing(Protocol):
    """What gates say, and which experts are liked."""

    def rows(self, number: int, layer: int, micro_batch: int, tokens: float) -> Floats:
        """Tokens of each expert, [E], where so many tokens of a pass choose."""

    def chances(self, layer: int) -> Floats:
        """With what chance a token chooses each expert, [E]; K in all."""


class SimWorld:
    """Passes of one policy on one machine. Asked in the order of a simulation's clock."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        *,
        passes: Sequence[MicroBatches],
        routing: Routing,
        table: Mapping[Kind, float] | None = None,
        advance: Advance = unwatched,
    ) -> None:
        """`table` gives seconds of kinds of tasks, whatever the cost model says. `advance` is
        called with the share of all layers of all passes, 0 to 1, that have been gone through."""
        shape, placed = problem.shape, problem.placed(policy)
        level = int(traits_of(policy).foresees == "pre-gate")
        self.room = placed.room(expert_bytes=problem.dtypes.expert_bytes(shape))
        self.setup = placed.setup(activation_level=level)
        self.price = TaskPrices(prices=problem.prices, policy=policy)
        self.policy, self.routing, self.passes = policy, routing, passes
        self.table = table or {}
        self._advance = advance
        self._of_batch: dict[tuple[Kind, PassLoad, float], float | None] = {}
        """Prices that are alike of most micro-batches."""
        self._number = 0
        self._share = 1.0
        """Of all layers, those that this pass goes through."""
        self._present: dict[int, list[int]] = {}
        """Micro-batches that have attended, by step."""
        self._rows: dict[tuple[int, int], Floats] = {}
        """Tokens of each expert by layer and micro-batch, of this pass."""
        self._streamed = streamed_per_layer(shape, self.room.resident)
        """Experts that do not live where they are computed, by layer."""
        self._on_disk = Counter(key.layer for key in placed.expert_homes()["disk"])
        """Those of them that live on disk."""

    # --- as the simulator sees it ---------------------------------------------------------------

    def begin_pass(self, number: int) -> Sweep:
        """The pass of that number; after the last one given, that one again."""
        self._number = number
        self._present.clear()
        self._rows.clear()
        now = self._now
        sweep = Sweep(
            num_micro_batches=len(now.loads),
            on_cpu=now.on_cpu,
            encodes=any(load.prompt_tokens for load in now.loads),
            tokens=tuple(max(1, round(load.tokens)) for load in now.loads),
        )
        self._share = 1 - self.setup.in_pass(sweep).num_skipped / self.setup.num_layers
        return sweep

    def chosen(self, step: int, micro_batch: int) -> list[int]:
        """Experts that the micro-batch has tokens for."""
        rows = self._rows_of(self.setup.layer(step), micro_batch)
        return [int(expert) for expert in np.flatnonzero(rows > 0)]

    def selected(self, step: int, micro_batch: int, later: int) -> list[int]:
        """What the micro-batch will choose: a pre-gate says it earlier."""
        return self.chosen(later, micro_batch)

    def ranked(self, step: int) -> Sequence[int]:
        """The most popular experts of the layer: as many as the policy asks for, or as will
        probably be chosen."""
        chances_E = self.routing.chances(self.setup.layer(step))
        ranked: list[int] = np.argsort(-chances_E, kind="stable").tolist()
        if self.policy.num_hot is None:
            return ranked[: num_likely(chances_E, self._tokens_at(self.setup.layer(step)))]
        return ranked

    def chances(self, layer: int) -> Sequence[float]:
        """What so many tokens choose that like some experts better than others."""
        chances: list[float] = chances_of_any(
            self.routing.chances(layer), self._tokens_at(layer)
        ).tolist()
        return chances

    def seconds(self, task: Task) -> float:
        """What the table says of a kind of task, or the cost model."""
        if task.kind in (Kind.ATTEND, Kind.PRE):
            if task.step not in self._present:
                layer = self.setup.layer(task.step)
                self._advance((self._number + layer / self.setup.num_layers) / len(self.passes))
            self._present.setdefault(task.step, []).append(task.k)
        given = self.table.get(task.kind)
        return self._priced(task) if given is None else given

    # --- prices ---------------------------------------------------------------------------------

    def _priced(self, task: Task) -> float:
        if task.micro_batch is not None:
            key = task.kind, self._load(task), self._share
            if key not in self._of_batch:
                self._of_batch[key] = self.price.of_batch(*key)
            of_batch = self._of_batch[key]
            if of_batch is not None:
                return of_batch
        match task.kind:
            case Kind.GATE:
                return self.price.gate_s(self._load(task), self.setup.layer(task.step))
            case Kind.EXPERT:
                return self._expert_s(task)
            case Kind.POST:
                return self._post_s(task)
            case Kind.COMBINE | Kind.DENSE:
                return self._end_s(task)
            case Kind.CHUNK:
                return self.price.chunk_s(1 / self.room.num_chunks)
            case Kind.FETCH if task.page is None:
                return self.price.fetch_s(1 / self.room.num_chunks)
            case Kind.LAYER_UP:
                return self.price.layers_up_s([self.setup.layer(task.step)])
            case _:
                return self._weights_s(task)

    def _expert_s(self, task: Task) -> float:
        layer, batch = self.setup.layer(task.step), task.micro_batch
        batches = self._present[task.step] if batch is None else [batch]
        rows = {
            expert: sum(float(self._rows_of(layer, k)[expert]) for k in batches)
            for expert in task.experts
        }
        return self._experts_s(layer, rows)

    def _experts_s(self, layer: int, rows: Mapping[int, float]) -> float:
        """Experts of a layer in one task, over so many tokens each."""
        resident, price = self.room.resident, self.price
        work_s = (
            price.expert_s(each, fresh=ExpertKey(layer, expert) not in resident)
            for expert, each in rows.items()
        )
        return sum(work_s) + price.launching_s([*rows.values()])

    def _post_s(self, task: Task) -> float:
        """All of a layer after attention, and at the end of the last one the head."""
        layer, load = self.setup.layer(task.step), self._load(task)
        seconds = self.price.gate_s(load, layer) + self.price.shared_expert_s(load, layer)
        if self._now.on_cpu[task.k]:
            seconds += self.price.post_out_s(load)
        if layer in self.setup.moe_layers:
            rows = self._rows_of(layer, task.k).tolist()
            seconds += self._experts_s(layer, dict(enumerate(rows)))
        if self._is_last(task) and task.micro_batch == len(self._now.loads) - 1:
            seconds += self.price.head_s(self._now.logits_rows)
        return seconds

    def _end_s(self, task: Task) -> float:
        """What a step does once with all of its micro-batches."""
        loads = [self._now.loads[k] for k in self._present[task.step]]
        layer = self.setup.layer(task.step)
        if task.kind is Kind.COMBINE:
            seconds = self.price.combine_s()
            seconds += sum(self.price.shared_expert_s(load, layer) for load in loads)
        else:
            seconds = sum(self.price.gate_s(load, layer) for load in loads)
        if self._is_last(task):
            seconds += self.price.head_s(sum(load.logits_rows for load in loads))
        return seconds

    def _weights_s(self, task: Task) -> float:
        price = _OF_PAGES.get(task.kind)
        assert price is not None, f"{task} has no price"
        of_layer = self._on_disk if task.kind is Kind.FETCH else self._streamed
        # Pages of the first layer were cut by the pass before, whose micro-batches may be others.
        num_pages = task.num_pages or 1
        return price(self.price, of_layer[self.setup.layer(task.step)] / num_pages)

    def _load(self, task: Task) -> PassLoad:
        return self._now.loads[task.k]

    def _rows_of(self, layer: int, micro_batch: int) -> Floats:
        key = layer, micro_batch
        if key not in self._rows:
            load = in_layer(self.price.prices.shape, self._now.loads[micro_batch], layer)
            self._rows[key] = (
                self.routing.rows(self._number, layer, micro_batch, load.tokens)
                if load.tokens
                else np.zeros(self.setup.num_experts)
            )
        return self._rows[key]

    def _tokens_at(self, layer: int) -> float:
        """Of the pass, those that go through a layer."""
        shape = self.price.prices.shape
        return sum(in_layer(shape, load, layer).tokens for load in self._now.loads)

    def _is_last(self, task: Task) -> bool:
        return self.setup.layer(task.step) == self.setup.num_layers - 1

    @property
    def _now(self) -> MicroBatches:
        return self.passes[min(self._number, len(self.passes) - 1)]


_OF_PAGES: Mapping[Kind, Callable[[TaskPrices, float], float]] = {
    Kind.FETCH: TaskPrices.fetch_s,
    Kind.STAGE: TaskPrices.stage_s,
    Kind.PAGE: TaskPrices.page_s,
    Kind.BLOCK: TaskPrices.block_s,
}
"""Of a number of experts."""
