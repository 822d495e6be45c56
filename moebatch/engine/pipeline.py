"""Passes of a schedule on overlapped lanes: what `run` uses by default."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moebatch.engine.attention_work import AttentionWork
from moebatch.engine.batcher import Slice
from moebatch.engine.broken import BrokenRows
from moebatch.engine.executor import Executor
from moebatch.engine.expert_work import ExpertWork
from moebatch.engine.guesses import Guesses
from moebatch.engine.layout import Layout, attention_inputs, lay_out
from moebatch.engine.logits import LogitsBlock, logits_blocks
from moebatch.engine.pass_context import PassContext, PassRows
from moebatch.engine.recorder import Recorder
from moebatch.model.batch import MicroBatch, Span
from moebatch.model.router import Routing
from moebatch.schedule.driver import Driver
from moebatch.schedule.kv_route import Place
from moebatch.schedule.registry import find_schedule
from moebatch.schedule.task import Kind, Task

_LAST_OF_LAYER = (Kind.COMBINE, Kind.DENSE, Kind.POST)


class Pipeline:
    """Takes slices of sequences through the model, in the order of a schedule."""

    def __init__(self, context: PassContext, executor: Executor, recorder: Recorder) -> None:
        self.recorder = recorder
        self._context = context
        self._executor = executor
        self._work: _PassWork | None = None
        self._guesses = Guesses(
            context.setup,
            context.predictor,
            self._routing,
            context.observer,
            experts_per_token=context.decoder.shape.experts_per_token,
        )
        self._layer_done: Callable[[int], None] = lambda layer: None
        self._brings_weights = context.weights.tasks
        self.driver = self._new_driver()
        """Of the schedule that is in work; a new one after a pass that was given up."""

    def start(self) -> None:
        """Lanes are there: what comes first may be brought."""
        self._executor.drive(self.driver, self._context.weights.slots)

    @property
    def num_layers(self) -> int:
        """Layers of a walk."""
        return self._context.setup.num_layers

    def run(
        self, slices: Sequence[Slice], layer_begins: Callable[[int], None]
    ) -> Iterator[LogitsBlock]:
        """Yields the logits from which next tokens come, block by block.

        All slices are counted as cached when the first block is yielded. `layer_begins` is called
        with every layer.
        """
        self._layer_done = layer_begins
        decoder, layout = self._context.decoder, self._lay_out(slices)
        tokens = layout.pass_tokens
        if self._context.log is not None:
            self._context.log.begin(layout, self._context.setup.compute)
        with self._context.computing():
            x_TD = decoder.embed(torch.from_numpy(tokens.tokens_T))
            self._work = self._pass_work(x_TD, layout)
            self._guesses.begin_pass(replace(tokens, embedded_TD=x_TD))
        self._executor.run_pass(layout.sweep(self._context.setup.compute))
        blocks = logits_blocks(decoder, x_TD, layout, self._work.broken)
        while True:
            with self._context.computing():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def give_up(self) -> None:
        """After a pass that failed: the next one may begin at the first layer again."""
        self._executor.abandon()
        self.recorder.drop_pass()
        if self._context.log is not None:
            self._context.log.drop_pass()
        self.driver.close()
        with self._executor.lock:
            self._context.weights.forget()
        self._context.foresight.forget()
        self.driver = self._new_driver()
        self.start()

    def interrupt(self, error: BaseException) -> None:
        """Has a pass that is in work end with `error`; any thread may say so."""
        with self._executor.lock:
            self._executor.failed(error)

    @property
    def num_ended(self) -> int:
        """Tasks that have ended so far."""
        return self._executor.num_ended

    def doing(self) -> str:
        """What the lanes do, or wait for, in words."""
        return self._executor.doing()

    def do(self, task: Task) -> None:
        """Does what a task says in the pass in work; called by its lane."""
        if task.kind in self._brings_weights:
            self._brings_weights[task.kind](task)
            return
        assert self._work is not None, "a pass is in work"
        self._work.run(task)
        if task.kind in _LAST_OF_LAYER:
            self._layer_done(self._context.setup.layer(task.step))

    def num_bytes(self, task: Task) -> int:
        """Bytes that a task, or a chunk under the name of one, moves over its link."""
        num_bytes = self._context.weights.num_bytes(task)
        return num_bytes or (self._work.num_bytes(task) if self._work else 0)

    def close(self) -> None:
        """Ends the schedule and its lanes."""
        self.driver.close()
        self._executor.close()

    # --- inside ---------------------------------------------------------------------------------

    def _new_driver(self) -> Driver:
        context = self._context
        return Driver(
            find_schedule(context.policy.schedule)(context.setup),
            context.setup,
            lanes=self._executor,
            router=self._guesses,
            learn=self._guesses.learn,
            slots=context.weights.slots,
            below=context.weights.below,
            foresight=context.foresight,
        )

    def _lay_out(self, slices: Sequence[Slice]) -> Layout:
        context = self._context
        main = context.setup.compute
        return lay_out(
            slices,
            context.policy.micro_batch_size,
            context.cache,
            decode_place="dram" if context.beside else main,
            prompt_place=main,
        )

    def _pass_work(self, x_TD: Tensor, layout: Layout) -> "_PassWork":
        inputs = attention_inputs(layout, self._context.cache, self._micro_batch)
        return _PassWork(PassRows(x_TD, inputs, self._context.setup), self._context)

    def _micro_batch(self, spans: Sequence[Span], place: Place) -> MicroBatch:
        beside = self._context.beside
        device = beside.core.device if beside and place == "dram" else None
        return self._context.decoder.micro_batch(spans, attention_device=device)

    def _routing(self, step: int, micro_batch: int) -> Routing:
        assert self._work is not None, "a pass is in work"
        return self._work.routing(step, micro_batch)


class _PassWork:
    """One pass: its hidden states, its micro-batches, and what gates have said so far.

    Tasks of different lanes are for different micro-batches, or wait for each other, so nothing
    here is locked.
    """

    def __init__(self, rows: PassRows, context: PassContext) -> None:
        self._attention = AttentionWork(rows, context)
        self._experts = ExpertWork(rows, context, self._attention)
        self._do = {**self._attention.tasks, **self._experts.tasks}

    def run(self, task: Task) -> None:
        """Does what the task says, on the thread of its lane."""
        self._do[task.kind](task)

    def num_bytes(self, task: Task) -> int:
        """Bytes that a task of a link moves, weights left out."""
        return self._attention.num_bytes(task)

    def routing(self, step: int, k: int) -> Routing:
        """What a gate has said."""
        return self._experts.routing(step, k)

    @property
    def broken(self) -> BrokenRows:
        """Rows whose numbers stopped being numbers."""
        return self._experts.broken
