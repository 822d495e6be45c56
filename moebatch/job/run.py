"""One run of a job, from the job file to the last line of its output."""

import datetime
import gc
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device, DeviceKind
from moebatch.engine.model_files import ModelFiles, open_model
from moebatch.engine.order import Order, has_common_keys
from moebatch.errors import DoesNotFit, OutOfMemory, Stopped
from moebatch.job.answering import Answering
from moebatch.job.claim import claim, require_own
from moebatch.job.dialects import Served
from moebatch.job.final_file import FinalFile
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.job.hints import load_predictor
from moebatch.job.less_memory import with_less_memory
from moebatch.job.lane_times import lane_times, waited_s, without_readers
from moebatch.job.machine import JobMachine, known_device, sharing_cores
from moebatch.job.manifest import Manifest
from moebatch.job.notices import (
    describe_emulation,
    describe_input,
    describe_prediction,
    describe_sampling,
    settings_without_effect,
)
from moebatch.job.options import RunOptions
from moebatch.job.output_path import require_writable
from moebatch.job.planning import JobPlan, job_problem, measured_machine, plan_job
from moebatch.job.prepare import Preparation, prepare
from moebatch.job.raw import RawRow
from moebatch.job.recalibrate import keep, lesson
from moebatch.job.repeats import Repeats
from moebatch.job.results import Results
from moebatch.job.row import FailedRow, ReadyRow
from moebatch.job.row_key import RowKeys
from moebatch.job.run_folder import RunFolder
from moebatch.job.scan import InputSummary, scan
from moebatch.job.settled import Settled, of_today
from moebatch.job.shard import Shard, agreed_shard
from moebatch.job.slurm import array_task
from moebatch.job.source import open_source
from moebatch.job.status import Phase, RunStatus, RunSummary
from moebatch.job.status_file import written_to
from moebatch.job.stop import Stop
from moebatch.job.timelines import run_timelines
from moebatch.job.todo import Todo
from moebatch.job.watchdog import watched
from moebatch.journal.finished import Finished
from moebatch.journal.writer import JournalWriter
from moebatch.model.native.loader import prepare as prepare_kernels
from moebatch.plan.machine import detect_machine
from moebatch.plan.prediction import Prediction, predict
from moebatch.predict.predictor import Predictor
from moebatch.schedule.timeline import Timeline
from moebatch.spec.job import Job
from moebatch.spec.policy import Policy
from moebatch.spec.workload import Workload
from moebatch.store.memory import is_out_of_memory,peak_resident_bytes,resident_bytes,return_freed_memory
from moebatch.units import format_bytes

_USUAL = RunOptions()
_LEAST_READING_S = 1.0
"""Less reading says nothing about the disk."""


class JobRun:
    """Runs a job once. `status` may be asked from another thread while `execute` works."""

    def __init__(
        self,
        job: Job,
        tell: Callable[[str], None],
        options: RunOptions = _USUAL,
        stop: Stop | None = None,
    ) -> None:
        """`tell` gets what the user should know before the first pass, line by line; `stop` may be
        asked to end the run early."""
        machine = detect_machine()
        self._stop = stop or Stop()
        self._folder = RunFolder(job.output.path)
        self._job = job
        self._tell = tell
        self._options = options
        self._machine: JobMachine | None = None
        self._plan: JobPlan | None = None
        self._torch_only: str | None = None
        self._budget_bytes = job.resources.dram or machine.dram_bytes
        self._num_threads = job.resources.threads or machine.num_cores
        self._phase: Phase = "checking input"
        self._begun = time.perf_counter()
        self._first_pass = self._begun
        self._run_s: float | None = None
        self._source = open_source(job.input.path)
        self._input: InputSummary | None = None
        self._built: BuiltEngine | None = None
        self._repeats = Repeats({})
        self._answering: Answering | None = None

    def execute(self) -> RunSummary:
        """Answers every row and writes the output.

        Raises MoebatchError when the job cannot be run or has to stop; finished rows are then in
        the run folder beside the output. Bad rows do not stop a run.
        """
        require_writable(self._job)
        self._options.require_device(known_device(self._job))
        files = open_model(self._job.model.path, self._job.model.dtype)
        manifest, output = Manifest.of(self._job, files), self._job.output.path
        shard = self._agreed_shard(require_own(manifest, output))
        with self._folder.locked(shard):
            settled = claim(manifest, output, of_today(shard))
            with written_to(self._folder.status(shard), shard, self.status):
                preparation = self._prepare(files, settled.date)
                self._answer_rows(files, preparation, manifest.row_keys, shard)
                if shard.is_all:
                    self._phase = "writing answers"
                    self._write_output(manifest.row_keys)
        return self._summary(self._plan)

    def recalibrate(self, summary: RunSummary) -> None:
        """Keeps what the run has shown of this machine in its profile. Raises StorageError."""
        machine = self._machine
        assert machine is not None or summary.prediction is None, "the run was planned"
        if machine is not None and machine.kind == "emulate":
            self._tell("a run on an emulated GPU teaches nothing about this machine")
            return
        learnt = lesson(machine.profile, summary) if machine else None
        if learnt is None or not learnt.lines:
            self._tell("the run was too short to learn from")
            return
        path = keep(self._job, learnt)
        for line in (*learnt.lines, f"kept in {path}"):
            self._tell(line)

    def timelines(self) -> dict[str, Timeline]:
        """The first passes of a run that has been executed, predicted and measured; empty if the
        options ask for none, or nothing was computed."""
        if self._built is None or self._plan is None:
            return {}
        return run_timelines(self._built, self._plan)

    def status(self) -> RunStatus:
        """Where the run is now."""
        built = self._built  # of the thread that runs, which may replace it
        engine = built.engine.statistics if built else None
        workload = self._input.workload if self._input else None
        expected = (workload.num_sequences or 0) * workload.mean_new_tokens if workload else 0
        return RunStatus(
            phase=self._phase,
            run_folder=str(self._folder.path),
            num_rows=self._input.num_rows if self._input else 0,
            num_done=self._num_done,
            num_failed=self._errors.total(),
            num_ended=self._answering.num_ended if self._answering else 0,
            num_running=engine.num_running if engine else 0,
            num_passes=engine.num_passes if engine else 0,
            layer=engine.layer if engine else 0,
            num_layers=engine.num_layers if engine else 0,
            prompt_tokens=engine.prompt_tokens if engine else 0,
            generated_tokens=engine.generated_tokens if engine else 0,
            expected_tokens=round(expected),
            elapsed_s=self._elapsed_s(),
            memory_bytes=resident_bytes(),
            budget_bytes=self._budget_bytes,
            lanes=lane_times(built, self._elapsed_s()) if built else (),
            is_emulated=self._kind == "emulate",
        )

    def _agreed_shard(self, settled: Settled | None) -> Shard:
        num_shards = settled.num_shards if settled else None
        shard = agreed_shard(self._options.shard, num_shards, array_task())
        if self._options.shard is None and not shard.is_all:
            self._tell(f"note: this is task {shard.number} of an array: shard {shard}")
        return shard

    def _answer_rows(
        self, files: ModelFiles, preparation: Preparation, keys: RowKeys, shard: Shard
    ) -> None:
        """Answers what earlier runs have not; where the system refuses memory, goes on in less of
        it from where it was."""
        refusal: str | None = None
        while True:
            try:
                self._answer_what_is_left(files, preparation, keys, shard)
                return
            except OutOfMemory as error:
                if self._options.policy is not None:
                    raise
                refusal = str(error)  # the error itself holds on to all that was allocated
            except DoesNotFit as error:
                if refusal is None:
                    raise
                raise OutOfMemory(f"{refusal}; nor is there a plan for less: {error}") from error
            self._back_off(refusal)

    def _back_off(self, refusal: str) -> None:
        """Gives back what there is, and plans for less of it from now on."""
        self._built = None
        gc.collect()
        return_freed_memory()
        self._job = with_less_memory(self._job, self._budget_bytes)
        self._budget_bytes = self._job.resources.dram or self._budget_bytes
        room = format_bytes(self._budget_bytes)
        self._tell(f"warning: {refusal}. Going on with a plan for {room}")

    def _answer_what_is_left(
        self, files: ModelFiles, preparation: Preparation, keys: RowKeys, shard: Shard
    ) -> None:
        """Answers what earlier runs have not, into a journal of its own."""
        self._phase = "checking input"
        journal = self._folder.journal
        with Finished(journal) as before, JournalWriter(journal) as ours:
            results = Results(before, ours, keys)
            todo = Todo(shard=shard, answered=results.answered)
            counted = self._scan(preparation, results, todo)
            served = self._served(files, preparation, counted)
            self._answering = Answering(self._source, preparation.reader, results, served, todo)
            predictor = self._load_predictor(files)
            if counted.workload is not None:
                self._plan = self._planned(files, counted.workload)
                self._phase = "loading weights"
                self._build(files, preparation, self._plan, predictor)
            self._answer_all(self._answering)

    def _write_output(self, keys: RowKeys) -> None:
        """All rows in the order of the input."""
        output = self._job.output
        with Finished(self._folder.journal) as all_rows:
            FinalFile(output.path, keys, errors=output.errors).write(self._source, all_rows)

    # --- before the first pass ------------------------------------------------------------------

    def _prepare(self, files: ModelFiles, date: datetime.date) -> Preparation:
        preparation = prepare(
            self._job,
            vocab_size=files.shape.vocab_size,
            max_positions=files.shape.max_positions,
            today=date,
        )
        for warning in preparation.warnings:
            self._tell(f"warning: {warning}")
        return preparation

    def _scan(self, preparation: Preparation, results: Results, todo: Todo) -> InputSummary:
        """One look at all rows: what is wrong, and exactly how long prompts and answers are."""

        def read(raw: RawRow) -> ReadyRow | FailedRow:
            return results.resumed(raw, preparation.reader.request(raw))

        counted = scan(self._source, read, shares=self._options.shares, todo=todo)
        counted.require_usable(every_row=self._job.input.on_bad_row == "fail")
        if counted.first_chat is not None:
            preparation.reader.tokenizer.require_chat_template(counted.first_chat.place)
        self._input = counted
        self._repeats = Repeats(counted.repeated)
        self._tell(describe_input(counted))
        self._tell(f"defaults of rows: {describe_sampling(preparation.reader.defaults.sampling)}")
        return counted

    def _served(self, files: ModelFiles, preparation: Preparation, counted: InputSummary) -> Served:
        return Served(
            model=self._job.model.name or self._job.model.path.name,
            token_bytes=preparation.reader.tokenizer.token_bytes,
            fingerprint=numerics_fingerprint(files),
            format=self._job.output.format,
            fallback=counted.dialect,
            column=self._job.output.column,
        )

    def _load_predictor(self, files: ModelFiles) -> Predictor | None:
        """Before planning, which counts what the process holds."""
        if self._options.is_plain:
            return None
        predictor, warnings = load_predictor(self._job, files)
        for warning in warnings:
            self._tell(f"warning: {warning}")
        return predictor

    def _planned(self, files: ModelFiles, workload: Workload) -> JobPlan:
        self._torch_only = prepare_kernels()  # a compiler takes memory, too
        machine = self._machine = measured_machine(self._job, files, self._tell)
        options, kind = self._options, machine.kind
        options.require_device(kind)  # a GPU may have been found only now
        for warning in settings_without_effect(self._job, kind):
            self._tell(f"warning: {warning}")
        if not has_common_keys(files):
            workload = workload.unshared
        problem = job_problem(self._job, files, workload, machine.hardware(), kind)
        plan = plan_job(
            replace(problem, kv_on_disk=not options.is_plain),
            options.policy,
            schedule=options.known_schedule,
            is_plain=options.is_plain,
            is_static=options.is_static,
        )
        share = self._threads_of(plan.policy) / self._num_threads
        if share < 1:
            plan = plan.on(sharing_cores(plan.problem.hardware, share))
        for note in (*machine.notes, *plan.notes):
            self._tell(f"note: {note}")
        self._tell(f"policy: {plan.policy}")
        how = " on the emulated GPU, computed by the CPU" if kind == "emulate" else ""
        self._tell(f"expected{how}: {describe_prediction(plan.prediction)}")
        return plan

    def _build(
        self,
        files: ModelFiles,
        preparation: Preparation,
        plan: JobPlan,
        predictor: Predictor | None,
    ) -> None:
        num_threads = self._threads_of(plan.policy)
        torch.set_num_threads(num_threads)
        options = self._options
        order = Order(
            files=files,
            policy=plan.policy,
            max_tokens=plan.problem.workload.max_total_tokens,
            device=Device(kind=self._kind, hardware=plan.problem.hardware, num_threads=num_threads),
            is_plain=options.is_plain,
            shares=options.shares,
            predictor=predictor,
            scratch=self._folder.path,
            num_traced_passes=options.num_traced_passes if options.is_drawn else 0,
        )
        try:
            self._built = build_engine(
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
        if self._kind == "emulate" and not policy.attention_on_gpu:
            return max(1, self._num_threads // 2)
        return self._num_threads

    @property
    def _kind(self) -> DeviceKind:
        return self._machine.kind if self._machine else "cpu"

    # --- the passes -----------------------------------------------------------------------------

    def _answer_all(self, answering: Answering) -> None:
        requests = answering.requests()
        self._first_pass = time.perf_counter()
        self._phase = "running"
        if self._built is None:
            assert next(requests, None) is None, "a row was good only at second sight"
            return
        if self._built.recorder is not None:
            self._built.recorder.begin()
        engine = self._built.engine
        try:
            with (
                torch.inference_mode(),
                self._stop.deferred(engine.interrupt),
                watched(self._moved, engine.doing, self._tell),
            ):
                for outcome in self._repeats.answer(requests, engine.run):
                    answering.ended(outcome)
        except Stopped:
            kept = answering.keep_unfinished(engine.unfinished())
            gained = kept > 0 or answering.num_ended > 0
            raise Stopped(self._stopped_early(kept), has_gained=gained) from None
        except OutOfMemory:
            answering.keep_unfinished(engine.unfinished())
            raise
        finally:
            self._built.close()
        self._run_s = self._elapsed_s()

    def _moved(self) -> Hashable:
        """Changes while anything moves."""
        assert self._built is not None, "passes are run"
        return self._built.engine.num_ended, self._built.experts.statistics.num_bytes

    def _stopped_early(self, num_tokens: int) -> str:
        now = self.status()
        return (
            f"stopped early ({self._stop.reason}): {now.num_done} of {now.num_rows} rows are done, "
            f"and {num_tokens} tokens of others; run the job again to go on"
        )

    # --- figures --------------------------------------------------------------------------------

    @property
    def _num_done(self) -> int:
        """Rows that have ended, in earlier runs too."""
        before = self._input.num_done if self._input else 0
        return before + (self._answering.num_ended if self._answering else 0)

    @property
    def _errors(self) -> Counter[str]:
        return self._answering.errors if self._answering else Counter()

    def _elapsed_s(self) -> float:
        if self._run_s is not None:
            return self._run_s
        return time.perf_counter() - self._first_pass if self._phase == "running" else 0.0

    def _hindsight(self, plan: JobPlan) -> Prediction | None:
        """The prediction at the rate at which the disk has been read."""
        reads = self._built.experts.statistics if self._built else None
        if reads is None or reads.busy.total_s < _LEAST_READING_S or not plan.problem.has_disk:
            return None
        rate = reads.num_bytes / reads.busy.total_s
        return predict(plan.problem.with_link_rate("disk->dram", rate), plan.policy)

    def _summary(self, plan: JobPlan | None) -> RunSummary:
        now = self.status()
        built = self._built
        return RunSummary(
            output=str(self._job.output.path),
            num_rows=now.num_rows,
            num_failed=now.num_failed,
            errors=dict(self._errors),
            prompt_tokens=now.prompt_tokens,
            generated_tokens=now.generated_tokens,
            load_s=self._first_pass - self._begun,
            run_s=now.elapsed_s,
            total_s=time.perf_counter() - self._begun,
            lanes=now.lanes,
            waited_s=waited_s(built) if built else 0.0,
            bytes_read=built.experts.statistics.num_bytes if built else 0,
            num_passes=built.engine.statistics.num_passes if built else 0,
            num_preempted=built.engine.statistics.num_preempted if built else 0,
            num_copied=self._repeats.num_copied,
            shared_tokens=built.engine.statistics.shared_tokens if built else 0,
            num_shrunk=built.engine.statistics.num_shrunk if built else 0,
            num_grown=built.engine.statistics.num_grown if built else 0,
            peak_bytes=peak_resident_bytes(),
            budget_bytes=self._budget_bytes,
            policy=plan.policy if plan else None,
            prediction=plan.prediction if plan else None,
            hindsight=self._hindsight(plan) if plan else None,
            reads_past_page_cache=built.experts.reads_past_page_cache if built else True,
            emulated=self._emulated(plan),
            vram_peak_bytes=built.made.memory.peak_bytes if built and built.made.memory else None,
            waits=without_readers(built.recorder.statistics) if built and built.recorder else None,
            torch_only=self._torch_only,
        )

    def _emulated(self, plan: JobPlan | None) -> str | None:
        if plan is None or self._kind != "emulate":
            return None
        return describe_emulation(plan.problem.hardware)
