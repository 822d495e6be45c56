"""What a run says of itself while it goes on and after it has ended."""

import json
from pathlib import Path

import pytest

from moebatch.errors import Stopped
from moebatch.folder.shard import ALL
from moebatch.job.figures import status_of
from moebatch.job.status import RunStatus
from moebatch.job.status_file import read_status, written_to


def status() -> RunStatus:
    return status_of(None, run_folder="", budget_bytes=1)


def stop_a_run(path: Path, *, has_gained: bool) -> int:
    with pytest.raises(Stopped) as stopped, written_to(path, ALL, status):
        raise Stopped("out of time", has_gained=has_gained)
    return stopped.value.num_fruitless


def test_runs_in_a_row_that_gain_nothing_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert [stop_a_run(path, has_gained=False) for _ in range(3)] == [1, 2, 3]
    assert stop_a_run(path, has_gained=True) == 0
    assert stop_a_run(path, has_gained=False) == 1


def test_a_run_that_ends_leaves_word(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with written_to(path, ALL, status):
        pass
    there = read_status(path)
    assert there is not None
    assert (there.state, there.is_alive) == ("done", False)
    with pytest.raises(ZeroDivisionError), written_to(path, ALL, status):
        raise ZeroDivisionError
    there = read_status(path)
    assert there is not None and there.state == "failed"


@pytest.mark.parametrize("shard", ["\x1b[2J", "a/b", "1/" + "9" * 5000, "1", 7])
def test_a_file_of_no_shard_counts_as_none(tmp_path: Path, shard: object) -> None:
    path = tmp_path / "status-1-of-1.json"
    with written_to(path, ALL, status):
        pass
    assert read_status(path) is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shard": shard}))
    assert read_status(path) is None


def test_a_file_with_other_values_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    stop_a_run(path, has_gained=False)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "fruitless": "many"}))
    assert read_status(path) is None
    assert stop_a_run(path, has_gained=False) == 1
