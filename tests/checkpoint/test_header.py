"""The rules of the safetensors format, each broken once."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moebatch.checkpoint.header import MAX_TENSORS, read_header
from moebatch.errors import CheckpointError


def write(path: Path, header: object, data: bytes = b"", *, raw: bytes | None = None) -> Path:
    text = json.dumps(header).encode() if raw is None else raw
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(begin: int, end: int, *, dtype: str = "F32", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    assert {name: entry.shape for name, entry in entries.items()} == {"a": (2, 3), "b": (5,)}
    for name, entry in entries.items():
        stored = content[entry.offset : entry.offset + entry.num_bytes]
        assert torch.frombuffer(bytearray(stored), dtype=tensors[name].dtype).equal(
            tensors[name].view(-1)
        )


BROKEN = {
    "too short": (b"\x01\x02", "too short"),
    "header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "truncated"),
    "header longer than allowed": ((10**9).to_bytes(8, "little") + b"{}", "at most 100000000"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull` fetches"),
    "not an object": ((2).to_bytes(8, "little") + b"[]", "does not start with '{'"),
    "not JSON": ((5).to_bytes(8, "little") + b"{nope", "not valid JSON"),
    "not UTF-8": ((4).to_bytes(8, "little") + b'{"\xff}', "not valid JSON"),
    "deep nesting": (
        (200_005).to_bytes(8, "little") + b'{"a":' + b"[" * 100_000 + b"]" * 100_000,
        "not valid JSON",
    ),
}


@pytest.mark.parametrize("content, message", BROKEN.values(), ids=BROKEN.keys())
def test_refuses_broken_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "header, message",
    [
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, "'b' overlaps"),
        ({"a": tensor(0, 4), "b": tensor(8, 12)}, "'b' leaves a hole"),
        ({"a": tensor(0, 8)}, "bytes are left over"),
        ({"a": tensor(0, 16)}, "truncated"),
        ({"a": tensor(0, 12, shape=[2])}, "is 8 bytes, its offsets span 12"),
        ({"a": tensor(0, 12, shape=[2**62, 2**62, 2**62])}, "its offsets span 12"),
        ({"a": tensor(0, 12, shape=[-3])}, "not a list of sizes"),
        ({"a": tensor(0, 12, shape=[True])}, "not a list of sizes"),
        ({"a": tensor(0, 12, dtype="Q8")}, "unknown dtype 'Q8'"),
        ({"a": tensor(0, 12, dtype="F4", shape=[3])}, "does not end on a byte"),
        ({"a": {**tensor(0, 12), "data_offsets": [12, 0]}}, r"not \[begin, end\]"),
        ({"a": {**tensor(0, 12), "data_offsets": [0, 12, 12]}}, r"not \[begin, end\]"),
        ({"a": {"dtype": "F32", "shape": [3]}}, "needs exactly dtype, shape and data_offsets"),
        ({"a": 3}, "needs exactly dtype, shape and data_offsets"),
        ({"a": tensor(0, 12), "__metadata__": {"x": 1}}, "strings only"),
    ],
)
def test_refuses_tensors_that_break_the_format(
    tmp_path: Path, header: object, message: str
) -> None:
    path = write(tmp_path / "m.safetensors", header, bytes(12))
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_refuses_a_name_that_occurs_twice(tmp_path: Path) -> None:
    entry = json.dumps(tensor(0, 12))
    path = write(tmp_path / "m", None, bytes(12), raw=f'{{"a":{entry},"a":{entry}}}'.encode())
    with pytest.raises(CheckpointError, match="the key 'a' is given twice"):
        read_header(path)


def test_accepts_empty_tensors_and_trailing_spaces(tmp_path: Path) -> None:
    header = json.dumps({"a": tensor(0, 0), "b": tensor(0, 12)}).encode() + b"   "
    assert set(read_header(write(tmp_path / "m", None, bytes(12), raw=header))) == {"a", "b"}


@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except CheckpointError:
        return
    try:
        with safe_open(path, "pt") as file:
            file.keys()
    except SafetensorError as error:
        pytest.fail(f"we accept what the library refuses: {error}")


def flat(path: Path, shape: object, end: int = 4) -> Path:
    return write(path, {"a": tensor(0, end, shape=shape)}, bytes(end))


@pytest.mark.parametrize(
    "shape, message",
    [
        ([10**18] * 64, r"tensor 'a': F32 of shape \[.*… is 40{59}… bytes, its offsets span 4"),
        ([2**62] * 64, r"is \d{60}… bytes, its offsets span 4"),
        ([2] * 65, "has 65 dimensions, at most 64 are read"),
        ([2**62 + 1] * 10**5, "has 100000 dimensions, at most 64 are read"),
        ([10**1000], "is not a list of sizes"),
        ([[[[1]]]] * 10**5, r"shape \[\[\[\[1\]\]\], .*… is not a list of sizes"),
    ],
)
def test_absurd_shapes_are_refused_in_a_short_line(
    tmp_path: Path, shape: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(flat(tmp_path / "m.safetensors", shape))
    assert len(str(caught.value)) < 1000


def test_more_tensors_than_any_model_has_are_refused_before_they_are_objects(
    tmp_path: Path,
) -> None:
    empty = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    raw = b"{" + b",".join(b'"%d":%s' % (n, empty) for n in range(MAX_TENSORS + 2)) + b"}"
    with pytest.raises(CheckpointError, match=f"more than {MAX_TENSORS} tensors"):
        read_header(write(tmp_path / "m.safetensors", None, raw=raw))


def test_a_name_that_comes_twice_is_found_among_many(tmp_path: Path) -> None:
    raw = b"{" + b"".join(b'"%d":0,' % n for n in range(200_000)) + b'"twice":0,"twice":0}'
    with pytest.raises(CheckpointError, match="the key 'twice' is given twice"):
        read_header(write(tmp_path / "m.safetensors", None, raw=raw))


@pytest.mark.parametrize("name", ["\ud800", "a\udcff"])
def test_names_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    header = {name: tensor(0, 4)}
    with pytest.raises(CheckpointError, match="is no text that UTF-8 can hold") as caught:
        read_header(write(tmp_path / "m.safetensors", header, bytes(4)))
    str(caught.value).encode()
