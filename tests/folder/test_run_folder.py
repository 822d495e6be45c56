"""The folder of an output, where one run leaves nothing behind and another one begins."""

from pathlib import Path

import pytest

from moebatch.errors import StorageError
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import ALL
from moebatch.journal import lock


def removed_before_it_is_locked(folder: RunFolder, times: int, patch: pytest.MonkeyPatch) -> None:
    """As by another run, between making the folder and opening its lock."""
    opened, removals = lock._opened, iter(range(times))

    def removed_and_opened(path: Path, flags: int) -> int:
        if next(removals, None) is not None:
            folder.path.rmdir()
        return opened(path, flags)

    patch.setattr(lock, "_opened", removed_and_opened)


def test_a_folder_that_another_run_has_just_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "out.jsonl")
    removed_before_it_is_locked(folder, 2, monkeypatch)
    with folder.locked(ALL):
        assert folder.lock.exists()
    assert not folder.path.exists()


def test_a_folder_that_is_always_gone_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "out.jsonl")
    removed_before_it_is_locked(folder, 100, monkeypatch)
    with pytest.raises(StorageError, match="cannot be locked: No such file"), folder.locked(ALL):
        pass


def test_nothing_inside_a_folder_is_removed_once_its_lock_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may have made it by then."""
    folder = RunFolder(tmp_path / "out.jsonl")
    remove, is_locked = Path.rmdir, dict[Path, bool]()

    def look_and_remove(path: Path) -> None:
        is_locked[path] = folder.lock.exists()
        remove(path)

    monkeypatch.setattr(Path, "rmdir", look_and_remove)
    with folder.locked(ALL):
        folder.journal.mkdir()
    assert is_locked == {folder.journal: True, folder.path: False}


def test_what_a_run_cannot_clear_away_keeps_it_from_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out.jsonl")
    left = folder.path / ".manifest.json-0123abcd"
    left.mkdir(parents=True)
    with folder.locked(ALL):
        assert left.exists()
