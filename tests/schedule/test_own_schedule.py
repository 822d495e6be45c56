"""Schedules in files of the user's own."""

import json
from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.schedule.registry import find_schedule, unknown_schedule
from tests.test_cli_plan import T4, moebatch

FILE = Path(__file__).with_name("own_schedule.py")
MINE = f"{FILE}:mine"


@pytest.mark.exhaustive
def test_it_is_simulated_beside_others_and_planned_with() -> None:
    done = moebatch("simulate", *T4, "--schedule", MINE, "--compare", "klotski", "--json")
    assert list(json.loads(done.stdout)["schedules"]) == [MINE, "klotski"], done.stderr
    done = moebatch("plan", *T4, "--schedule", MINE, "--json")
    assert json.loads(done.stdout)["policy"]["schedule"] == MINE, done.stderr


def test_its_decorator_says_what_it_is_like() -> None:
    traits = find_schedule(MINE).traits
    assert (traits.moves, traits.runs, traits.foresees) == ("experts", "pass", "likely")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("", "has no schedule 'mine'"),
        ("mine = 3", "has no schedule 'mine'"),
        ("def mine(layer", "line 1"),
        ("\nimport no_such_module\n", "line 2.*no_such_module"),
    ],
)
def test_a_file_without_it_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_schedule(f"{path}:mine")
    assert len(unknown_schedule(f"{path}:mine")) == 1


def test_the_line_is_named_of_a_file_in_the_folder_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("beside.py").write_text("\nimport no_such_module\n")
    with pytest.raises(ConfigError, match=r"line 2.*no_such_module"):
        find_schedule("beside.py:mine")


def test_what_a_line_of_it_raises_is_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE.read_text().replace("yield combine(i)", "yield combine(i / 0)"))
    line = path.read_text()[: path.read_text().index("i / 0")].count("\n") + 1
    done = moebatch("simulate", *T4, "--schedule", f"{path}:mine")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"line {line}: " in done.stderr and "ZeroDivisionError" in done.stderr
