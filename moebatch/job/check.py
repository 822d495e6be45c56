"""Everything that can be known to be wrong with a job before it runs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from moebatch.checkpoint.checksums import SUMS_NAME, known_checksums, require_checksums
from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.errors import ExitCode, Fault, FaultyFile, MoebatchError
from moebatch.folder.claim import require_own
from moebatch.folder.manifest import Manifest
from moebatch.folder.output_path import require_writable
from moebatch.job.approximation import load_approximation, require_exact
from moebatch.job.hints import Hints, load_hints
from moebatch.job.identity import manifest_of
from moebatch.job.limits import require_within_machine
from moebatch.job.machine import job_machine, known_device
from moebatch.job.notices import prompts_without_template
from moebatch.job.planning import job_problem, plan_job
from moebatch.job.scan import InputSummary, scan
from moebatch.measure.saved import machine_profile
from moebatch.plan.machine import detect_machine
from moebatch.rows.parse import parse_row
from moebatch.rows.prepare import Preparation, prepare, row_rules
from moebatch.rows.source import first_rows, open_source
from moebatch.spec.job import Job, load_job
from moebatch.spec.workload import Workload

MOST_FAULTS = 10_000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a check has found."""

    faults: tuple[Fault, ...]
    """In the order: job file, output, model, input."""
    num_rows: int
    num_bad_rows: int
    num_unlisted: int = 0
    """Bad rows beyond those that the faults are about."""
    exit_code: ExitCode
    """That with which a run would end."""
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `moebatch check --json` prints it."""
        return {
            "exit_code": int(self.exit_code),
            "rows": self.num_rows,
            "bad_rows": self.num_bad_rows,
            "faults": [asdict(fault) for fault in self.faults],
            "warnings": list(self.warnings),
        }


class _Collector:
    """Runs one part of the check after the other and keeps what each complains about."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.exit_code = ExitCode.OK

    def attempt(self, action: Callable[[], T], file: str) -> T | None:
        """What `action` returns, or None after noting why it failed."""
        try:
            return action()
        except FaultyFile as error:
            self.add(list(error.faults), error.exit_code)
        except MoebatchError as error:
            self.add(
                [Fault(file=file, message=str(error).removeprefix(f"{file}: "))], error.exit_code
            )
        return None

    def passes(self, action: Callable[[], object], file: str) -> bool:
        """Whether `action` finds nothing wrong; what it finds is noted."""
        num_faults = len(self.faults)
        self.attempt(action, file)
        return len(self.faults) == num_faults

    def add(self, faults: Sequence[Fault], exit_code: ExitCode) -> None:
        """Notes faults. The first of them decides over the exit code, as it would end a run; bad
        rows do not, so they only decide where there is nothing else."""
        self.faults += faults
        if faults and self.exit_code in (ExitCode.OK, ExitCode.ROWS_FAILED):
            self.exit_code = exit_code


def check_job(
    path: Path,
    *,
    checksums: Callable[[int], None] | None = None,
    is_exact: bool = False,
    limit: int | None = None,
) -> Findings:
    """Validates job file, output, model folder and every row of the input, or its first ones up to
    a `limit`; the bytes of all weights if `checksums` wants to be told how many have been read; and
    that nothing changes answers if they are to be exact. Raises nothing that a user could cause:
    all of it is in the findings."""
    found = _Collector()
    job = found.attempt(lambda: load_job(path), str(path))
    if job is None:
        return Findings(
            faults=tuple(found.faults), num_rows=0, num_bad_rows=0, exit_code=found.exit_code
        )
    if is_exact:
        found.attempt(lambda: require_exact(job), str(path))
    has_output = found.passes(lambda: require_writable(job), str(path))
    found.attempt(lambda: require_within_machine(job, detect_machine()), str(path))
    has_device = found.passes(lambda: known_device(job), str(path))
    folder = str(job.model.path)
    files = found.attempt(lambda: open_model(job.model.path, job.model.dtype), folder)
    no_sums = found.attempt(lambda: _require_bytes(files, checksums), folder) if files else None
    preparation = found.attempt(lambda: _prepare(job, files), folder) if files else None
    hints = found.attempt(lambda: load_hints(job, files), folder) if files else None
    approximation = found.attempt(lambda: load_approximation(job, files), folder) if files else None
    counted = found.attempt(lambda: _scan(job, preparation, limit), str(job.input.path))
    if counted is not None:
        _check_rows(found, job, preparation, counted)
        if files and approximation and has_output:
            manifest = manifest_of(job, files, approximation)
            found.attempt(lambda: _require_own(job, manifest), str(path))
        workload = counted.workload
        if files and workload and has_device:
            found.attempt(lambda: _plan(job, files, workload, hints), str(path))
    return Findings(
        faults=tuple(found.faults),
        num_rows=counted.num_rows if counted else 0,
        num_bad_rows=counted.num_bad_rows if counted else 0,
        num_unlisted=counted.num_unlisted if counted else 0,
        exit_code=found.exit_code,
        warnings=(
            *(preparation.warnings if preparation else ()),
            *(hints.warnings if hints else ()),
            *(files.warnings if files else ()),
            *(no_sums or ()),
            *(prompts_without_template(counted, preparation) if counted and preparation else ()),
        ),
    )


def _check_rows(
    found: _Collector, job: Job, preparation: Preparation | None, counted: InputSummary
) -> None:
    found.add(counted.whole, ExitCode.INPUT)
    every_row = job.input.on_bad_row == "fail"
    found.add(counted.faults, ExitCode.INPUT if every_row else ExitCode.ROWS_FAILED)
    if preparation and counted.first_chat is not None:
        place, tokenizer = counted.first_chat.place, preparation.reader.tokenizer
        found.attempt(lambda: tokenizer.require_chat_template(place), str(job.model.path))


def _require_bytes(files: ModelFiles, told: Callable[[int], None] | None) -> list[str]:
    """What the user should know of files without a checksum. Raises CheckpointError."""
    if told is None:
        return []
    folder, weights = files.checkpoint.folder, files.checkpoint.files
    known = known_checksums(folder, weights)
    require_checksums(known, weights, told)
    unknown = sorted(weights.keys() - known.keys())
    if not unknown:
        return []
    named = f"{unknown[0]}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}"
    return [f"{folder}: no checksum is known of {named}; {SUMS_NAME} beside them may list them"]


def _require_own(job: Job, manifest: Manifest) -> None:
    require_own(manifest, job.output.path, open_source(job.input.path))


def _plan(job: Job, files: ModelFiles, workload: Workload, hints: Hints | None) -> None:
    """Whether anything fits does not depend on how fast the machine is."""
    machine = job_machine(job, machine_profile)
    problem = job_problem(job, files, workload, machine.hardware(), machine.kind)
    plan_job(problem, wishes=hints.wishes if hints else None)


def _prepare(job: Job, files: ModelFiles) -> Preparation:
    return prepare(job, vocab_size=files.shape.vocab_size, max_positions=files.shape.max_positions)


def _scan(job: Job, preparation: Preparation | None, limit: int | None) -> InputSummary:
    """With a usable model every prompt is tokenised; without one rows are only parsed."""
    source, rules = first_rows(open_source(job.input.path), limit), row_rules(job)
    if preparation is not None:
        return scan(source, preparation.reader.request, rules=rules, most_faults=MOST_FAULTS)
    return scan(source, lambda raw: parse_row(raw, rules), rules=rules, most_faults=MOST_FAULTS)
