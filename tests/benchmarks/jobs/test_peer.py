"""How peers are asked to run."""

from pathlib import Path

import pytest

from tests.benchmarks.jobs.__main__ import is_ready
from tests.benchmarks.jobs.peer import LlamaCpp
from tests.benchmarks.jobs.run import RunFailed
from tests.benchmarks.jobs.setting import Setting


@pytest.mark.parametrize(("model_bytes", "is_mapped"), [(999, False), (1001, True)])
def test_llama_cpp_makes_no_copy_of_a_file_that_is_larger_than_the_cap(
    tmp_path: Path, model_bytes: int, is_mapped: bool
) -> None:
    checkpoint = tmp_path / "checkpoint"
    (tmp_path / "checkpoint.gguf").write_bytes(bytes(model_bytes))
    setting = Setting(folder=tmp_path, checkpoint=checkpoint, cap_bytes=1000, dram_bytes=900)
    peer = LlamaCpp(python=Path("python"), longest_s=1.0)
    assert ("--mapped" in peer.arguments(setting, tmp_path / "rows.jsonl", tmp_path)) == is_mapped


def test_a_converter_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    setting = Setting(folder=tmp_path, checkpoint=checkpoint, cap_bytes=1000, dram_bytes=900)
    peer = LlamaCpp(python=Path("python"), longest_s=1.0, sources=tmp_path)
    (tmp_path / "checkpoint.gguf.partial").write_bytes(b"as far as it came")
    with pytest.raises(RunFailed, match="its converter fails"):
        peer.prepare(setting)
    assert not [*tmp_path.iterdir()]


def test_a_peer_whose_file_cannot_be_made_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    setting = Setting(folder=tmp_path, checkpoint=checkpoint, cap_bytes=1000, dram_bytes=900)
    assert not is_ready(LlamaCpp(python=Path("python"), longest_s=1.0), setting)
    assert "llama.cpp: left out; " in capsys.readouterr().err
    (tmp_path / "checkpoint.gguf").touch()
    assert is_ready(LlamaCpp(python=Path("python"), longest_s=1.0), setting)
