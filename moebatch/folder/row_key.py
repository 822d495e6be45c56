"""What tells one row of an input from another, between runs."""

import hashlib
import json
from typing import NamedTuple

from moebatch.rows.raw import RawRow
from moebatch.rows.row import Row
from moebatch.spec.request import RowError

KEY_BYTES = 16


class KeyPair(NamedTuple):
    """Of a row as it stands in the input: if any of it is edited, both change."""

    own: bytes
    """Of a row that has a name of its own, wherever it stands."""
    placed: bytes
    """Of a row that is named by its place: it is another row when lines are put in before it."""


class RowKeys:
    """Keys of the rows of one job. Another job has other keys for the same rows, so that what runs
    of both have left in one folder can never be mixed up."""

    def __init__(self, identity: bytes = b"") -> None:
        """`identity` is that of the job, at most 64 bytes."""
        self._identity = identity

    def pair(self, raw: RawRow) -> KeyPair:
        """16 bytes each, the same in every process."""
        own = hashlib.blake2b(_content(raw), digest_size=KEY_BYTES, key=self._identity)
        placed = own.copy()
        placed.update(b"\n%d" % raw.index)
        return KeyPair(own.digest(), placed.digest())

    def of(self, raw: RawRow, row: Row) -> bytes:
        """The one that holds for a row."""
        pair = self.pair(raw)
        return pair.own if row.is_named else pair.placed


def name_hash(custom_id: str) -> int:
    """64 bits of a name."""
    digest = hashlib.blake2b(custom_id.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _content(raw: RawRow) -> bytes:
    content = raw.content
    if isinstance(content, bytes):
        return content
    if isinstance(content, RowError):
        return content.message.encode("utf-8", "surrogatepass")
    return json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
