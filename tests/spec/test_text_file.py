"""Files appear whole or not at all, and nothing but a regular file is ever replaced."""

import os
import threading
from pathlib import Path

import pytest

from moebatch.errors import StorageError
from moebatch.spec.files.text_file import write_text
from tests.patience import PATIENCE_S


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.yaml"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    write_text(tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_text(path, "text")
    reader.join(PATIENCE_S)
    assert read == ["text"]
    assert path.is_fifo()


def test_a_pipe_without_a_name_is_written_to() -> None:
    """As `-o /dev/stdout | less` and `-o >(less)` name one."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as pipe:
        write_text(Path(f"/dev/fd/{writer}"), "text")
        os.close(writer)
        assert pipe.read() == "text"


@pytest.mark.parametrize("name", ["missing/policy.yaml", "folder"])
def test_what_cannot_be_written_is_a_message_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        write_text(tmp_path / name, "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
