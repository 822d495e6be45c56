"""What comes with moebatch is found by name, from a checkout and from an installed wheel."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.spec.files.library import Kind, find, is_path, names

ROOT = Path(__file__).parents[2]
HARDWARE = ROOT / "policies" / "hardware"


def refusal(name: str, kind: Kind = "hardware") -> str:
    with pytest.raises(ConfigError) as caught:
        find(kind, name)
    (fault,) = caught.value.faults
    return str(fault)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("t4", "t4.yaml"),
        ("T4", "t4.yaml"),
        ("2xT4", "2xt4.yaml"),
        ("A100 80G", "a100-80g.yaml"),
        ("a100_80g", "a100-80g.yaml"),
        ("A100.80G", "a100-80g.yaml"),
        ("RTX-3090", "rtx3090.yaml"),
    ],
)
def test_names_are_found_however_they_are_written(name: str, file: str) -> None:
    assert find("hardware", name) == HARDWARE / file


def test_all_profiles_are_listed_in_order() -> None:
    listed = names("hardware")
    assert list(listed) == sorted(path.stem for path in HARDWARE.iterdir())
    assert {"t4", "2xt4", "4xt4", "l4", "h100", "generic-cpu"} <= set(listed)


def test_a_path_is_that_file_even_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("hardware", "./t4") == Path("./t4")
    assert find("hardware", "mine.yaml") == Path("mine.yaml")
    assert find("hardware", "mine.YML") == Path("mine.YML")
    assert find("hardware", "~/mine.yaml") == tmp_path / "mine.yaml"


def test_a_file_of_the_name_comes_first_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t4").touch()
    (tmp_path / "l4").mkdir()
    assert find("hardware", "t4") == Path("t4")
    assert find("hardware", "l4") == HARDWARE / "l4.yaml"


def test_only_slashes_and_endings_make_a_path() -> None:
    assert [text for text in ("a/b", "a.yaml", "a.yml", "a.json", "a") if is_path(text)] == [
        "a/b",
        "a.yaml",
        "a.yml",
    ]


def test_an_unknown_name_is_met_with_near_names() -> None:
    text = refusal("rtx3080")
    assert text.startswith("'rtx3080': no hardware profile of that name; did you mean rtx3090 or")
    assert text.endswith(
        f"'list' in its place shows all {len(names('hardware'))}; or give the path of a file"
    )
    assert "generic-cpu" not in text


@pytest.mark.parametrize("kind", ["hardware", "models", "saved"])
@pytest.mark.parametrize("name", ["list", "qqqq"])
def test_a_name_that_none_is_near_is_met_with_all_names(kind: Kind, name: str) -> None:
    text = " ".join(refusal(name, kind).split())
    assert text.endswith(f"; give the path of a file, or one of {', '.join(names(kind))}")
    assert "…" not in str(ConfigError.at("f", refusal(name, kind))), "no name is cut out"


def test_saved_policies_have_a_folder_of_their_own() -> None:
    file = "moe-lightning-t4-mtbench-128.yaml"
    assert find("saved", "MoE-Lightning T4 MTBench-128") == ROOT / "policies" / "saved" / file
    text = " ".join(refusal("t4", "saved").split())
    assert text.startswith("'t4': no policy of that name; give the path of a file, or one of flex")


@pytest.mark.parametrize("name", ["", " ", "\0", "x" * 5000])
def test_names_that_are_none(name: str) -> None:
    assert "no hardware profile of that name; give the path" in refusal(name)


def test_an_installed_package_brings_its_own(tmp_path: Path) -> None:
    """The layout of the wheel: policies inside the package, nothing beside it."""
    shutil.copytree(ROOT / "moebatch" / "spec", tmp_path / "site" / "moebatch" / "spec")
    for file in ("__init__.py", "errors.py", "quoting.py", "units.py"):
        shutil.copy(ROOT / "moebatch" / file, tmp_path / "site" / "moebatch" / file)
    shutil.copytree(ROOT / "policies", tmp_path / "site" / "moebatch" / "policies")
    code = "from moebatch.spec.files.library import find; print(find('hardware', 'T4'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == tmp_path / "site/moebatch/policies/hardware/t4.yaml"
