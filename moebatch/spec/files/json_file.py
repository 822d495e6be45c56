"""JSON files of unknown origin: reading one ends soon, with its content or with an error."""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError, model_file_error
from moebatch.quoting import is_text, reason, shown
from moebatch.units import format_bytes

MOST_BYTES = 2**24
"""Of files that describe something; those of the largest models have some ten thousand."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the files begin that `git clone` leaves where Git LFS is not installed."""
NOT_FETCHED = "is a pointer of Git LFS and not the file itself, which `git lfs pull` fetches"


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """What a file holds. Raises OSError where it cannot be read, and ValueError, with a message to
    stand behind the path, where it is no regular file, longer than `most_bytes` or not JSON."""
    data = read_regular(path, most_bytes=most_bytes)
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("is not JSON: nested too deeply") from None
    except ValueError as error:
        is_pointer = data.startswith(LFS_POINTER)
        raise ValueError(NOT_FETCHED if is_pointer else f"is not JSON: {reason(error)}") from None
    # Halves of surrogate pairs are no text: nothing that holds them can be printed or hashed.
    if b"\\u" in data and not is_text(json.dumps(content, ensure_ascii=False)):
        raise ValueError("is not JSON: half of a surrogate pair, which is no character")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, as a hook of the json module makes it of its pairs. Raises ValueError where a key
    is given twice: readers would take one value or the other."""
    content = dict(pairs)
    if len(content) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(twice)} is given twice")
    return content


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """While the block runs, a file of a model that cannot be read is a `model_file_error`."""
    try:
        yield
    except OSError as error:
        raise model_file_error(error, f"{path}: cannot be read") from error


def read_of_model(path: Path, *, most_bytes: int) -> Any:
    """What a JSON file of a model folder holds. Raises CheckpointError, and as `readable` does."""
    try:
        with readable(path):
            return read_json(path, most_bytes=most_bytes)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_object(path: Path, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The object in such a file. Raises CheckpointError."""
    content = read_of_model(path, most_bytes=most_bytes)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {shown(content)}")
    return content


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """All bytes of a file. Raises as `read_json` does; never waits for the far end of a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no regular file")
        if status.st_size > most_bytes:
            raise ValueError(f"is longer than {format_bytes(most_bytes)}, the most that is read")
        return file.read()  # a number of bytes would be allocated, however short the file is
