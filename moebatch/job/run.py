"""One run of a job, from the job file to the last line of its output."""

import datetime
import gc
import time
from collections.abc import Callable

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.engine.approximation import Approximation
from moebatch.errors import DoesNotFit, OutOfMemory, StorageError
from moebatch.folder.claim import Claim, claim, require_own
from moebatch.folder.final_file import FinalFile, RowsMissing
from moebatch.folder.output_path import require_no_fewer, require_writable
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.settled import of_today
from moebatch.folder.shard import Shard, agreed_shard
from moebatch.job.approximation import load_approximation, require_exact
from moebatch.job.attempt import Attempt
from moebatch.job.figures import status_of, summary_of
from moebatch.job.ground import Ground
from moebatch.job.identity import manifest_of
from moebatch.job.less_memory import with_less_memory
from moebatch.job.limits import require_within_machine
from moebatch.job.machine import known_device
from moebatch.job.options import RunOptions
from moebatch.job.recalibrate import keep, lesson
from moebatch.job.slurm import array_task
from moebatch.job.status import RunStatus, RunSummary
from moebatch.job.status_file import written_to
from moebatch.job.stop import Stop
from moebatch.job.timelines import run_timelines
from moebatch.journal.finished import Finished
from moebatch.plan.machine import detect_machine
from moebatch.rows.prepare import Preparation, prepare
from moebatch.rows.source import FirstRows, first_rows, open_source
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.job import Job
from moebatch.store.memory import return_freed_memory
from moebatch.units import format_bytes

_USUAL = RunOptions()


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
        machine = self._machine = detect_machine()
        self._begun_s = time.perf_counter()
        self._job = job
        self._tell = tell
        self._options = options
        self._stop = stop or Stop()
        self._folder = RunFolder(job.output.path)
        self._source = first_rows(open_source(job.input.path), options.limit)
        self._budget_bytes = job.resources.dram or machine.dram_bytes
        self._num_threads = job.resources.threads or machine.num_cores
        self._attempt: Attempt | None = None

    def execute(self) -> RunSummary:
        """Answers every row and writes the output.

        Raises MoebatchError when the job cannot be run or has to stop; finished rows are then in
        the run folder beside the output. Bad rows do not stop a run.
        """
        require_writable(self._job)
        require_no_fewer(self._job, self._options.limit)
        require_within_machine(self._job, self._machine)
        self._options.require_device(known_device(self._job))
        if self._options.is_exact:
            require_exact(self._job)
        files = open_model(self._job.model.path, self._job.model.dtype)
        approximation = load_approximation(self._job, files)
        manifest = manifest_of(self._job, files, approximation)
        output = self._job.output.path
        shard = self._agreed_shard(require_own(manifest, output, self._source))
        with self._folder.locked(shard):
            ours = claim(manifest, output, self._source, of_today(shard))
            with written_to(self._folder.status(shard), shard, self.status), self._stop.heard():
                ground = self._ground(files, approximation, ours, shard)
                attempt = self._answer_rows(ground)
                if shard.is_all:
                    attempt.phase = "writing answers"
                    self._write_output(ground.keys, attempt)
        return summary_of(
            attempt,
            output=str(output),
            shard=shard,
            budget_bytes=self._budget_bytes,
            begun_s=self._begun_s,
        )

    def recalibrate(self, summary: RunSummary) -> None:
        """Keeps what the run has shown of this machine in its profile. Raises StorageError."""
        machine = self._attempt.machine if self._attempt else None
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
        attempt = self._attempt
        if attempt is None or attempt.built is None or attempt.plan is None:
            return {}
        return run_timelines(attempt.built, attempt.plan)

    def status(self) -> RunStatus:
        """Where the run is now."""
        folder = str(self._folder.path)
        return status_of(self._attempt, run_folder=folder, budget_bytes=self._budget_bytes)

    def _agreed_shard(self, before: Claim | None) -> Shard:
        num_shards = before.settled.num_shards if before else None
        shard = agreed_shard(self._options.shard, num_shards, array_task())
        if self._options.shard is None and not shard.is_all:
            self._tell(f"note: this is task {shard.number} of an array: shard {shard}")
        return shard

    def _ground(
        self,
        files: ModelFiles,
        approximation: Approximation,
        ours: Claim,
        shard: Shard,
    ) -> Ground:
        return Ground(
            source=self._source,
            files=files,
            approximation=approximation,
            preparation=self._prepare(files, ours.settled.date),
            keys=ours.manifest.row_keys,
            created=ours.settled.created,
            shard=shard,
            folder=self._folder,
            num_threads=self._num_threads,
            options=self._options,
            stop=self._stop,
            tell=self._tell,
        )

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

    def _answer_rows(self, ground: Ground) -> Attempt:
        """Answers what earlier runs have not; where the system refuses memory, goes on in less of
        it from where it was."""
        refusal: str | None = None
        while True:
            attempt = self._attempt = Attempt(self._job, ground)
            try:
                attempt.execute()
                return attempt
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
        self._attempt = None
        gc.collect()
        return_freed_memory()
        self._job = with_less_memory(self._job, self._budget_bytes)
        self._budget_bytes = self._job.resources.dram or self._budget_bytes
        room = format_bytes(self._budget_bytes)
        self._tell(f"warning: {refusal}. Going on with a plan for {room}")

    def _write_output(self, keys: RowKeys, attempt: Attempt) -> None:
        """All rows in the order of the input. Raises StorageError."""
        assert attempt.input is not None, "rows were looked at"
        output, duplicates = self._job.output, attempt.input.duplicates
        final = FinalFile(output.path, keys, errors=output.errors)
        with Finished(self._folder.journal) as all_rows:
            try:
                num_rows, _ = final.write(self._source, all_rows, duplicates)
            except RowsMissing as missing:
                raise StorageError(
                    f"{self._folder.journal}: {missing.num_missing} rows that were written are not "
                    "there any more; has somebody removed files? Run the job again"
                ) from None
        if isinstance(self._source, FirstRows) and self._source.has_more:
            self._tell(
                f"trial: {output.path} has the answers of the first {num_rows} rows only; a run "
                "without --limit goes on from there and replaces it"
            )
