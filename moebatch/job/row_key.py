"""What tells one row of an input from another, between runs."""

import hashlib
import json
from typing import NamedTuple

from moebatch.job.raw import RawRow
from moebatch.job.row import Row
from moebatch.spec.request import RowError

KEY_BYTES = 16


class RowKeys(NamedTuple):
    """Of a row as it stands in the input: if any of it is edited, both change."""

    own: bytes
    """Of a row that has a name of its own, wherever it stands."""
    placed: bytes
    """Of a row that is named by its place: it is another row when lines are put in before it."""


def keys_of(raw: RawRow) -> RowKeys:
    """16 bytes each, the same in every process."""
    content = raw.content
    if isinstance(content, RowError):
        data = content.message.encode("utf-8", "surrogatepass")
    elif isinstance(content, bytes):
        data = content
    else:
        data = json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    own = hashlib.blake2b(data, digest_size=KEY_BYTES)
    placed = own.copy()
    placed.update(b"\n%d" % raw.index)
    return RowKeys(own.digest(), placed.digest())


def key_of(raw: RawRow, row: Row) -> bytes:
    """The one that holds for a row."""
    keys = keys_of(raw)
    return keys.own if row.is_named else keys.placed


def name_hash(custom_id: str) -> int:
    """64 bits of a name."""
    digest = hashlib.blake2b(custom_id.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
