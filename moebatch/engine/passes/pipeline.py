"""Passes of a schedule on overlapped lanes: what `run` uses by default."""

from collections.abc import Callable

from moebatch.engine.lanes.executor import Executor
from moebatch.engine.passes.broken import BrokenRows
from moebatch.engine.passes.guesses import Guesses
from moebatch.engine.passes.passes import Passes, PassInput
from moebatch.engine.passes.work import PassContext, PassWork
from moebatch.model.routing.router import Routing
from moebatch.schedule.drivers.driver import Driver
from moebatch.schedule.registry import find_schedule
from moebatch.schedule.task import Kind, Task

_FIRST_OF_LAYER = (Kind.ATTEND, Kind.PRE)


class Pipeline(Passes):
    """Takes slices of sequences through the model, in the order of a schedule."""

    def __init__(self, context: PassContext, executor: Executor) -> None:
        super().__init__(
            context.decoder,
            context.cache,
            context.policy,
            main=context.setup.compute,
            beside=context.beside,
            computing=context.computing,
        )
        self._context = context
        self._executor = executor
        self._work: PassWork | None = None
        self._guesses = Guesses(
            context.setup,
            context.predictor,
            self._routing,
            context.observer,
            computed_per_token=context.decoder.shape.computed_per_token,
        )
        self._layer_begins: Callable[[int], None] = lambda layer: None
        self._last_begun = -1
        """The step in which tokens of the pass in work attend for the first time."""
        self._brings_weights = context.weights.tasks
        self.driver = self._new_driver()
        """Of the schedule that is in work; a new one after a pass that was given up."""

    def start(self) -> None:
        """Lanes are there: what comes first may be brought."""
        self._executor.drive(self.driver)

    def give_up(self) -> None:
        self._executor.abandon()
        if self._context.log is not None:
            self._context.log.drop_pass()
        self.driver.close()
        with self._executor.lock:
            self._context.weights.forget()
        self._context.foresight.forget()
        self.driver = self._new_driver()
        self.start()

    def interrupt(self, error: BaseException) -> None:
        with self._executor.lock:
            self._executor.failed(error)

    @property
    def num_ended(self) -> int:
        return self._executor.num_ended

    def doing(self) -> str:
        return self._executor.doing()

    def do(self, task: Task) -> None:
        """Does what a task says in the pass in work; called by its lane."""
        if task.kind in self._brings_weights:
            self._brings_weights[task.kind](task)
            return
        assert self._work is not None, "a pass is in work"
        if task.kind in _FIRST_OF_LAYER and task.step > self._last_begun:
            self._last_begun = task.step
            self._layer_begins(self._context.setup.layer(task.step))
        self._work.run(task)

    def num_bytes(self, task: Task) -> int:
        """Bytes that a task, or a chunk under the name of one, moves over its link."""
        num_bytes = self._context.weights.num_bytes(task)
        return num_bytes or (self._work.num_bytes(task) if self._work else 0)

    def close(self) -> None:
        """Ends the schedule and its lanes."""
        self.driver.close()
        self._executor.close()

    # --- inside ---------------------------------------------------------------------------------

    def _run_layers(self, given: PassInput, layer_begins: Callable[[int], None]) -> BrokenRows:
        self._layer_begins, self._last_begun = layer_begins, -1
        sweep = given.layout.sweep(self._main)
        if self._context.log is not None:
            self._context.log.begin(given.layout, sweep)
        self._work = PassWork(given.x_TD, given.inputs, self._context)
        with self.computing():
            self._guesses.begin_pass(given.tokens)
        self._executor.run_pass(sweep)
        if self._context.log is not None:
            self._context.log.end_pass()
        return self._work.broken

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

    def _routing(self, step: int, micro_batch: int) -> Routing:
        assert self._work is not None, "a pass is in work"
        return self._work.routing(step, micro_batch)
