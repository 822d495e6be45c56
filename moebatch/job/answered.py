"""What earlier runs, and other ones, have made of the rows of an input."""

from moebatch.job.raw import RawRow
from moebatch.job.row_key import RowKeys, keys_of
from moebatch.journal.finished import Finished, Found


class Answered:
    """Looks rows up in journals. An edited row is another row."""

    def __init__(self, finished: Finished) -> None:
        self._finished = finished

    def of(self, raw: RawRow) -> Found | None:
        """The best that is known of a row."""
        return self._best(keys_of(raw)) if len(self._finished) else None

    def _best(self, keys: RowKeys) -> Found | None:
        return self._finished.find(keys.own) or self._finished.find(keys.placed)
