"""One run of a job, from the job file to the last line of its output."""

import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.model_files import ModelFiles, open_model
from moebatch.job.dialects import Served, result_line
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.job.manifest import Manifest
from moebatch.job.notices import (
    describe_input,
    describe_prediction,
    describe_sampling,
    settings_without_effect,
)
from moebatch.job.output_path import require_writable, run_folder
from moebatch.job.planning import JobPlan, job_problem, job_profile, plan_job
from moebatch.job.prepare import Preparation, prepare
from moebatch.job.recalibrate import keep, lesson
from moebatch.job.results import ResultFile
from moebatch.job.row import FailedRow, Row
from moebatch.job.scan import InputSummary, scan
from moebatch.job.source import open_source
from moebatch.job.status import LaneTime, Phase, RunStatus, RunSummary
from moebatch.plan.machine import detect_machine
from moebatch.plan.prediction import Prediction, predict
from moebatch.spec.job import Job
from moebatch.spec.policy_file import PolicyFile
from moebatch.spec.profile import HardwareProfile
from moebatch.spec.request import Outcome, Request, RowError
from moebatch.spec.workload import Workload
from moebatch.store.memory import peak_resident_bytes, resident_bytes

_LEAST_READING_S = 1.0
"""Less reading says nothing about the disk."""


class JobRun:
    """Runs a job once. `status` may be asked from another thread while `execute` works."""

    def __init__(
        self, job: Job, tell: Callable[[str], None], *, policy: PolicyFile | None = None
    ) -> None:
        """`tell` gets what the user should know before the first pass, line by line.

        Without a `policy` the best one is planned.
        """
        machine = detect_machine()
        self._job = job
        self._tell = tell
        self._given_policy = policy
        self._profile: HardwareProfile | None = None
        self._budget_bytes = job.resources.dram or machine.dram_bytes
        self._num_threads = job.resources.threads or machine.num_cores
        self._phase: Phase = "checking input"
        self._begun = time.perf_counter()
        self._first_pass = self._begun
        self._run_s: float | None = None
        self._source = open_source(job.input.path)
        self._input: InputSummary | None = None
        self._built: BuiltEngine | None = None
        self._rows: dict[int, Row] = {}
        self._errors: Counter[str] = Counter()
        self._num_done = 0

    def execute(self) -> RunSummary:
        """Answers every row and writes the output.

        Raises MoebatchError when the job cannot be run or has to stop; finished rows are then in
        the run folder beside the output. Bad rows do not stop a run.
        """
        require_writable(self._job)
        files = open_model(self._job.model.path, self._job.model.dtype)
        preparation = self._prepare(files)
        counted = self._scan(preparation)
        served = self._served(files, preparation, counted)
        output, workload = self._job.output, counted.workload
        plan = self._plan(files, workload) if workload else None
        Manifest.of(self._job, files).claim(output.path)
        with ResultFile(output.path, num_rows=counted.num_rows, errors=output.errors) as results:
            self._phase = "loading weights"
            if plan is not None:
                self._build(files, preparation, plan)
            self._answer_all(preparation, served, results)
            self._phase = "writing answers"
            results.finish()
        return self._summary(plan)

    def recalibrate(self, summary: RunSummary) -> None:
        """Keeps what the run has shown of this machine in its profile. Raises StorageError."""
        assert self._profile is not None or summary.prediction is None, "the run was planned"
        learnt = lesson(self._profile, summary) if self._profile else None
        if learnt is None or not learnt.lines:
            self._tell("the run was too short to learn from")
            return
        path = keep(self._job, learnt)
        for line in (*learnt.lines, f"kept in {path}"):
            self._tell(line)

    def status(self) -> RunStatus:
        """Where the run is now."""
        engine = self._built.engine.statistics if self._built else None
        workload = self._input.workload if self._input else None
        expected = (workload.num_sequences or 0) * workload.mean_new_tokens if workload else 0
        return RunStatus(
            phase=self._phase,
            run_folder=str(run_folder(self._job.output.path)),
            num_rows=self._input.num_rows if self._input else 0,
            num_done=self._num_done,
            num_failed=self._errors.total(),
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
            lanes=self._lanes(),
        )

    # --- before the first pass ------------------------------------------------------------------

    def _prepare(self, files: ModelFiles) -> Preparation:
        preparation = prepare(
            self._job,
            vocab_size=files.shape.vocab_size,
            max_positions=files.shape.max_positions,
        )
        for warning in (*preparation.warnings, *settings_without_effect(self._job)):
            self._tell(f"warning: {warning}")
        return preparation

    def _scan(self, preparation: Preparation) -> InputSummary:
        """One look at all rows: what is wrong, and exactly how long prompts and answers are."""
        counted = scan(self._source, preparation.reader.request)
        counted.require_usable(every_row=self._job.input.on_bad_row == "fail")
        if counted.first_chat is not None:
            preparation.reader.tokenizer.require_chat_template(counted.first_chat.place)
        self._input = counted
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

    def _plan(self, files: ModelFiles, workload: Workload) -> JobPlan:
        profile, notes = job_profile(self._job, files, self._tell)
        self._profile = profile
        for note in notes:
            self._tell(f"note: {note}")
        problem = job_problem(self._job, files, workload, profile.hardware())
        plan = plan_job(problem, self._given_policy)
        self._tell(f"policy: {plan.policy}")
        self._tell(f"expected: {describe_prediction(plan.prediction)}")
        return plan

    def _build(self, files: ModelFiles, preparation: Preparation, plan: JobPlan) -> None:
        torch.set_num_threads(self._num_threads)
        self._built = build_engine(
            files,
            plan.policy,
            decoder=preparation.reader.tokenizer,
            end_tokens=preparation.end_tokens,
            job_seed=self._job.sampling.seed,
            max_tokens=plan.problem.workload.max_total_tokens,
        )

    # --- the passes -----------------------------------------------------------------------------

    def _answer_all(self, preparation: Preparation, served: Served, results: ResultFile) -> None:
        requests = self._requests(preparation, served, results)
        self._first_pass = time.perf_counter()
        self._phase = "running"
        if self._built is None:
            assert next(requests, None) is None, "a row was good only at second sight"
            return
        try:
            with torch.inference_mode():
                for outcome in self._built.engine.run(requests):
                    row = self._rows.pop(outcome.request.index)
                    self._write(row, outcome.error or outcome, served, results)
        finally:
            self._built.close()
        self._run_s = self._elapsed_s()

    def _requests(
        self, preparation: Preparation, served: Served, results: ResultFile
    ) -> Iterator[Request]:
        """Good rows as requests, one by one; bad ones are written at once."""
        for item in preparation.reader.requests(self._source):
            if isinstance(item, FailedRow):
                self._write(item.row, item.error, served, results)
            else:
                self._rows[item.row.index] = item.row
                yield item.request

    def _write(
        self, row: Row, result: Outcome | RowError, served: Served, results: ResultFile
    ) -> None:
        failed = isinstance(result, RowError)
        results.add(row.index, result_line(row, result, served), failed=failed)
        self._num_done += 1
        if isinstance(result, RowError):
            self._errors[result.code] += 1

    # --- figures --------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        if self._run_s is not None:
            return self._run_s
        return time.perf_counter() - self._first_pass if self._phase == "running" else 0.0

    def _lanes(self) -> tuple[LaneTime, ...]:
        if self._built is None:
            return ()
        elapsed, reads = self._elapsed_s(), self._built.experts.statistics
        return (
            LaneTime(name="disk->dram", busy_s=reads.busy.total_s, elapsed_s=elapsed),
            LaneTime(name="cpu", busy_s=max(0.0, elapsed - reads.waited_s), elapsed_s=elapsed),
        )

    def _hindsight(self, plan: JobPlan) -> Prediction | None:
        """The prediction at the rate at which the disk has been read."""
        reads = self._built.experts.statistics if self._built else None
        if reads is None or reads.busy.total_s < _LEAST_READING_S:
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
            waited_s=built.experts.statistics.waited_s if built else 0.0,
            bytes_read=built.experts.statistics.num_bytes if built else 0,
            num_passes=built.engine.statistics.num_passes if built else 0,
            num_preempted=built.engine.statistics.num_preempted if built else 0,
            num_shrunk=built.engine.statistics.num_shrunk if built else 0,
            peak_bytes=peak_resident_bytes(),
            budget_bytes=self._budget_bytes,
            policy=plan.policy if plan else None,
            prediction=plan.prediction if plan else None,
            hindsight=self._hindsight(plan) if plan else None,
            reads_past_page_cache=built.experts.reads_past_page_cache if built else True,
        )
