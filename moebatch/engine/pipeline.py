"""Passes of a schedule on overlapped lanes: what `run` uses unless told otherwise."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moebatch.engine.batcher import Slice
from moebatch.engine.executor import Executor
from moebatch.engine.guesses import Guesses
from moebatch.engine.layout import Layout, attention_inputs, lay_out
from moebatch.engine.logits import LogitsBlock, logits_blocks
from moebatch.engine.parts import Parts
from moebatch.engine.pass_rows import PassRows
from moebatch.engine.recorder import Recorder
from moebatch.engine.work import PassWork
from moebatch.model.batch import MicroBatch, Span
from moebatch.model.router import Routing
from moebatch.schedule.driver import Driver
from moebatch.schedule.kv_route import Place
from moebatch.schedule.registry import find_schedule
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.task import Kind, Task

_LAST_OF_LAYER = (Kind.COMBINE, Kind.DENSE, Kind.POST)


class Pipeline:
    """Takes slices of sequences through the model, in the order of a schedule."""

    def __init__(self, parts: Parts, executor: Executor, recorder: Recorder) -> None:
        self.recorder = recorder
        self._parts = parts
        self._executor = executor
        self._work: PassWork | None = None
        self._guesses = Guesses(
            parts.setup,
            parts.predictor,
            self._routing,
            parts.observer,
            experts_per_token=parts.decoder.shape.experts_per_token,
        )
        self._layer_done: Callable[[int], None] = lambda layer: None
        self._driver = self._new_driver()

    def start(self) -> None:
        """Lanes are there: what comes first may be brought."""
        self._executor.drive(self._driver)

    @property
    def num_layers(self) -> int:
        """Layers of a walk."""
        return self._parts.setup.num_layers

    def run(
        self, slices: Sequence[Slice], layer_begins: Callable[[int], None]
    ) -> Iterator[LogitsBlock]:
        """Yields the logits from which next tokens come, block by block.

        All slices are counted as cached when the first block is yielded. `layer_begins` is told
        of every layer.
        """
        self._layer_done = layer_begins
        decoder, layout = self._parts.decoder, self._lay_out(slices)
        tokens = layout.pass_tokens
        if self._parts.log is not None:
            self._parts.log.begin(layout, self._parts.setup.compute)
        with self._parts.computing():
            x_TD = decoder.embed(torch.from_numpy(tokens.tokens_T))
            self._work = self._pass_work(x_TD, layout)
            self._guesses.begin_pass(replace(tokens, embedded_TD=x_TD))
        self._executor.run_pass(layout.sweep(self._parts.setup.compute))
        blocks = logits_blocks(decoder, x_TD, layout, self._work.broken)
        while True:
            with self._parts.computing():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def give_up(self) -> None:
        """After a pass that failed: the next one may begin at the first layer again."""
        self._executor.abandon()
        self.recorder.drop_pass()
        if self._parts.log is not None:
            self._parts.log.drop_pass()
        self._driver.close()
        with self._executor.lock:
            self._parts.slots.forget()
            if self._parts.below is not None:
                self._parts.below.forget()
        if self._parts.pages is not None:
            self._parts.pages.forget()
        self._parts.foresight.forget()
        self._driver = self._new_driver()
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
        assert self._work is not None, "a pass is in work"
        self._work.run(task)
        if task.kind in _LAST_OF_LAYER:
            self._layer_done(self._parts.setup.layer(task.step))

    def num_bytes(self, task: Task) -> int:
        """Bytes that a task moves over its link."""
        assert self._work is not None, "a pass is in work"
        return self._work.num_bytes(task)

    def close(self) -> None:
        """Ends the schedule and its lanes."""
        self._driver.close()
        self._executor.close()

    # --- experts on their way to a GPU ----------------------------------------------------------

    def next_chunk(self) -> Chunk | None:
        """The next part of an expert to go up; called with the lock held."""
        chunk = self._parts.slots.next_chunk(self._driver.way_up.can_be_sent)
        if chunk is not None:
            self._driver.way_up.sending(chunk.load)
        return chunk

    def chunk_moved(self, chunk: Chunk) -> None:
        """A part of an expert has gone up; called with the lock held."""
        self._parts.slots.finish_chunk(chunk)
        self._driver.way_up.sent(chunk.load)

    def chunk_task(self, key: ExpertKey, number: int, kind: Kind) -> Task:
        """A part of an expert on its way, as a task of the timeline."""
        return Task(kind, self._driver.step_of(key.layer), expert=key.expert, part=number)

    # --- inside ---------------------------------------------------------------------------------

    def _new_driver(self) -> Driver:
        parts = self._parts
        return Driver(
            find_schedule(parts.policy.schedule)(parts.setup),
            parts.setup,
            lanes=self._executor,
            router=self._guesses,
            learn=self._guesses.learn,
            slots=parts.slots,
            below=parts.below,
            foresight=parts.foresight,
        )

    def _lay_out(self, slices: Sequence[Slice]) -> Layout:
        parts = self._parts
        main = parts.setup.compute
        assert main != "disk", "nothing is computed on disk"
        return lay_out(
            slices,
            parts.policy.micro_batch_size,
            parts.cache,
            decode_place="dram" if parts.core else main,
            prompt_place=main,
        )

    def _pass_work(self, x_TD: Tensor, layout: Layout) -> PassWork:
        inputs = attention_inputs(layout, self._parts.cache, self._micro_batch)
        return PassWork(PassRows(x_TD, inputs, self._parts.setup), self._parts)

    def _micro_batch(self, spans: Sequence[Span], place: Place) -> MicroBatch:
        device = self._parts.core.device if self._parts.core and place == "dram" else None
        return self._parts.decoder.micro_batch(spans, attention_device=device)

    def _routing(self, step: int, micro_batch: int) -> Routing:
        assert self._work is not None, "a pass is in work"
        return self._work.routing(step, micro_batch)
