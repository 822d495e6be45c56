"""One line of a journal and back; nothing that is damaged is taken for whole."""

import json
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.journal.record import STATES, Record, decode, encode, line_of

KEYS = st.binary(min_size=16, max_size=16)
LINES = st.dictionaries(st.text(), st.text() | st.integers()).map(
    lambda content: json.dumps(content).encode()
)
RECORDS = st.builds(Record, KEYS, st.integers(0, 2**64 - 1), st.sampled_from(STATES), LINES)


@given(RECORDS)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    data = encode(record)
    assert decode(data) == record
    assert line_of(data) == record.line
    assert data.count(b"\n") == 1


@given(RECORDS)
def test_for_others_it_is_json(record: Record) -> None:
    content = json.loads(encode(record))
    assert content["line"] == json.loads(record.line)
    assert content["key"] == record.key.hex()


@given(RECORDS, st.data())
def test_a_record_with_another_byte_in_it_is_none(record: Record, data: st.DataObject) -> None:
    good = encode(record)
    place = data.draw(st.integers(0, len(good) - 1))
    changed = (
        good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
    )
    found = decode(changed)
    # Only what is between the fields may differ: it says nothing.
    assert found is None or found == record


@pytest.mark.parametrize("part", Record._fields)
def test_a_record_with_a_part_of_another_one_is_none(part: str) -> None:
    record = Record(bytes(16), 0, "fail", b"{}")
    other = Record(bytes(range(16)), 7, "done", b'{"a":1}')
    mixed = record._replace(**{part: getattr(other, part)})
    crc, crc_of_mixed = (json.loads(encode(one))["crc"].encode() for one in (record, mixed))
    assert decode(encode(mixed)) == mixed
    assert decode(encode(mixed).replace(crc_of_mixed, crc)) is None


@pytest.mark.parametrize(
    ("key", "name", "state"),
    [
        (b"g" * 32, b"0" * 16, b"done"),
        (b"\xff" * 32, b"0" * 16, b"done"),
        (b"0" * 32, b"-" * 16, b"done"),
        (b"0" * 32, b"0" * 16, b"lost"),
    ],
)
def test_what_no_version_writes_is_none_whatever_its_checksum(
    key: bytes, name: bytes, state: bytes
) -> None:
    written = encode(Record(bytes(16), 0, "done", b"{}"))
    crc = b"%08x" % crc32(b"{}", crc32(state, crc32(name, crc32(key))))
    for old, new in ((b"0" * 32, key), (b"0" * 16, name), (b"done", state)):
        written = written.replace(old, new, 1)
    start = written.index(b'"crc":"') + 7
    assert decode(written[:start] + crc + written[start + 8 :]) is None


@given(RECORDS, st.data())
def test_half_a_record_is_none(record: Record, data: st.DataObject) -> None:
    good = encode(record)
    assert decode(good[: data.draw(st.integers(0, len(good) - 1))]) is None


@given(st.binary(max_size=300))
def test_whatever_else_stands_there_is_none(data: bytes) -> None:
    assert decode(data) is None
