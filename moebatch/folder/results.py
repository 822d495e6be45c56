"""Rows as they end: journalled at once, looked up when the job is run again."""

from dataclasses import replace

from moebatch.folder.answered import Answered
from moebatch.folder.begun import begun_from, begun_line
from moebatch.folder.row_key import RowKeys, name_hash
from moebatch.journal.finished import Finished
from moebatch.journal.record import Record, State
from moebatch.journal.writer import JournalWriter
from moebatch.rows.raw import RawRow
from moebatch.rows.row import FailedRow, ReadyRow, Row
from moebatch.spec.request import Begun


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
        self._journal.add(_record(key, row, "part", begun_line(begun)))


def _record(key: bytes, row: Row, state: State, line: bytes) -> Record:
    return Record(key, name_hash(row.custom_id), state, line)
