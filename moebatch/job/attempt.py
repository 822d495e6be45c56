"""Rows without an answer are looked at, planned for, and answered: once, in so much memory."""

import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import EXACT
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.engine import Engine
from moebatch.engine.progress.time_left import TimeLeft
from moebatch.engine.spec import EngineSpec
from moebatch.errors import MoebatchError, OutOfMemory, Stopped, StorageError
from moebatch.folder.claim import require_still_own, with_dtype
from moebatch.folder.results import Results
from moebatch.garbage import lasting
from moebatch.job.answering import Answering
from moebatch.job.context import RunContext
from moebatch.job.identity import numerics_fingerprint
from moebatch.job.machine import JobMachine
from moebatch.job.notices import (
    describe_input,
    describe_sampling,
    seldom_meant,
)
from moebatch.job.planning import JobPlan, in_fastest_dtype, measured_machine
from moebatch.job.run_plan import RunPlan, plan_run
from moebatch.job.scan import Asked, InputSummary, scan
from moebatch.job.status import Phase, lane_times
from moebatch.job.stop import watched
from moebatch.journal.finished import Finished
from moebatch.journal.writer import JournalWriter
from moebatch.model.gpu import loader as gpu
from moebatch.model.native import loader
from moebatch.quoting import reason
from moebatch.rows.dialects import Served
from moebatch.rows.repeats import Repeats
from moebatch.rows.row import FailedRow, RawRow, ReadyRow
from moebatch.spec.machine.hardware import DeviceKind, Dtype
from moebatch.spec.request import Outcome, Request
from moebatch.spec.workload import Length, LengthSample, Workload
from moebatch.store.memory import is_out_of_memory
from moebatch.units import count_of

_UNPINNED = (
    "warning: the system does not pin main memory, so that experts come up at half the speed or "
    "less; a smaller resources.dram, or more locked memory (ulimit -l, .wslconfig), may help"
)


class Attempt:
    """Answers what earlier runs have not, into a journal of its own. Others may look at it
    meanwhile, from any thread."""

    def __init__(self, context: RunContext) -> None:
        self.phase: Phase = "checking input"
        self.input: InputSummary | None = None
        self.machine: JobMachine | None = None
        self.plan: JobPlan | None = None
        self.built: BuiltEngine | None = None
        self.answering: Answering | None = None
        self.answers = LengthSample()
        """Sequences that have been computed, with the tokens that were new in this run."""
        self.repeats = Repeats({})
        self.torch_only: str | None = None
        """Why there are no compiled kernels, if so."""
        self.first_pass_s: float | None = None
        """When it began, by `time.perf_counter`."""
        self.context = context
        self._run_s: float | None = None
        self._time_left: TimeLeft | None = None
        self._asking = threading.Lock()

    @property
    def kind(self) -> DeviceKind:
        """Where it computes, as far as that is known."""
        return self.machine.kind if self.machine else "cpu"

    @property
    def vram_bytes(self) -> int | None:
        """What it was planned to take of a real GPU; None without one, or before it was planned."""
        if self.plan is None or self.kind != "cuda":
            return None
        return self.plan.problem.capacity_bytes("vram")

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
        context = self.context
        context.stop.obey()
        journal = context.folder.journal
        with Finished(journal) as before, JournalWriter(journal) as ours:
            if before.num_damaged:
                records = count_of(before.num_damaged, "record was", "records were")
                context.log(f"warning: {journal}: {records} damaged; those rows are answered again")
            answering = self._prepare(Results(before, ours, context.claim.manifest.row_keys))
            require_still_own(context.claim, context.folder)
            self.first_pass_s = time.perf_counter()
            self.phase = "running"
            if self.built is None:
                nothing = next(answering.requests(), None)
                assert nothing is None, "a row was good only at second sight"
            else:
                self._answer_all(answering, self.built)
            self._run_s = self.elapsed_s

    def _prepare(self, results: Results) -> Answering:
        """All that comes before the first pass; nothing is built where no row can be computed."""
        context = self.context
        self.input = counted = self._scan(results)
        self.repeats = Repeats(counted.repeated)
        context.stop.obey()
        files = context.opened.files
        if counted.workload is not None:
            files = self._measure()
        served = self._served(files, counted)
        self.answering = Answering(context.opened.source, context.reader, results, served, counted)
        for warning in context.opened.hints.warnings:
            context.log(f"warning: {warning}")
        if counted.workload is not None:
            self._plan_and_build(files, counted.workload)
        return self.answering

    # --- before the first pass ------------------------------------------------------------------

    def _scan(self, results: Results) -> InputSummary:
        """One look at all rows: what is wrong, and exactly how long prompts and answers are."""
        context, reader, log = self.context, self.context.reader, self.context.log

        def read(raw: RawRow) -> ReadyRow | FailedRow:
            return results.resumed(raw, reader.request(raw))

        asked = Asked(
            rules=reader.rules,
            shares=context.options.shares,
            shard=context.shard,
            answered=results.answered,
        )
        counted = scan(context.opened.source, read, asked)
        counted.require_usable(every_row=context.job.input.on_bad_row == "fail")
        if counted.first_chat is not None:
            reader.tokenizer.require_chat_template(counted.first_chat.place)
        log(describe_input(counted, context.job.output))
        for note in seldom_meant(counted, context.reader):
            log(f"note: {note}")
        log(f"defaults of rows: {describe_sampling(reader.defaults.sampling)}")
        if context.approximation != EXACT:
            log(f"note: {context.approximation}: answers are not exactly the model's own")
        return counted

    def _measure(self) -> ModelFiles:
        """Finds out what the machine does, and gives the model as it is best computed there."""
        context = self.context
        loader.log_compiling(context.log)
        self.torch_only = loader.prepare()  # a compiler takes memory, too
        files = context.opened.files
        self.machine = measured_machine(context.job, files, context.log)
        if self.machine.kind == "cuda":
            self.torch_only = gpu.prepare() or self.torch_only
        return in_fastest_dtype(context.job, files, self.machine, context.log, self._agreed_dtype)

    def _agreed_dtype(self, fastest: Dtype) -> Dtype:
        """That of earlier runs, so that rows which go on end as they would have without a stop; the
        first run's is the `fastest`."""
        context = self.context
        ours = with_dtype(context.claim, context.folder, fastest)
        self.context = replace(context, claim=ours)
        return ours.first.dtype or fastest

    def _served(self, files: ModelFiles, counted: InputSummary) -> Served:
        context, job = self.context, self.context.job
        return Served(
            model=job.model.name or job.model.path.name,
            token_bytes=context.reader.tokenizer.token_bytes,
            decode=context.reader.tokenizer.decode,
            fingerprint=numerics_fingerprint(files, context.approximation),
            created=context.claim.first.created,
            format=job.output.format,
            fallback=counted.dialect,
            column=job.output.column,
            splits_reasoning=job.output.reasoning == "separate",
            calls=context.reader.tokenizer.calls if context.reader.splits_calls else None,
        )

    def _plan_and_build(self, files: ModelFiles, workload: Workload) -> None:
        assert self.machine is not None, "it was measured"
        found = plan_run(self.context, files, self.machine, workload)
        self.plan = found.plan
        self.context.stop.obey()
        self.phase = "loading weights"
        try:
            self.built = self._build(files, found)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            refusal = f"the system refuses memory for what was planned: {reason(error)}"
            raise OutOfMemory(refusal) from error
        experts = self.built.experts
        files.checkpoint.require_unchanged()  # while rows were looked at, for one
        if self.kind == "cuda" and experts is not None and not experts.is_pinned:
            self.context.log(_UNPINNED)
        self._time_left = TimeLeft(self.plan.problem, self.plan.policy)

    def _build(self, files: ModelFiles, found: RunPlan) -> BuiltEngine:
        torch.set_num_threads(found.num_threads)
        context, options, problem = self.context, self.context.options, found.plan.problem
        spec = EngineSpec(
            files=files,
            policy=found.plan.policy,
            max_tokens=problem.workload.max_total_tokens,
            device=Device(kind=self.kind, hardware=problem.hardware),
            approximation=context.approximation,
            is_plain=options.is_plain,
            shares=options.shares,
            predictor=found.predictor,
            hottest=context.opened.hints.hottest,
            scratch=context.folder.path,
            num_traced_passes=options.num_traced_passes,
        )
        return build_engine(
            spec,
            decoder=context.reader.tokenizer,
            end_tokens=context.reader.end_tokens,
            job_seed=context.job.sampling.seed,
            grammars=context.reader.grammars,
        )

    # --- the passes -----------------------------------------------------------------------------

    def _answer_all(self, answering: Answering, built: BuiltEngine) -> None:
        engine, stop = built.engine, self.context.stop
        if built.recorder is not None:
            built.recorder.begin()

        def moved() -> Hashable:
            return engine.num_ended, built.reads.num_bytes

        try:
            with (
                torch.inference_mode(),
                lasting(),
                stop.deferred(engine.interrupt),
                watched(moved, engine.doing, self.context.log),
            ):
                computed = partial(self._computed, engine)
                for outcome in self.repeats.answer(answering.requests(), computed):
                    answering.ended(outcome)
        except Stopped:
            kept = answering.keep_unfinished(engine.unfinished())
            gained = answering.has_gained or stop.has_gained  # in an attempt before this one
            raise Stopped(self._stopped_early(kept), has_gained=gained) from None
        except MoebatchError:
            with suppress(StorageError):  # it may be the disk of journals that fails
                answering.keep_unfinished(engine.unfinished())
            raise
        finally:
            if answering.has_gained:
                stop.gained(self._num_done_text)
            built.close()

    def _computed(self, engine: Engine, requests: Iterable[Request]) -> Iterator[Outcome]:
        for outcome in engine.run(requests):
            for choice in outcome.choices:
                begun = outcome.request.num_begun(choice.index)
                num_prompt = len(outcome.request.prompt_tokens) + begun
                self.answers.add(Length(num_prompt, max(1, len(choice.tokens) - begun)))
            yield outcome

    def _stopped_early(self, num_tokens: int) -> str:
        return (
            f"stopped early ({self.context.stop.reason}): {self._num_done_text}, and "
            f"{count_of(num_tokens, 'token')} of others; run the job again to go on"
        )

    @property
    def _num_done_text(self) -> str:
        return f"{self.num_done} of {self.input.num_rows if self.input else 0} rows are done"
