"""Rows without an answer are looked at, planned for, and answered: once, in so much memory."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from moebatch.engine.approximation import EXACT, Approximation
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.model_files import ModelFiles
from moebatch.engine.order import Order, has_common_keys
from moebatch.errors import OutOfMemory, Stopped
from moebatch.folder.results import Results
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import Shard
from moebatch.folder.todo import Todo
from moebatch.job.answering import Answering
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.job.hints import Hints, load_hints
from moebatch.job.machine import JobMachine, sharing_cores
from moebatch.job.notices import (
    describe_approximation,
    describe_experts,
    describe_input,
    describe_prediction,
    describe_sampling,
    gating_without_effect,
    settings_without_effect,
)
from moebatch.job.options import RunOptions
from moebatch.job.planning import JobPlan, job_problem, measured_machine, plan_job
from moebatch.job.scan import InputSummary, scan
from moebatch.job.status import Phase
from moebatch.job.stop import Stop
from moebatch.job.watchdog import watched
from moebatch.journal.finished import Finished
from moebatch.journal.writer import JournalWriter
from moebatch.model.native.loader import prepare as prepare_kernels
from moebatch.plan.expert_choice import Wishes
from moebatch.predict.predictor import Predictor
from moebatch.rows.dialects import Served
from moebatch.rows.prepare import Preparation
from moebatch.rows.raw import RawRow, Source
from moebatch.rows.repeats import Repeats
from moebatch.rows.row import FailedRow, ReadyRow
from moebatch.spec.hardware import DeviceKind
from moebatch.spec.job import Job
from moebatch.spec.policy import Policy, Schedule
from moebatch.spec.workload import Workload
from moebatch.store.memory import is_out_of_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What an attempt stands on: all that holds for a run, whatever becomes of it."""

    source: Source
    files: ModelFiles
    approximation: Approximation
    preparation: Preparation
    keys: RowKeys
    shard: Shard
    folder: RunFolder
    num_threads: int
    options: RunOptions
    stop: Stop
    tell: Callable[[str], None]


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
        self.repeats = Repeats({})
        self.torch_only: str | None = None
        """Why there are no compiled kernels, if so."""
        self.first_pass_s: float | None = None
        """When it began, by `time.perf_counter`."""
        self._job = job
        self._ground = ground
        self._run_s: float | None = None

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
            self.answering = Answering(
                ground.source,
                ground.preparation.reader,
                results,
                self._served(counted),
                counted.is_left,
            )
            hints = self._load_hints()
            if counted.workload is not None:
                self.plan, predictor = self._planned(counted.workload, hints)
                self.phase = "loading weights"
                self.built = self._build(self.plan, hints, predictor)
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

        counted = scan(ground.source, read, shares=ground.options.shares, todo=todo)
        counted.require_usable(every_row=self._job.input.on_bad_row == "fail")
        if counted.first_chat is not None:
            reader.tokenizer.require_chat_template(counted.first_chat.place)
        ground.tell(describe_input(counted))
        ground.tell(f"defaults of rows: {describe_sampling(reader.defaults.sampling)}")
        if ground.approximation != EXACT:
            ground.tell(f"note: {describe_approximation(ground.approximation)}")
        return counted

    def _served(self, counted: InputSummary) -> Served:
        job = self._job
        return Served(
            model=job.model.name or job.model.path.name,
            token_bytes=self._ground.preparation.reader.tokenizer.token_bytes,
            fingerprint=numerics_fingerprint(self._ground.files, self._ground.approximation),
            format=job.output.format,
            fallback=counted.dialect,
            column=job.output.column,
        )

    def _load_hints(self) -> Hints:
        hints = load_hints(self._job, self._ground.files)
        for warning in hints.warnings:
            self._ground.tell(f"warning: {warning}")
        return hints

    def _planned(self, workload: Workload, hints: Hints) -> tuple[JobPlan, Predictor | None]:
        """A plan, and the predictor that it asks for."""
        files, options, tell = self._ground.files, self._ground.options, self._ground.tell
        self.torch_only = prepare_kernels()  # a compiler takes memory, too
        machine = self.machine = measured_machine(self._job, files, tell)
        options.require_device(machine.kind)  # a GPU may have been found only now
        for warning in settings_without_effect(self._job, machine.kind):
            tell(f"warning: {warning}")
        if not has_common_keys(files):
            workload = workload.unshared
        plan = self._plan(workload, machine, hints, hints.wishes)
        name = "none" if options.is_plain else hints.resolved(plan.policy.predictor)
        predictor, experts = hints.predictor(name), plan.experts
        if predictor is not None:  # what it holds counts now
            wishes = replace(hints.wishes, predictor=name)
            plan = self._plan(workload, machine, hints, wishes)
        share = self._threads_of(plan.policy) / self._ground.num_threads
        if share < 1:
            plan = plan.on(sharing_cores(plan.problem.hardware, share))
        for warning in gating_without_effect(self.approximation, plan.policy.schedule):
            tell(f"warning: {warning}")
        for note in (*machine.notes, *plan.notes):
            tell(f"note: {note}")
        tell(f"policy: {plan.policy}")
        if experts is not None:
            tell(f"experts: {describe_experts(experts)}")
        how = " on the emulated GPU, computed by the CPU" if machine.kind == "emulate" else ""
        tell(f"expected{how}: {describe_prediction(plan.prediction)}")
        return plan, predictor

    def _plan(
        self, workload: Workload, machine: JobMachine, hints: Hints, wishes: Wishes
    ) -> JobPlan:
        options = self._ground.options
        problem = job_problem(
            self._job, self._ground.files, workload, machine.hardware(), machine.kind
        )
        return plan_job(
            replace(problem, kv_on_disk=not options.is_plain, habits=hints.habits),
            options.policy,
            schedule=self._schedule(),
            is_plain=options.is_plain,
            is_static=options.is_static,
            wishes=wishes,
        )

    def _schedule(self) -> Schedule | None:
        """The one that is asked for; of planned policies, that which pre-gates have been made for
        where there are any; None is the policy's own."""
        options = self._ground.options
        is_free = options.known_schedule is None and options.policy is None
        if is_free and self.approximation.activation_level:
            return "pregated"
        return options.known_schedule

    def _build(self, plan: JobPlan, hints: Hints, predictor: Predictor | None) -> BuiltEngine:
        num_threads = self._threads_of(plan.policy)
        torch.set_num_threads(num_threads)
        options = self._ground.options
        order = Order(
            files=self._ground.files,
            policy=plan.policy,
            max_tokens=plan.problem.workload.max_total_tokens,
            device=Device(kind=self.kind, hardware=plan.problem.hardware, num_threads=num_threads),
            approximation=self._ground.approximation,
            is_plain=options.is_plain,
            shares=options.shares,
            predictor=predictor,
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

    def _threads_of(self, policy: Policy) -> int:
        """Threads of one lane. Where the CPU stands in for a GPU and attends beside it, two lanes
        compute at a time."""
        if self.kind == "emulate" and not policy.attention_on_gpu:
            return max(1, self._ground.num_threads // 2)
        return self._ground.num_threads

    # --- the passes -----------------------------------------------------------------------------

    def _answer_all(self, answering: Answering, built: BuiltEngine) -> None:
        engine, stop = built.engine, self._ground.stop
        if built.recorder is not None:
            built.recorder.begin()

        def moved() -> Hashable:
            return engine.num_ended, built.experts.statistics.num_bytes

        try:
            with (
                torch.inference_mode(),
                stop.deferred(engine.interrupt),
                watched(moved, engine.doing, self._ground.tell),
            ):
                for outcome in self.repeats.answer(answering.requests(), engine.run):
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

    def _stopped_early(self, num_tokens: int) -> str:
        num_rows = self.input.num_rows if self.input else 0
        return (
            f"stopped early ({self._ground.stop.reason}): {self.num_done} of {num_rows} rows are "
            f"done, and {num_tokens} tokens of others; run the job again to go on"
        )
