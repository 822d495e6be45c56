"""The output of a job: its rows put in the order of the input, when all of them have ended."""

import gzip
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from moebatch.errors import InputError
from moebatch.folder.duplicates import Duplicates
from moebatch.folder.results import Answered
from moebatch.folder.row_key import RowKeys
from moebatch.journal.files import Files, NewFile, replacing, storage_errors
from moebatch.journal.finished import Finished
from moebatch.rows.row import RawRow, Source, no_rows


class _Writable(Protocol):
    def write(self, data: bytes, /) -> int: ...


class RowsMissing(Exception):
    """Not all rows have ended."""

    def __init__(self, missing: list[RawRow], num_missing: int) -> None:
        super().__init__(f"{num_missing} rows have not ended")
        self.missing = missing
        """The first ones."""
        self.num_missing = num_missing


class FinalFile:
    """Replaces the output in one step: there is either the old one or all of the new one."""

    def __init__(
        self,
        path: Path,
        keys: RowKeys,
        *,
        errors: Path | None = None,
        files: Files | None = None,
    ) -> None:
        """Of the job whose rows have these `keys`. Failed rows go to `errors` if that is given,
        instead of among the answers."""
        self._keys = keys
        self._path = path.resolve()
        self._errors = None if errors is None else errors.resolve()
        self._files = files or Files()

    def write(
        self,
        source: Source,
        finished: Finished,
        duplicates: Duplicates,
        claimed: AbstractContextManager[None] | None = None,
    ) -> tuple[int, int]:
        """Writes what journals say of the rows of an input with these `duplicates`; returns how
        many there are, and how many of them failed. The files are `claimed` while they are written,
        and not before it is known that they will be.

        Raises RowsMissing before anything is touched, StorageError if the disk is full or fails,
        and InputError if the input is damaged or holds no rows any more.
        """
        places, states = _ended(source, Answered(finished, self._keys), duplicates)
        if not states:
            raise InputError([no_rows(str(source.path))])
        with claimed or nullcontext(), storage_errors(self._path):
            if self._errors is not None:
                self._replace(self._errors, _chosen(places, states, failed=True), finished)
                self._replace(self._path, _chosen(places, states, failed=False), finished)
            else:
                self._replace(self._path, iter(places), finished)
        return len(states), sum(states)

    def _replace(self, path: Path, places: Iterator[int], finished: Finished) -> None:
        with replacing(self._files, path) as file, _compressed(file, path) as stream:
            for place in places:
                stream.write(finished.line(place) + b"\n")


def _ended(
    source: Source, answered: Answered, duplicates: Duplicates
) -> tuple["array[int]", bytearray]:
    """Where the record of each row is, and whether it failed; in nine bytes per row."""
    places, states = array("q"), bytearray()
    missing: list[RawRow] = []
    num_missing = 0
    for raw in source:
        found = answered.of(raw, is_duplicate=duplicates.error_of(raw) is not None)
        if found is None or found.state == "part":
            num_missing += 1
            if len(missing) < 3:
                missing.append(raw)
            continue
        places.append(found.place)
        states.append(found.state == "fail")
    if num_missing:
        raise RowsMissing(missing, num_missing)
    return places, states


def _chosen(places: "array[int]", states: bytearray, *, failed: bool) -> Iterator[int]:
    return (place for place, state in zip(places, states, strict=True) if bool(state) == failed)


@contextmanager
def _compressed(file: NewFile, path: Path) -> Iterator[_Writable]:
    if path.suffix.lower() != ".gz":
        yield file
        return
    # Neither name nor time, so that a re-run has the same bytes.
    with gzip.GzipFile(
        filename="", fileobj=cast(BinaryIO, file), mode="wb", compresslevel=6, mtime=0
    ) as stream:
        yield stream
