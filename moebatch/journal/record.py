"""One line of a journal: what became of a row.

    {"key":"…32 hex…","name":"…16 hex…","is":"done","crc":"…8 hex…","line":{…}}

All fields but the last have a fixed width, so that a million records are understood in seconds
without parsing JSON; for other readers it is JSON.
"""

from typing import Literal, NamedTuple
from zlib import crc32

State = Literal["done", "fail", "part"]
"""An answer; an error in its place; or the tokens of an answer that was cut off by a stop."""
STATES: tuple[State, ...] = ("part", "fail", "done")
_KEY, _NAME, _IS, _CRC, _LINE = b'{"key":"', b'","name":"', b'","is":"', b'","crc":"', b'","line":'
_KEY_AT = len(_KEY)
_NAME_AT = _KEY_AT + 32 + len(_NAME)
_IS_AT = _NAME_AT + 16 + len(_IS)
_CRC_AT = _IS_AT + 4 + len(_CRC)
_LINE_AT = _CRC_AT + 8 + len(_LINE)
_END = b"}\n"
_KNOWN = {state.encode(): state for state in STATES}


class Record(NamedTuple):
    """What became of one row."""

    key: bytes
    """Of the row as it stood in the input, 16 bytes."""
    name: int
    """Of its custom_id, 64 bits."""
    state: State
    line: bytes
    """JSON without newline: the row of the output, or what is needed to go on."""


def encode(record: Record) -> bytes:
    """The line of a record, newline included."""
    assert b"\n" not in record.line, "a record is one line"
    key, name, state = record.key.hex().encode(), b"%016x" % record.name, record.state.encode()
    crc = b"%08x" % _checksum(key, name, state, record.line)
    return b"".join((_KEY, key, _NAME, name, _IS, state, _CRC, crc, _LINE, record.line, _END))


def decode(data: bytes) -> Record | None:
    """The record of a line with its newline; None if it is not whole, or not what was written."""
    key, name = data[_KEY_AT : _KEY_AT + 32], data[_NAME_AT : _NAME_AT + 16]
    state, crc = data[_IS_AT : _IS_AT + 4], data[_CRC_AT : _CRC_AT + 8]
    line = data[_LINE_AT : -len(_END)]
    if not data.endswith(_END) or crc != b"%08x" % _checksum(key, name, state, line):
        return None
    known = _KNOWN.get(state)
    try:
        return known and Record(bytes.fromhex(key.decode()), int(name, 16), known, line)
    except ValueError:
        return None


def line_of(data: bytes) -> bytes:
    """What a record that is known to be whole says, without newline."""
    return data[_LINE_AT : -len(_END)]


def _checksum(key: bytes, name: bytes, state: bytes, line: bytes) -> int:
    return crc32(line, crc32(state, crc32(name, crc32(key))))
