"""A line says that a compiler is waited for, and only then."""

import functools
from pathlib import Path

import pytest

from moebatch.model.native import loader


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_loaded", functools.cache(lambda: "none are needed here"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With something that passes for a compiler."""
    (tmp_path / "cc").write_text("#!/bin/sh\n")
    (tmp_path / "cc").chmod(0o700)
    return {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def logged(environment: dict[str, str]) -> list[str]:
    lines: list[str] = []
    loader.log_compiling(lines.append, environment)
    return lines


def test_a_compilation_is_announced_until_there_is_a_library(environment: dict[str, str]) -> None:
    assert logged(environment) == ["compiling kernels, once (10 to 30 seconds)"]
    library = Path(environment["XDG_CACHE_HOME"], "moebatch", loader._library(environment).name)
    library.touch(mode=0o500)
    assert logged(environment) == []


@pytest.mark.parametrize("cache", ["", "a file"])
def test_kernels_that_cannot_be_kept_are_not_announced_as_compiled_once(
    environment: dict[str, str], tmp_path: Path, cache: str
) -> None:
    (tmp_path / "a file").touch()
    told = {**environment, "HOME": "", "XDG_CACHE_HOME": str(tmp_path / cache) if cache else ""}
    (line,) = logged(told)
    assert line.startswith("compiling kernels, in each run") and "set XDG_CACHE_HOME" in line


def test_nothing_is_announced_where_nothing_will_be_compiled(environment: dict[str, str]) -> None:
    assert logged({**environment, loader.SWITCH: "0"}) == []
    assert logged({**environment, "PATH": "/no/such/folder"}) == []
    assert logged({**environment, "CC": "no-such-cc"}) == []
    loader._loaded()
    assert logged(environment) == [], "this process has tried"
