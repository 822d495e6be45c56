"""Whether the output can be written, asked before anything is computed."""

import os
from collections.abc import Iterator
from pathlib import Path

from moebatch.errors import ConfigError, Fault
from moebatch.spec.job import Job

_OTHER_FORMATS = frozenset({".parquet", ".csv", ".zst", ".bz2", ".xz", ".zip"})


def require_writable(job: Job) -> None:
    """Raises ConfigError with everything that stands in the way of the output files."""
    faults = list(_faults(job))
    if faults:
        raise ConfigError(faults)


def _faults(job: Job) -> Iterator[Fault]:
    taken = {"input.path": job.input.path, "model.path": job.model.path}
    outputs = {"output.path": job.output.path, "output.errors": job.output.errors}
    for where, path in outputs.items():
        if path is None:
            continue
        same = next((other for other, theirs in taken.items() if _same(path, theirs)), None)
        message = f"is the same as {same}; choose another" if same else _obstacle(path)
        if message:
            yield Fault(file=str(path), where=where, message=message)
        taken[where] = path


def _obstacle(path: Path) -> str | None:
    folder = path.resolve().parent
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
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written to; check its permissions"
    return None


def _same(path: Path, other: Path) -> bool:
    try:
        return path.resolve() == other.resolve() or path.samefile(other)
    except OSError:
        return False
