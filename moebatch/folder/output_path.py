"""Whether the output can be written, asked before anything is computed."""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from moebatch.errors import ConfigError, Fault, StorageError
from moebatch.folder.run_folder import RunFolder
from moebatch.journal.files import NUM_ADDED
from moebatch.spec.files.text_file import is_read_only, is_same_file
from moebatch.spec.job import Job

_OTHER_FORMATS = frozenset({".parquet", ".csv", ".zst", ".bz2", ".xz", ".zip"})


def require_writable(job: Job) -> None:
    """Raises ConfigError with everything that stands in the way of the output files."""
    faults = list(_faults(job))
    if faults:
        raise ConfigError(faults)


def require_no_fewer(job: Job, limit: int | None) -> None:
    """Raises ConfigError if the output has more rows already than a run up to a `limit` would
    leave there."""
    if limit is None:
        return
    outputs = [path for path in (job.output.path, job.output.errors) if path]
    num_rows = sum(map(_num_lines, outputs))
    if num_rows > limit:
        message = (
            f"{job.output.path} has the answers of {num_rows} rows, and would be left with "
            f"{limit}; leave --limit out, or move that file away"
        )
        raise ConfigError.at("moebatch run", message, where="--limit")


def _num_lines(path: Path) -> int:
    try:
        opened = gzip.open if path.suffix.lower() == ".gz" else open
        with opened(path, "rb") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:
        return 0
    except (OSError, EOFError, zlib.error) as error:
        raise StorageError(f"{path}: reading failed: {error}") from error


def _faults(job: Job) -> Iterator[Fault]:
    taken = {"input.path": job.input.path, "model.path": job.model.path}
    outputs = {"output.path": job.output.path, "output.errors": job.output.errors}
    for where, path in outputs.items():
        if path is None:
            continue
        same = next((other for other, theirs in taken.items() if is_same_file(path, theirs)), None)
        message = f"is the same as {same}; choose another" if same else _obstacle(path)
        message = message or _in_run_folder(path, RunFolder(job.output.path).path)
        if message:
            yield Fault(file=str(path), where=where, message=message)
        taken[where] = path


def _obstacle(path: Path) -> str | None:
    try:
        folder = path.resolve().parent
    except RuntimeError:
        return "is a link that leads back to itself"
    if path.is_dir():
        return "is a folder; give the path of a file"
    if path.exists() and not path.is_file():
        return "is no regular file; answers are written to a file and then put in its place"
    if path.suffix.lower() in _OTHER_FORMATS:
        return f"{path.suffix} is not written; use .jsonl or .jsonl.gz"
    if not folder.exists():
        return f"the folder {folder} does not exist; make it first"
    if not folder.is_dir():
        return f"{folder} is no folder"
    longest = os.pathconf(folder, "PC_NAME_MAX") - NUM_ADDED
    if len(os.fsencode(path.resolve().name)) > longest:
        return f"the name of the file has more than {longest} bytes; choose a shorter one"
    if is_read_only(folder):
        return f"the folder {folder} is on a file system that is read-only"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written to; check its permissions"
    return None


def _in_run_folder(path: Path, run_folder: Path) -> str | None:
    """Whether the run folder, which need not be there yet, is or holds what `path` names."""
    target = path.resolve()
    if run_folder not in (target, *target.parents):
        return None
    return f"lies in {run_folder}, which is for what the job keeps; choose another"
