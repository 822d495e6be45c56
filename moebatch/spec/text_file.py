"""Text files that a command writes: whole or not at all."""

import tempfile
from pathlib import Path

from moebatch.errors import StorageError


def write_text(path: Path, text: str) -> None:
    """Writes `text` beside `path` and renames it, so that no half file is left.

    Raises StorageError.
    """
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix=f".{path.name}-", dir=path.parent, delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        try:
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
