"""What earlier runs, and other ones, have made of the rows of an input."""

from moebatch.folder.row_key import RowKeys
from moebatch.journal.finished import Finished, Found
from moebatch.rows.raw import RawRow


class Answered:
    """Looks rows up in journals. An edited row is another row."""

    def __init__(self, finished: Finished, keys: RowKeys) -> None:
        self._finished = finished
        self._keys = keys

    def of(self, raw: RawRow) -> Found | None:
        """The best that is known of a row."""
        if not len(self._finished):
            return None
        pair = self._keys.pair(raw)
        return self._finished.find(pair.own) or self._finished.find(pair.placed)
