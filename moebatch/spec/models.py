"""Models to plan for: a checkpoint's ``config.json``, or the same figures in YAML, no weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from moebatch.errors import ConfigError, Fault
from moebatch.quoting import shown
from moebatch.spec.config_keys import FaultyConfig
from moebatch.spec.library import find
from moebatch.spec.shape import ModelShape
from moebatch.spec.shape_reader import load_config, read_shape
from moebatch.spec.yaml_file import Place, YamlFile, dotted, read_yaml

_KEYS = ("name", "source", "config")
_CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """A model that can be planned."""

    name: str
    """For the user: what the YAML file says, else the name of the folder or file."""
    shape: ModelShape
    path: Path
    """Where the figures were read: a YAML file or a ``config.json``."""
    source: str = ""
    """Where the figures of a YAML file come from, in its own words."""


def load_model(name_or_path: str) -> ModelEntry:
    """The model in a folder with a ``config.json``, in such a file, in a YAML file with ``name``,
    ``source`` and ``config``, or of a name in the library.

    Raises CheckpointError for faults in a ``config.json``, and ConfigError for faults in YAML,
    with lines, and for unknown names.
    """
    path = Path(name_or_path)
    if not _is_file(path / _CONFIG_FILE):
        path = find("models", name_or_path)
    if _is_dir(path):
        path = path / _CONFIG_FILE
    if path.suffix.lower() == ".json":
        return _from_json(path)
    return _from_yaml(read_yaml(path, kind="model file"))


def _from_json(path: Path) -> ModelEntry:
    shape = read_shape(load_config(path), str(path))
    named_by = path.absolute().parent.name if path.name == _CONFIG_FILE else path.stem
    return ModelEntry(name=named_by or path.stem, shape=shape, path=path)


def _from_yaml(file: YamlFile) -> ModelEntry:
    faults = list(file.faults)
    faults += [_fault(file, (key,), _unknown(key)) for key in file.content if key not in _KEYS]
    texts = {key: file.content[key] for key in ("name", "source") if key in file.content}
    for key, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            faults.append(_fault(file, (key,), f"must be a text, got {shown(text)}"))
    shape = _shape(file, faults)
    if faults or shape is None:
        raise ConfigError(faults)
    name, source = (str(texts.get(key, "")).strip() for key in ("name", "source"))
    return ModelEntry(name=name or file.path.stem, shape=shape, path=file.path, source=source)


def _shape(file: YamlFile, faults: list[Fault]) -> ModelShape | None:
    """None with at least one more fault where the figures describe no model."""
    config = file.content.get("config")
    if not isinstance(config, Mapping):
        found = f"got {shown(config)}" if "config" in file.content else "but is missing"
        message = f"must hold the figures of the model's config.json, {found}"
        faults.append(_fault(file, ("config",), message))
        return None
    try:
        return read_shape(config, str(file.path))
    except FaultyConfig as error:
        for fault in error.faults:
            place = ("config", *fault.key.split("."))
            faults.append(_fault(file, place, fault.message))
        return None


def _unknown(key: str) -> str:
    near = get_close_matches(key, _KEYS, n=1)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; allowed are {', '.join(_KEYS)}, and figures stand under config"


def _fault(file: YamlFile, place: Place, message: str) -> Fault:
    line = file.line_of(place)
    return Fault(file=str(file.path), line=line, where=dotted(place), message=message)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
