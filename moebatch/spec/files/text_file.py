"""Files that a command writes: whole or not at all."""

from pathlib import Path
from secrets import token_hex

from moebatch.errors import StorageError


def write_text(path: Path, text: str) -> None:
    """Writes `text` as `write_bytes` does, in UTF-8.

    Raises StorageError.
    """
    write_bytes(path, text.encode("utf-8", "replace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` beside `path` and renames it, so that no half file is left; links are
    followed, and what is no regular file, such as a pipe, is written to as it is.

    Raises StorageError.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{path}: cannot be written: {reason}") from error


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}-{token_hex(4)}")
    try:
        with temporary.open("xb") as file:  # with the rights that the user gives
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
