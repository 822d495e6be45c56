"""Durations of tasks from a file."""

from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.plan.simulation.simulation import load_durations
from moebatch.schedule.task import Kind


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.yaml", "attend: 0.002\nkv up: 1\n"),
        ("d.json", '{"attend": 0.002, "kv up": 1}'),
    ],
)
def test_seconds_come_by_kind(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_durations(path) == {Kind.ATTEND: 0.002, Kind.KV_UP: 1.0}


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("attend: -1\nexpart: 2\ngate: .nan\n")
    with pytest.raises(ConfigError) as caught:
        load_durations(path)
    text = str(caught.value)
    for part in ("attend: must be a number", "did you mean expert?", "gate: must be a number"):
        assert part in text
