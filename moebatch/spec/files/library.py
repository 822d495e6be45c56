"""Profiles, model shapes and policies that come with moebatch, found by their names."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import moebatch
from moebatch.errors import ConfigError
from moebatch.spec.files.suggestion import did_you_mean, names_instead

Kind = Literal["hardware", "models", "saved"]
"""Folders of the library."""
_NOUNS: dict[Kind, str] = {
    "hardware": "hardware profile",
    "models": "model shape",
    "saved": "policy",
}
_PACKAGE = Path(moebatch.__file__).parent
_SUFFIXES = (".yaml", ".yml")


def is_path(name: str) -> bool:
    """Whether a text is meant as a path, be there a file or not: it has a slash or ends as YAML
    files do."""
    return "/" in name or os.sep in name or name.lower().endswith(_SUFFIXES)


def find(kind: Kind, name: str) -> Path:
    """The file that a user means by a path, or by the name of one that comes with moebatch; a
    file of that name in the current folder comes first. Case and ``- _ .`` do not matter in names.

    Raises ConfigError with near names, or with all; whether a path exists is for its reader.
    """
    if is_path(name):
        return expanded(Path(name))
    if is_there(name):
        return Path(name)
    found = _files(kind).get(_plain(name))
    if found is None:
        raise ConfigError.at(repr(name), _unknown(kind, name))
    return found


def names(kind: Kind) -> tuple[str, ...]:
    """Names of all that come with moebatch, in order."""
    return tuple(sorted(path.stem for path in _files(kind).values()))


def nearest(kind: Kind, name: str) -> str:
    """``did you mean mixtral-8x7b?``; empty where no name is near."""
    known = _files(kind)
    return did_you_mean(_plain(name), known, spelled=lambda key: known[key].stem)


def _unknown(kind: Kind, name: str) -> str:
    known = dict(sorted(_files(kind).items(), key=lambda entry: entry[1].stem))
    if not known:
        return f"no {_NOUNS[kind]} comes with moebatch; give the path of a file"
    besides = "the path of a file"
    instead = names_instead(
        _plain(name), known, spelled=lambda key: known[key].stem, besides=besides
    )
    return f"no {_NOUNS[kind]} of that name; {instead}"


def _files(kind: Kind) -> dict[str, Path]:
    return {_plain(path.stem): path for path in _folder(kind).glob("*.yaml")}


def _folder(kind: Kind) -> Path:
    """In an installed package, or beside the package in a checkout."""
    installed = _PACKAGE / "policies"
    return (installed if installed.is_dir() else _PACKAGE.parent / "policies") / kind


def _plain(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name).lower()


def expanded(path: Path) -> Path:
    """With the home that ``~`` stands for. Without such a user's home the path stays as it is, and
    is later reported as missing by its own name."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def is_there(path: str | Path, is_kind: Callable[[Path], bool] = Path.is_file) -> bool:
    """Whether there is such a file, or a folder with ``Path.is_dir``; not under a name that no file
    can have."""
    try:
        return is_kind(Path(path))
    except (OSError, ValueError):
        return False
