"""Whoever has to wait for a compiler is told so, and only then."""

import functools
from pathlib import Path

import pytest

from moebatch.model.native import loader
from moebatch.model.native.compiler import Compiler


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_loaded", functools.cache(lambda: "none are needed here"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a compiler that says which it is."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho version 1\n")
    compiler.chmod(0o700)
    return {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def told(environment: dict[str, str]) -> list[str]:
    lines: list[str] = []
    loader.announce(lines.append, environment)
    return lines


def test_a_compilation_is_announced_until_there_is_a_library(environment: dict[str, str]) -> None:
    assert told(environment) == ["compiling kernels, once (some ten seconds)"]
    name = Compiler.found(environment).name_of(loader.source())
    library = Path(environment["XDG_CACHE_HOME"], "moebatch", name)
    library.touch(mode=0o500)
    assert told(environment) == []


def test_nothing_is_announced_where_nothing_will_be_compiled(environment: dict[str, str]) -> None:
    assert told({**environment, loader.SWITCH: "0"}) == []
    assert told({**environment, "CC": "/no/such/cc"}) == []
    loader._loaded()
    assert told(environment) == [], "this process has tried"
