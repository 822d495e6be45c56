"""Rows as they end: journalled at once, looked up when the job is run again."""

from dataclasses import replace

from moebatch.job.answered import Answered
from moebatch.job.begun import begun_from, begun_line
from moebatch.job.raw import RawRow
from moebatch.job.row import Row
from moebatch.job.row_key import name_hash
from moebatch.journal.finished import Finished
from moebatch.journal.record import Record, State
from moebatch.journal.writer import JournalWriter
from moebatch.spec.request import Begun, Request


class Results:
    """What earlier runs have left, and the journal of this one."""

    def __init__(self, before: Finished, journal: JournalWriter) -> None:
        self.answered = Answered(before)
        self._before = before
        self._journal = journal

    def resumed(self, raw: RawRow, request: Request) -> Request:
        """The request with what an earlier run has generated for it. Raises StorageError."""
        found = self.answered.of(raw)
        if found is None or found.state != "part":
            return request
        line = self._before.line(found.place)
        return replace(request, begun=begun_from(line, num_choices=request.sampling.n))

    def add(self, key: bytes, row: Row, line: bytes, *, failed: bool) -> None:
        """Keeps one row that has ended: its line of the output, without newline.

        Raises StorageError if the disk is full or fails.
        """
        self._journal.add(_record(key, row, "fail" if failed else "done", line))

    def keep(self, key: bytes, row: Row, begun: tuple[Begun, ...]) -> None:
        """Keeps what there is of a row that has not ended. Raises StorageError."""
        self._journal.add(_record(key, row, "part", begun_line(begun)))


def _record(key: bytes, row: Row, state: State, line: bytes) -> Record:
    name = 0 if row.custom_id is None else name_hash(row.custom_id)
    return Record(key, name, state, line)
