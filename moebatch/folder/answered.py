"""What earlier runs, and other ones, have made of the rows of an input."""

from moebatch.folder.row_key import RowKeys
from moebatch.journal.finished import Finished, Found
from moebatch.rows.raw import RawRow


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

    def name_of(self, raw: RawRow) -> int:
        """The hash of a row's name, 0 if it has none or nothing is known of the row."""
        found = self.of(raw) or self.of(raw, is_duplicate=True)
        return found.name if found else 0
