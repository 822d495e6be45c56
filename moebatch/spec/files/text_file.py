"""Files that a command writes: whole or not at all."""

import os
from pathlib import Path
from secrets import token_hex

from moebatch.errors import StorageError
from moebatch.quoting import system_reason

_NAME_BYTES = 4
"""Of the part of a draft's name that is by chance."""


def write_text(path: Path, text: str) -> None:
    """Writes `text` as `write_bytes` does, in UTF-8.

    Raises StorageError.
    """
    write_bytes(path, text.encode("utf-8", "replace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` beside `path` and renames it, so that no half file is left; links are
    followed, and what `is_no_regular_file` is written to as it is.

    Raises StorageError.
    """
    try:
        if is_no_regular_file(path):
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{path}: cannot be written: {system_reason(error)}") from error


def is_same_file(path: Path, other: Path) -> bool:
    """Whether both name one place, there or not, through whatever links."""
    try:
        return path.resolve() == other.resolve() or path.samefile(other)
    except (OSError, RuntimeError):  # a name that is too long, links in a circle
        return False


def is_no_regular_file(path: Path) -> bool:
    """Whether there is something at `path` that cannot be replaced, such as a pipe. It may have no
    other path: ``/dev/stdout`` of a pipeline is a link to a name that no folder has.

    Raises OSError where it is not allowed to look.
    """
    return path.exists() and not path.is_file()


def is_read_only(folder: Path) -> bool:
    """Whether nobody may write there, since the whole file system is read-only. Raises OSError."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def draft_of(path: Path) -> Path:
    """Where a file that is to replace `path` may be written: a name that no other process takes."""
    return path.with_name(f".{path.name}-{token_hex(_NAME_BYTES)}")


def remove_drafts(folder: Path) -> None:
    """Removes drafts that processes which were killed have left in `folder` and below,
    where nobody writes at the moment. Raises OSError."""
    for path in folder.rglob(f".*-{'[0-9a-f]' * 2 * _NAME_BYTES}"):
        path.unlink()


def _replace(path: Path, data: bytes) -> None:
    temporary = draft_of(path)
    try:
        with temporary.open("xb") as file:  # with the rights that the user gives
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
