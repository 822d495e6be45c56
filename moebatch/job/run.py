"""One run of a job, from the job file to the last line of its output."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from moebatch.errors import ConfigError, DoesNotFit, OutOfMemory, StorageError
from moebatch.folder.claim import Claim, FirstRun, claim, require_still_own, written_claimed
from moebatch.folder.final_file import FinalFile, RowsMissing
from moebatch.folder.output_path import require_no_fewer, require_writable
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import Shard, agreed_shard
from moebatch.job.attempt import Attempt
from moebatch.job.context import RunContext
from moebatch.job.figures import run_timelines, status_of, summary_of
from moebatch.job.limits import dram_bytes, require_within_machine
from moebatch.job.machine import known_device
from moebatch.job.opened import OpenedJob, require_exact
from moebatch.job.options import RunOptions
from moebatch.job.slurm import array_task
from moebatch.job.status import RunStatus, RunSummary
from moebatch.job.status_file import written_to
from moebatch.job.stop import Stop
from moebatch.journal.finished import Finished
from moebatch.measure.saved import save_profile, this_machine_path
from moebatch.rows.source import FirstRows
from moebatch.schedule.lanes import PROCESSORS, READ
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.files.library import is_path
from moebatch.spec.job import Job
from moebatch.spec.machine.hardware import CONTEXT_BYTES
from moebatch.spec.machine.profile import HardwareProfile
from moebatch.store.memory import return_freed_memory
from moebatch.units import format_bytes, format_rate

_USUAL = RunOptions()


class JobRun:
    """Runs a job once. `status` may be asked from another thread while `execute` works."""

    def __init__(
        self,
        job: Job,
        log: Callable[[str], None],
        options: RunOptions = _USUAL,
        stop: Stop | None = None,
    ) -> None:
        """`log` gets what the user should know before the first pass, line by line; `stop` may be
        asked to end the run early."""
        self._begun_s = time.perf_counter()
        self._job = job
        self._log = log
        self._options = options
        self._stop = stop or Stop()
        self._opened = OpenedJob(job, limit=options.limit)
        self._folder = RunFolder(job.output.path)
        self._budget_bytes = dram_bytes(job)
        self._attempt: Attempt | None = None
        self._given_up: list[int] = []
        """Of attempts for which there was too little memory, rows that earlier runs had done or
        earlier attempts, when they began."""

    def execute(self) -> RunSummary:
        """Answers every row and writes the output.

        Raises MoebatchError when the job cannot be run or has to stop; finished rows are then in
        the run folder beside the output. Bad rows do not stop a run.
        """
        job, options, opened = self._job, self._options, self._opened
        require_writable(job)
        require_within_machine(job)
        options.require_device(known_device(job))
        if options.is_exact:
            require_exact(job)
        before = opened.require_own_output()
        require_no_fewer(job, options.limit)
        shard = self._agreed_shard(before)
        with self._folder.locked(shard) as lock:
            ours = claim(opened.manifest, self._folder, opened.source, FirstRun.today(shard))
            with written_to(self._folder.status(shard), shard, self.status), self._stop.heard():
                attempt = self._answer_rows(self._context(ours, shard))
                if shard.is_all:
                    attempt.phase = "writing answers"
                    lock.require_held()
                    self._write_output(attempt)
                else:
                    require_still_own(ours, self._folder)
        return summary_of(attempt, self._begun_s, self._given_up)

    def recalibrate(self, summary: RunSummary) -> None:
        """Keeps what the run has shown of this machine in its profile. Raises StorageError."""
        machine = self._attempt.machine if self._attempt else None
        assert machine is not None or summary.prediction is None, "the run was planned"
        if machine is not None and machine.kind == "emulate":
            self._log("a run on an emulated GPU teaches nothing about this machine")
            return
        learnt = lesson(machine.profile, summary) if machine else None
        if learnt is None or not learnt.lines:
            self._log("the run was too short to learn from")
            return
        path = require_own_profile(self._job)
        save_profile(learnt.profile, path)
        for line in (*learnt.lines, f"kept in {path}"):
            self._log(line)

    def timelines(self) -> dict[str, Timeline]:
        """The first passes of a run that has been executed, predicted and measured; empty if the
        options ask for none, or nothing was computed."""
        return run_timelines(self._attempt) if self._attempt else {}

    def status(self) -> RunStatus:
        attempt = self._attempt
        return status_of(attempt) if attempt else RunStatus(budget_bytes=self._budget_bytes)

    def _agreed_shard(self, before: Claim | None) -> Shard:
        num_shards = before.first.num_shards if before else None
        shard = agreed_shard(self._options.shard, num_shards, array_task())
        if self._options.shard is None and not shard.is_all:
            self._log(f"note: this is task {shard.number} of an array: shard {shard}")
        return shard

    def _context(self, ours: Claim, shard: Shard) -> RunContext:
        reader = self._opened.reader_of(ours.first.date)
        for warning in reader.warnings:
            self._log(f"warning: {warning}")
        return RunContext(
            job=self._job,
            opened=self._opened,
            reader=reader,
            claim=ours,
            shard=shard,
            folder=self._folder,
            options=self._options,
            stop=self._stop,
            log=self._log,
        )

    def _answer_rows(self, context: RunContext) -> Attempt:
        """Answers what earlier runs have not; where the system refuses memory, goes on in less of
        it from where it was."""
        refusal: str | None = None
        while True:
            attempt = self._attempt = Attempt(context)
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
            vram_bytes = attempt.vram_bytes
            if attempt.input is not None:
                self._given_up.append(attempt.input.num_done)
            del attempt
            self._attempt = None
            gc.collect()
            return_freed_memory()
            context = context.with_less_memory(_still_there(vram_bytes))
            self._budget_bytes = dram_bytes(context.job)
            room = format_bytes(self._budget_bytes)
            self._log(f"warning: {refusal}. Going on with a plan for {room}")

    def _write_output(self, attempt: Attempt) -> None:
        """All rows in the order of the input. Raises StorageError, and ConfigError where others
        have written there meanwhile."""
        assert attempt.input is not None, "rows were looked at"
        output, source, ours = self._job.output, self._opened.source, attempt.context.claim
        final = FinalFile(output.path, ours.manifest.row_keys, errors=output.errors)
        with Finished(self._folder.journal) as all_rows:
            try:
                claimed = written_claimed(ours, self._folder, output.errors)
                num_rows, _ = final.write(source, all_rows, attempt.input.duplicates, claimed)
            except RowsMissing as missing:
                raise StorageError(
                    f"{self._folder.journal}: {missing.num_missing} rows that were written are not "
                    "there any more; were files removed? Run the job again"
                ) from None
        if isinstance(source, FirstRows) and source.has_more:
            self._log(
                f"trial: {output.path} has the answers of the first {num_rows} rows only; a run "
                "without --limit goes on from there and replaces it"
            )


_LEAST_BUSY_S = 5.0
"""A lane that was busy for less says little."""
_MOST_FACTOR = 4.0
"""More than that between prediction and measurement is no matter of calibration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """A corrected profile, and in words what was corrected."""

    profile: HardwareProfile
    lines: tuple[str, ...]


def _still_there(vram_bytes: int | None) -> int | None:
    """So much of a GPU, or what others have left of it: what torch holds is given back first."""
    if vram_bytes is None:
        return None
    torch.cuda.empty_cache()
    return min(vram_bytes, torch.cuda.mem_get_info()[0] + CONTEXT_BYTES)


def lesson(profile: HardwareProfile, summary: RunSummary) -> Lesson:
    """The rate of the disk and the speed of CPU and GPU that the run has shown.

    A single factor for everything that a processor does: a run does not tell its parts apart.
    """
    busy = {lane.name: lane.busy_s for lane in summary.lanes}
    source, lines = f"a run of {date.today().isoformat()}", []
    disk_s = busy.get(READ.name, 0.0)
    if summary.bytes_read and disk_s >= _LEAST_BUSY_S:
        rate = summary.bytes_read / disk_s
        profile = profile.with_measured_link("disk->dram", rate, source)
        lines.append(f"disk->dram achieves {format_rate(rate)}")
    for lane, level in PROCESSORS.items():
        expected = summary.hindsight or summary.prediction
        expected_s = expected.busy_s.get(lane, 0.0) if expected else 0.0
        measured_s = busy.get(lane, 0.0)
        if expected_s and measured_s >= _LEAST_BUSY_S:
            factor = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, expected_s / measured_s))
            profile = profile.with_scaled_level(level, factor, source)
            lines.append(f"the {lane.upper()} achieves {factor:.2f} times what was expected of it")
    return Lesson(profile=profile, lines=tuple(lines))


def require_own_profile(job: Job) -> Path:
    """Where the profile of a job is to be corrected: a file of its own, or this machine's.

    Raises ConfigError where the figures are of no machine of the user's: those that come with
    moebatch, or a few seconds' measurement.
    """
    hardware = job.resources.hardware
    path = Path(hardware) if is_path(hardware) else this_machine_path()
    if (hardware != "auto" and not is_path(hardware)) or not path.is_file():
        message = "there is no profile of this machine to correct; run `moebatch profile` first"
        raise ConfigError.at("--recalibrate", message)
    return path
