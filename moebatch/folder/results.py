"""Rows as they end: journalled at once, and looked up by later runs and by others."""

from dataclasses import replace

from pydantic import ConfigDict, TypeAdapter

from moebatch.folder.row_key import RowKeys, name_hash
from moebatch.journal.finished import Finished, Found
from moebatch.journal.record import Record, State
from moebatch.journal.writer import JournalWriter
from moebatch.rows.row import FailedRow, RawRow, ReadyRow, Row
from moebatch.spec.request import Begun


class Answered:
    """Looks rows up in journals. An edited row is another row."""

    def __init__(self, finished: Finished, keys: RowKeys) -> None:
        self._finished = finished
        self._keys = keys

    def of(self, raw: RawRow, *, is_duplicate: bool = False) -> Found | None:
        """The best that is known of a row; of one with the name of an earlier row, what is known
        of it as such."""
        if not len(self._finished):
            return None
        keys = self._keys.all_of(raw)
        if is_duplicate:
            return self._finished.find(keys.duplicate)
        return self._finished.find(keys.own) or self._finished.find(keys.placed)


class Results:
    """What earlier runs have left, and the journal of this one."""

    def __init__(self, before: Finished, journal: JournalWriter, keys: RowKeys) -> None:
        self.answered = Answered(before, keys)
        self.keys = keys
        """Of the rows of the job."""
        self._before = before
        self._journal = journal

    def resumed(self, raw: RawRow, item: ReadyRow | FailedRow) -> ReadyRow | FailedRow:
        """A row with what an earlier run has generated for it. Raises StorageError."""
        found = self.answered.of(raw)
        if isinstance(item, FailedRow) or found is None or found.state != "part":
            return item
        begun = begun_from(self._before.line(found.place), num_choices=item.request.sampling.n)
        return replace(item, request=replace(item.request, begun=begun))

    def add(self, key: bytes, row: Row, line: bytes, *, failed: bool) -> None:
        """Keeps one row that has ended: its line of the output, without newline.

        Raises StorageError if the disk is full or fails.
        """
        self._journal.add(_record(key, row, "fail" if failed else "done", line))

    def keep(self, key: bytes, row: Row, begun: tuple[Begun, ...]) -> None:
        """Keeps what there is of a row that has not ended. Raises StorageError."""
        self._journal.add(_record(key, row, "part", _BEGUN.dump_json(begun)))


def _record(key: bytes, row: Row, state: State, line: bytes) -> Record:
    return Record(key, name_hash(row.custom_id), state, line)


_BEGUN = TypeAdapter(
    tuple[Begun, ...], config=ConfigDict(strict=True, ser_json_inf_nan="constants")
)
"""Answers that were cut off, as a line of a journal; numbers come back to the last bit."""


def begun_from(line: bytes, *, num_choices: int) -> tuple[Begun, ...]:
    """The choices of a line; nothing if they are not those of a request with so many, or none."""
    try:
        choices = _BEGUN.validate_json(line)
    except ValueError:
        return ()
    return choices if len(choices) == num_choices else ()
