"""Parquet files and saved datasets as streams of raw rows, a few at a time."""

import base64
import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from moebatch.errors import InputError, MoebatchError, StorageError
from moebatch.journal.files import Stamp, stamp_of
from moebatch.quoting import reason, shown
from moebatch.rows.lines import CHANGED
from moebatch.rows.row import Base64, RawRow, require_different
from moebatch.spec.files.json_file import read_json

_ROWS_AT_ONCE = 64
"""Rows that are Python objects at the same time."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""With which writers end an Arrow stream. Readers take a file that is cut short between two batches
for a whole one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """Rows of a table, as its batches have them."""

    path: Path
    batches: Callable[[Path], Iterable[Any]]
    stamps: tuple[Stamp, ...]
    """What `stamps_of` said when the source was opened."""

    def __iter__(self) -> Iterator[RawRow]:
        """The rows; raises InputError if the file or folder is damaged or has changed."""
        return _raw_rows(self.path, self._batches())

    def _batches(self) -> Iterator[Any]:
        if stamps_of(self.path) != self.stamps:
            raise InputError.at(self.path, CHANGED)
        yield from self.batches(self.path)


def stamps_of(path: Path) -> tuple[Stamp, ...]:
    """Those of a file, or of the files of a saved dataset. Raises OSError."""
    files = [path / "state.json", *sorted(path.glob("*.arrow"))] if path.is_dir() else [path]
    return tuple(stamp_of(file.stat()) for file in files)


def parquet_batches(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    # Checksums of pages, which not all writers write, are not compared otherwise.
    opened = pyarrow.parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)
    with opened as file:
        yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False)


def dataset_batches(folder: Path) -> Iterator[Any]:
    """Those of a folder written by ``datasets.Dataset.save_to_disk``, read without datasets."""
    import pyarrow

    for file in _arrow_files(folder):
        with pyarrow.OSFile(str(file)) as data, pyarrow.ipc.open_stream(data) as batches:
            yield from batches
            data.seek(max(0, data.size() - len(_END_OF_STREAM)))
            if data.read() != _END_OF_STREAM:
                raise InputError.at(
                    folder, f"{shown(file.name)} is truncated: its stream has no end"
                )


def _arrow_files(folder: Path) -> list[Path]:
    try:
        state = read_json(folder / "state.json")
        if state.get("_indices_data_files"):
            raise InputError.at(folder, "has an indices mapping; flatten_indices() and save again")
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise InputError.at(folder, "state.json does not name the files of a dataset") from None
    for name in names:
        # A name with a path in it could make us read any file of the machine.
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError.at(
                folder, f"state.json names a file outside the folder: {shown(name)}"
            )
        if (folder / name).exists() and not (folder / name).is_file():
            raise InputError.at(folder, f"{shown(name)} is no regular file")
    return [folder / name for name in names]


def _raw_rows(path: Path, batches: Iterable[Any]) -> Iterator[RawRow]:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InputError.at(
            path, "reading it needs pyarrow; install it, or save as .jsonl"
        ) from None
    index = 0
    try:
        for batch in batches:
            require_different(path, batch.schema.names)
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for columns in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                    yield RawRow(index=index, line=None, content=_plain(columns))
                    index += 1
    except FileNotFoundError as error:
        raise InputError.at(path, f"a file is missing: {error.filename or error}") from None
    except MoebatchError:
        raise
    except Exception as error:  # Damaged files, and values beyond Python's, raise anything.
        if isinstance(error, OSError) and error.errno is not None:
            message = f"reading failed behind row {index}: {error.strerror}"
            raise StorageError(f"{path}: {message}") from error
        message = f"the data cannot be read behind row {index}: {reason(error)}"
        raise InputError.at(path, message) from None


def _plain(value: Any) -> Any:
    """What JSON can hold: times as ISO text, bytes as base64, NaN and infinity as null."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case bytes():
            return Base64(base64.b64encode(value).decode("ascii"))
        case Decimal():
            return str(value)
    return str(value)
