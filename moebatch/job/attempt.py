"""Rows without an answer are looked at, planned for, and answered: once, in so much memory."""

import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import torch

from moebatch.engine.approximation import EXACT, Approximation
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.engine import Engine
from moebatch.engine.spec import EngineSpec
from moebatch.errors import OutOfMemory, Stopped
from moebatch.folder.results import Results
from moebatch.folder.todo import Todo
from moebatch.job.answering import Answering, Answers
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.job.ground import Ground
from moebatch.job.hints import Hints, load_hints
from moebatch.job.lane_times import lane_times
from moebatch.job.machine import JobMachine
from moebatch.job.notices import (
    describe_approximation,
    describe_input,
    describe_sampling,
    prompts_without_template,
)
from moebatch.job.planning import JobPlan, in_fastest_dtype, measured_machine
from moebatch.job.run_planning import RunPlanning
from moebatch.job.scan import InputSummary, scan
from moebatch.job.status import Phase
from moebatch.job.watchdog import watched
from moebatch.journal.finished import Finished
from moebatch.journal.writer import JournalWriter
from moebatch.model.native import loader
from moebatch.plan.time_left import TimeLeft
from moebatch.rows.dialects import Served
from moebatch.rows.raw import RawRow
from moebatch.rows.repeats import Repeats, Run
from moebatch.rows.row import FailedRow, ReadyRow
from moebatch.spec.hardware import DeviceKind
from moebatch.spec.job import Job
from moebatch.spec.request import Outcome, Request
from moebatch.store.memory import is_out_of_memory


class Attempt:
    """Answers what earlier runs have not, into a journal of its own. Others may look at it
    meanwhile, from any thread."""

    def __init__(self, job: Job, ground: Ground) -> None:
        self.phase: Phase = "checking input"
        self.input: InputSummary | None = None
        self.machine: JobMachine | None = None
        self.plan: JobPlan | None = None
        self.built: BuiltEngine | None = None
        self.answering: Answering | None = None
        self.answers = Answers()
        self.repeats = Repeats({})
        self.torch_only: str | None = None
        """Why there are no compiled kernels, if so."""
        self.first_pass_s: float | None = None
        """When it began, by `time.perf_counter`."""
        self._job = job
        self._ground = ground
        self._run_s: float | None = None
        self._time_left: TimeLeft | None = None
        self._asking = threading.Lock()

    @property
    def kind(self) -> DeviceKind:
        """Where it computes, as far as that is known."""
        return self.machine.kind if self.machine else "cpu"

    @property
    def approximation(self) -> Approximation:
        """What changes the answers."""
        return self._ground.approximation

    @property
    def num_done(self) -> int:
        """Rows that have ended, in earlier runs too."""
        before = self.input.num_done if self.input else 0
        return before + (self.answering.num_ended if self.answering else 0)

    @property
    def elapsed_s(self) -> float:
        """Seconds of passes."""
        if self._run_s is not None:
            return self._run_s
        return time.perf_counter() - self.first_pass_s if self.first_pass_s else 0.0

    def eta_s(self) -> float | None:
        """Seconds of passes that are left; None before they are planned. Any thread may ask."""
        time_left, built = self._time_left, self.built
        if self._run_s is not None:
            return 0.0
        if time_left is None or built is None:
            return None
        course = built.engine.course
        with self._asking:
            standing = course.standing
            taken = [course.passes.popleft() for _ in range(len(course.passes))]
            time_left.add(taken)
            since_s = course.since_s if self.first_pass_s else 0.0
            lanes = lane_times(built, self.elapsed_s)
            busy_s = {lane.name: lane.busy_s for lane in lanes if lane.busy_s}
            return time_left.seconds(standing, course.endings, busy_s=busy_s, since_s=since_s)

    def execute(self) -> None:
        """Returns when all rows have ended.

        Raises MoebatchError when the job cannot be run or has to stop, OutOfMemory where a smaller
        plan may help; finished rows are in the journal then, and what others have of tokens.
        """
        ground, journal = self._ground, self._ground.folder.journal
        with Finished(journal) as before, JournalWriter(journal) as ours:
            results = Results(before, ours, ground.keys)
            todo = Todo(shard=ground.shard, answered=results.answered)
            self.input = counted = self._scan(results, todo)
            self.repeats = Repeats(counted.repeated)
            if counted.workload is not None:
                loader.log_compiling(ground.tell)
                self.torch_only = loader.prepare()  # a compiler takes memory, too
                self.machine = self._measured()
            self.answering = Answering(
                self._ground.source,
                ground.preparation.reader,
                results,
                self._served(counted),
                counted,
            )
            hints = self._load_hints()
            if counted.workload is not None and self.machine is not None:
                planning = RunPlanning(self._job, self._ground, hints, self.machine)
                self.plan = planning.plan(counted.workload)
                self.phase = "loading weights"
                self.built = self._build(self.plan, planning, hints)
                self._time_left = TimeLeft(self.plan.problem, self.plan.policy)
            self.first_pass_s = time.perf_counter()
            self.phase = "running"
            if self.built is None:
                nothing = next(self.answering.requests(), None)
                assert nothing is None, "a row was good only at second sight"
            else:
                self._answer_all(self.answering, self.built)
            self._run_s = self.elapsed_s

    # --- before the first pass ------------------------------------------------------------------

    def _scan(self, results: Results, todo: Todo) -> InputSummary:
        """One look at all rows: what is wrong, and exactly how long prompts and answers are."""
        ground, reader = self._ground, self._ground.preparation.reader

        def read(raw: RawRow) -> ReadyRow | FailedRow:
            return results.resumed(raw, reader.request(raw))

        counted = scan(
            ground.source, read, rules=reader.rules, shares=ground.options.shares, todo=todo
        )
        counted.require_usable(every_row=self._job.input.on_bad_row == "fail")
        if counted.first_chat is not None:
            reader.tokenizer.require_chat_template(counted.first_chat.place)
        ground.tell(describe_input(counted))
        for note in prompts_without_template(counted, ground.preparation):
            ground.tell(f"note: {note}")
        ground.tell(f"defaults of rows: {describe_sampling(reader.defaults.sampling)}")
        if ground.approximation != EXACT:
            ground.tell(f"note: {describe_approximation(ground.approximation)}")
        return counted

    def _measured(self) -> JobMachine:
        """The machine, and the model as it is best computed there."""
        ground, job = self._ground, self._job
        machine = measured_machine(job, ground.files, ground.tell)
        files = in_fastest_dtype(job, ground.files, machine, ground.tell)
        self._ground = replace(ground, files=files)
        return machine

    def _served(self, counted: InputSummary) -> Served:
        job = self._job
        return Served(
            model=job.model.name or job.model.path.name,
            token_bytes=self._ground.preparation.reader.tokenizer.token_bytes,
            fingerprint=numerics_fingerprint(self._ground.files, self._ground.approximation),
            created=self._ground.created,
            format=job.output.format,
            fallback=counted.dialect,
            column=job.output.column,
        )

    def _load_hints(self) -> Hints:
        hints = load_hints(self._job, self._ground.files)
        for warning in hints.warnings:
            self._ground.tell(f"warning: {warning}")
        return hints

    def _build(self, plan: JobPlan, planning: RunPlanning, hints: Hints) -> BuiltEngine:
        num_threads = planning.num_threads(plan.policy)
        torch.set_num_threads(num_threads)
        options = self._ground.options
        order = EngineSpec(
            files=self._ground.files,
            policy=plan.policy,
            max_tokens=plan.problem.workload.max_total_tokens,
            device=Device(kind=self.kind, hardware=plan.problem.hardware, num_threads=num_threads),
            approximation=self._ground.approximation,
            is_plain=options.is_plain,
            shares=options.shares,
            predictor=planning.predictor,
            hottest=hints.hottest,
            scratch=self._ground.folder.path,
            num_traced_passes=options.num_traced_passes if options.is_drawn else 0,
        )
        preparation = self._ground.preparation
        try:
            return build_engine(
                order,
                decoder=preparation.reader.tokenizer,
                end_tokens=preparation.end_tokens,
                job_seed=self._job.sampling.seed,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(f"the system refuses memory for what was planned: {error}") from error

    # --- the passes -----------------------------------------------------------------------------

    def _answer_all(self, answering: Answering, built: BuiltEngine) -> None:
        engine, stop = built.engine, self._ground.stop
        if built.recorder is not None:
            built.recorder.begin()

        def moved() -> Hashable:
            return engine.num_ended, built.reads.num_bytes

        try:
            with (
                torch.inference_mode(),
                stop.deferred(engine.interrupt),
                watched(moved, engine.doing, self._ground.tell),
            ):
                for outcome in self.repeats.answer(answering.requests(), self._run(engine)):
                    answering.ended(outcome)
        except Stopped:
            kept = answering.keep_unfinished(engine.unfinished())
            gained = kept > 0 or answering.num_ended > 0
            raise Stopped(self._stopped_early(kept), has_gained=gained) from None
        except OutOfMemory:
            answering.keep_unfinished(engine.unfinished())
            raise
        finally:
            built.close()

    def _run(self, engine: Engine) -> Run:
        """Computes requests, and notes how long their answers have become."""

        def run(requests: Iterable[Request]) -> Iterator[Outcome]:
            for outcome in engine.run(requests):
                self.answers.add(outcome)
                yield outcome

        return run

    def _stopped_early(self, num_tokens: int) -> str:
        num_rows = self.input.num_rows if self.input else 0
        return (
            f"stopped early ({self._ground.stop.reason}): {self.num_done} of {num_rows} rows are "
            f"done, and {num_tokens} tokens of others; run the job again to go on"
        )
