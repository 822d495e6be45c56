"""Files that a command writes: whole or not at all."""

import tempfile
from pathlib import Path

from moebatch.errors import StorageError

_MODE = 0o644


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
    with tempfile.NamedTemporaryFile(
        prefix=f".{path.name}-", dir=path.parent, delete=False
    ) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            temporary.chmod(_MODE)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
