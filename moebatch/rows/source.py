"""Recognises what kind of input a path holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from moebatch.errors import InputError
from moebatch.journal.files import stamp_of
from moebatch.quoting import system_reason
from moebatch.rows.lines import LineSource, json_rows
from moebatch.rows.row import RawRow, Source
from moebatch.rows.separated import SUFFIXES, separated_rows
from moebatch.rows.tables import TableSource, dataset_batches, parquet_batches, stamps_of
from moebatch.spec.files.json_file import read_json

SUPPORTED = (
    "JSON lines (.jsonl), .csv and .tsv, each also with .gz or .zst behind; .parquet; and folders "
    "saved by datasets"
)
_OTHER_SUFFIXES = frozenset({".txt", ".xls", ".xlsx", ".yaml", ".yml", ".zip", ".bz2", ".xz"})
_PARQUET_MAGIC = b"PAR1"


def open_source(path: Path) -> Source:
    """Recognises what a path holds, by content before name. Reads nothing but a few bytes.

    Raises InputError if there is nothing to read or its kind is not supported.
    """
    with _readable(path):
        if path.is_dir():
            return _saved_dataset(path)
        head = _head(path)
    if head.startswith(_PARQUET_MAGIC):
        return TableSource(path=path, batches=parquet_batches, stamps=stamps_of(path))
    if path.suffix.lower() == ".parquet":
        raise InputError.at(path, "is not a parquet file although its name says so")
    if path.suffix.lower() in _OTHER_SUFFIXES:
        raise InputError.at(
            path, f"{path.suffix} files are not supported; supported are {SUPPORTED}"
        )
    usual = SUFFIXES.get(_kind_suffix(path))
    rows = partial(separated_rows, usual=usual) if usual else json_rows
    return LineSource(path=path, rows=rows, stamp=stamp_of(path.stat()))


class FirstRows:
    """An input of which only the first rows are looked at."""

    def __init__(self, source: Source, most_rows: int) -> None:
        self.has_more = False
        """Whether there are others, as far as it has been read."""
        self._source = source
        self._most_rows = most_rows

    @property
    def path(self) -> Path:
        """That of the whole input."""
        return self._source.path

    def __iter__(self) -> Iterator[RawRow]:
        """The rows in order. Raises InputError."""
        for raw in self._source:
            if raw.index >= self._most_rows:
                self.has_more = True
                return
            yield raw


def first_rows(source: Source, limit: int | None) -> Source:
    """At most so many rows, or all."""
    return source if limit is None else FirstRows(source, limit)


def _kind_suffix(path: Path) -> str:
    """That of the name, but for that of a compression."""
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    return Path(name).suffix


def _head(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise InputError.at(
            path, "is no regular file; rows are read more than once, so save it first"
        )
    with path.open("rb") as file:
        return file.read(len(_PARQUET_MAGIC))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """While the block runs, a path that cannot be read is an InputError."""
    try:
        yield
    except FileNotFoundError:
        raise InputError.at(path, "no such file; check input.path in the job file") from None
    except (OSError, ValueError) as error:
        raise InputError.at(path, f"cannot be read: {system_reason(error)}") from None


def _saved_dataset(path: Path) -> Source:
    if (path / "dataset_dict.json").is_file():
        splits = _splits(path / "dataset_dict.json")
        choice = f"; choose one, such as {path / splits[0]}" if splits else ""
        raise InputError.at(path, f"holds several splits ({', '.join(splits)}){choice}")
    if not (path / "state.json").is_file():
        raise InputError.at(
            path, f"is a folder, but not one saved by datasets; supported are {SUPPORTED}"
        )
    return TableSource(path=path, batches=dataset_batches, stamps=stamps_of(path))


def _splits(file: Path) -> list[str]:
    try:
        splits = read_json(file)["splits"]
        return [str(split) for split in splits]
    except (OSError, ValueError, KeyError, TypeError):
        return []
