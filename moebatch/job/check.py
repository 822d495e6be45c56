"""Everything that can be known to be wrong with a job before it runs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from moebatch.checkpoint.checksums import SUMS_NAME, known_checksums, require_checksums
from moebatch.checkpoint.inventory import Inventory
from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.errors import ExitCode, Fault, FaultyFile, MoebatchError
from moebatch.folder.output_path import require_no_fewer, require_writable
from moebatch.job.hints import Hints
from moebatch.job.limits import require_within_machine
from moebatch.job.machine import job_machine, known_device, rough_profile
from moebatch.job.notices import seldom_meant
from moebatch.job.opened import OpenedJob, require_exact
from moebatch.job.options import CheckOptions
from moebatch.job.planning import job_problem, plan_job
from moebatch.job.scan import Asked, InputSummary, Read, scan
from moebatch.model.native import loader
from moebatch.model.rope import Rope
from moebatch.rows.parse import parse_row
from moebatch.rows.prompts import RowReader, row_rules
from moebatch.spec.job import Job, load_job
from moebatch.spec.workload import Workload
from moebatch.store.examination import examine

_MOST_FAULTS = 10_000
T = TypeVar("T")
_USUAL = CheckOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a check has found."""

    faults: tuple[Fault, ...]
    """In the order in which a run would come upon them."""
    num_rows: int
    num_bad_rows: int
    num_unlisted: int = 0
    """Bad rows beyond those that the faults are about."""
    exit_code: ExitCode
    """That with which a run would end."""
    warnings: tuple[str, ...] = ()
    weights: Inventory | None = None
    """Of a model folder that could be opened."""

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `moebatch check --json` prints it."""
        return {
            "exit_code": int(self.exit_code),
            "rows": self.num_rows,
            "bad_rows": self.num_bad_rows,
            "faults": [asdict(fault) for fault in self.faults],
            "warnings": list(self.warnings),
            "weights": self.weights.as_json() if self.weights else None,
        }


class _Collector:
    """Runs one part of the check after the other and keeps what each complains about."""

    def __init__(self) -> None:
        self.faults: dict[Fault, None] = {}
        """In order, each once: what several parts need fails in each of them."""
        self.exit_code = ExitCode.OK

    def attempt(self, action: Callable[[], T], file: str, is_possible: bool = True) -> T | None:
        """What `action` returns; None after noting why it failed, or where it is not possible
        after what was noted before."""
        if not is_possible:
            return None
        try:
            return action()
        except FaultyFile as error:
            self.add(list(error.faults), error.exit_code)
        except MoebatchError as error:
            self.add([_fault(error, file)], error.exit_code)
        return None

    def passes(self, action: Callable[[], object], file: str) -> bool:
        """Whether `action` finds nothing wrong; what it finds is noted."""

        def passed() -> bool:
            action()
            return True

        return self.attempt(passed, file) is not None

    def findings(
        self,
        counted: InputSummary | None = None,
        warnings: tuple[str, ...] = (),
        files: ModelFiles | None = None,
    ) -> Findings:
        """What has been noted, with the figures of an input that was looked at, and of a model that
        could be opened."""
        return Findings(
            faults=tuple(self.faults),
            num_rows=counted.num_rows if counted else 0,
            num_bad_rows=counted.num_bad_rows if counted else 0,
            num_unlisted=counted.num_unlisted if counted else 0,
            exit_code=self.exit_code,
            warnings=warnings,
            weights=Inventory.of(files) if files else None,
        )

    def add(self, faults: Sequence[Fault], exit_code: ExitCode) -> None:
        """Notes faults. The first of them decides over the exit code, as it would end a run; bad
        rows do not, so they only decide where there is nothing else."""
        self.faults |= dict.fromkeys(faults)
        if faults and self.exit_code in (ExitCode.OK, ExitCode.ROWS_FAILED):
            self.exit_code = exit_code


def _fault(error: MoebatchError, file: str) -> Fault:
    """What is wrong with `file`, or with what lies in it where the message begins with that."""
    named, colon, message = str(error).partition(": ")
    if colon and f"{named}/".startswith(f"{Path(file).absolute()}/"):
        return Fault(file=named, message=message)
    return Fault(file=file, message=str(error).removeprefix(f"{file}: "))


def check_job(
    path: Path,
    options: CheckOptions = _USUAL,
    *,
    checksums: Callable[[int], None] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Validates job file, output, model folder, a sample of its weights, and every row of the
    input, or the first ones; that nothing changes answers if they are to be exact; and the bytes
    of all weights if there is `checksums`, which gets how many more have been read. `log` gets what
    takes time. A model in the place of a job file is checked by itself. Raises nothing that a user
    could cause, but OSError for a name that is too long or hidden: all else is in the findings.

    Looks in the order of a run, so that the first fault is the one that a run would end with."""
    found = _Collector()
    if not path.exists():
        message = "there is no such job file, model folder or GGUF file"
        found.add([Fault(file=str(path), message=message)], ExitCode.CONFIG)
        return found.findings()
    if path.is_dir() or path.suffix == ".gguf":
        return _check_model(found, path, options, checksums)
    job = found.attempt(lambda: load_job(path), str(path))
    if job is None:
        return found.findings()
    opened = OpenedJob(job, limit=options.limit)
    has_output = found.passes(lambda: require_writable(job), str(path))
    found.attempt(lambda: require_within_machine(job), str(path))
    has_device = found.passes(lambda: known_device(job), str(path))
    if options.is_exact:
        found.attempt(lambda: require_exact(job), str(path))
    folder, rows = str(job.model.path), str(job.input.path)
    has_files = found.passes(lambda: opened.files, folder)
    has_gating = has_files and found.passes(lambda: opened.approximation, folder)
    is_known = has_gating and found.passes(lambda: opened.manifest, folder)
    has_input = found.passes(lambda: opened.source, rows)
    is_ready = is_known and has_input and has_output
    found.attempt(opened.require_own_output, str(path), is_ready)
    found.attempt(lambda: require_no_fewer(job, options.limit), str(path), has_output)
    reader = found.attempt(lambda: opened.reader, folder, has_files)
    counted = found.attempt(lambda: _scan(opened, reader), rows, has_input)
    if counted is not None:
        _check_rows(found, job, reader, counted)
    hints = found.attempt(lambda: opened.hints, folder, has_files)
    has_positions = has_files and found.passes(lambda: _require_positions(opened.files), folder)
    workload = counted.workload if counted else None
    if workload is not None and has_positions and has_device:
        loader.log_compiling(log)
        found.attempt(lambda: _plan(opened, workload, hints), str(path))
    of_weights = _check_weights(found, opened.files, folder, checksums) if has_files else ()
    warnings = (
        *(reader.warnings if reader else ()),
        *(hints.warnings if hints else ()),
        *of_weights,
        *(seldom_meant(counted, reader) if counted and reader else ()),
    )
    return found.findings(counted, warnings, opened.files if has_files else None)


def _check_model(
    found: _Collector, path: Path, options: CheckOptions, checksums: Callable[[int], None] | None
) -> Findings:
    """What holds of a model whatever the job."""
    if options != _USUAL:
        fault = Fault(
            file=str(path),
            message="a model has no rows and no answers: --limit and --exact are for job files",
        )
        found.add([fault], ExitCode.CONFIG)
    files = found.attempt(lambda: open_model(path, "auto"), str(path))
    warnings: tuple[str, ...] = ()
    if files is not None:
        found.attempt(lambda: _require_positions(files), str(path))
        warnings = _check_weights(found, files, str(path), checksums)
    return found.findings(None, warnings, files)


def _require_positions(files: ModelFiles) -> None:
    """Raises CheckpointError for a way to count positions that no run can compute, which only a run
    and its plan look at otherwise."""
    if not files.shape.encoder:
        Rope.of_model(files)


def _check_weights(
    found: _Collector, files: ModelFiles, folder: str, checksums: Callable[[int], None] | None
) -> tuple[str, ...]:
    """Notes what is wrong with the weights of a model; returns what is suspicious."""
    examined = found.attempt(lambda: examine(files), folder)
    found.add(examined.faults if examined else (), ExitCode.CHECKPOINT)
    no_sums = found.attempt(lambda: _require_bytes(files, checksums), folder)
    suspicions = map(str, examined.suspicions) if examined else ()
    return *files.warnings, *suspicions, *(no_sums or ())


def _check_rows(
    found: _Collector, job: Job, reader: RowReader | None, counted: InputSummary
) -> None:
    found.add(counted.whole, ExitCode.INPUT)
    every_row = job.input.on_bad_row == "fail"
    found.add(counted.faults, ExitCode.INPUT if every_row else ExitCode.ROWS_FAILED)
    if reader and counted.first_chat is not None:
        place, tokenizer = counted.first_chat.place, reader.tokenizer
        found.attempt(lambda: tokenizer.require_chat_template(place), str(job.model.path))


def _require_bytes(files: ModelFiles, count: Callable[[int], None] | None) -> list[str]:
    """What the user should know of files without a checksum. Raises CheckpointError."""
    if count is None:
        return []
    folder, weights = files.checkpoint.folder, files.checkpoint.files
    known = known_checksums(folder, weights)
    require_checksums(known, weights, count)
    unknown = sorted(weights.keys() - known.keys())
    if not unknown:
        return []
    named = f"{unknown[0]}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}"
    return [f"{folder}: no checksum is known of {named}; {SUMS_NAME} beside them may list them"]


def _plan(opened: OpenedJob, workload: Workload, hints: Hints | None) -> None:
    """Whether anything fits does not depend on how fast the machine is."""
    job, machine = opened.job, job_machine(opened.job, lambda: rough_profile(opened.job))
    problem = job_problem(job, opened.files, workload, machine.hardware(), machine.kind)
    plan_job(problem, wishes=hints.wishes if hints else None)


def _scan(opened: OpenedJob, reader: RowReader | None) -> InputSummary:
    """With a usable model every prompt is tokenised; without one rows are only parsed."""
    rules = row_rules(opened.job)
    read: Read = reader.request if reader else lambda raw: parse_row(raw, rules)
    return scan(opened.source, read, Asked(rules=rules, most_faults=_MOST_FAULTS))
