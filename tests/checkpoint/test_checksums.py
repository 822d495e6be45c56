"""Checksums beside a model's files."""

import hashlib
from pathlib import Path

import pytest

from moebatch.checkpoint.checksums import SUMS_NAME, known_checksums, require_checksums
from moebatch.errors import CheckpointError, StorageError
from tests.reliability.faulty_os import FaultyOs

NAME = "model.safetensors"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / NAME).write_bytes(b"weights")
    return {NAME: tmp_path / NAME}


def test_a_list_beside_the_files(tmp_path: Path, files: dict[str, Path]) -> None:
    lines = f"{sha(b'weights')}  ./{NAME}\n{sha(b'other')} *other.bin\n"
    (tmp_path / SUMS_NAME).write_text(lines)
    assert known_checksums(tmp_path, files) == {NAME: sha(b"weights")}


def test_lines_that_say_nothing_are_passed_over(tmp_path: Path, files: dict[str, Path]) -> None:
    own, other = sha(b"weights"), sha(b"other")
    for list_ in (
        f"\n# of today\n\n{own}  {NAME}\n\n",
        f"\ufeff{own} *{NAME}\r\n\r\n",
        f"\\{other}  two\\nlines\n{other}  a\u2028b\n{own}  {NAME}",
    ):
        (tmp_path / SUMS_NAME).write_text(list_, encoding="utf-8", newline="")
        assert known_checksums(tmp_path, files) == {NAME: own}


def test_one_file_for_each(tmp_path: Path, files: dict[str, Path]) -> None:
    (tmp_path / f"{NAME}.sha256").write_text(f"{sha(b'weights').upper()}  {NAME}\n")
    read: list[int] = []
    require_checksums(known_checksums(tmp_path, files), files, read.append)
    assert sum(read) == len(b"weights")


def test_blobs_of_the_hugging_face_cache_are_named_by_theirs(tmp_path: Path) -> None:
    blob = tmp_path / sha(b"weights")
    blob.write_bytes(b"weights")
    assert known_checksums(tmp_path, {NAME: blob}) == {NAME: blob.name}


def test_damage_is_named(tmp_path: Path, files: dict[str, Path]) -> None:
    with pytest.raises(
        CheckpointError, match=f"{NAME}: its SHA-256 is {sha(b'weights')}, expected"
    ):
        require_checksums({NAME: "0" * 64}, files, lambda count: None)


def test_a_disk_that_fails_is_no_damage(files: dict[str, Path]) -> None:
    with FaultyOs([files[NAME].parent], 1, "fails").in_force(), pytest.raises(StorageError):
        require_checksums({NAME: sha(b"weights")}, files, lambda count: None)


def test_nothing_is_known(tmp_path: Path, files: dict[str, Path]) -> None:
    assert known_checksums(tmp_path, files) == {}


@pytest.mark.parametrize("content", [b"nonsense\n", b"\xff\xfe", b"abc  model.safetensors\n"])
def test_a_damaged_list_is_a_message(
    tmp_path: Path, files: dict[str, Path], content: bytes
) -> None:
    (tmp_path / SUMS_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=SUMS_NAME):
        known_checksums(tmp_path, files)
