"""What tells one row of an input from another, between runs."""

import hashlib
import json
from typing import NamedTuple

from moebatch.rows.row import RawRow, Row
from moebatch.spec.request import RowError

KEY_BYTES = 16


class Keys(NamedTuple):
    """Of a row as it stands in the input: if any of it is edited, all change."""

    own: bytes
    """Of a row that has a name of its own, wherever it stands."""
    placed: bytes
    """Of a row that is named by its place: it is another row when lines are put in before it."""
    duplicate: bytes
    """Of a row whose name an earlier row has already: that one may have the same content."""


class RowKeys:
    """Keys of the rows of one job. Another job has other keys for the same rows, so that what runs
    of both have left in one folder can never be mixed up."""

    def __init__(self, identity: bytes = b"") -> None:
        """`identity` is that of the job, at most 64 bytes."""
        self._identity = identity

    def all_of(self, raw: RawRow) -> Keys:
        """16 bytes each, the same in every process."""
        own = hashlib.blake2b(_content(raw), digest_size=KEY_BYTES, key=self._identity)
        placed = own.copy()
        # The line is its name, and blank ones count; without any, it is the one behind the index.
        placed.update(b"\n%d" % (raw.index if raw.line is None else raw.line - 1))
        duplicate = placed.copy()
        duplicate.update(b"\nduplicate")
        return Keys(own.digest(), placed.digest(), duplicate.digest())

    def of(self, raw: RawRow, row: Row, *, is_duplicate: bool = False) -> bytes:
        keys = self.all_of(raw)
        if is_duplicate:
            return keys.duplicate
        return keys.own if row.is_named else keys.placed


def name_hash(custom_id: str | None) -> int:
    """64 bits of a name, 0 if there is none."""
    if custom_id is None:
        return 0
    digest = hashlib.blake2b(custom_id.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _content(raw: RawRow) -> bytes:
    content = raw.content
    if isinstance(content, bytes):
        return content
    if isinstance(content, RowError):
        return content.message.encode("utf-8", "surrogatepass")
    return json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
