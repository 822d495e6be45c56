"""Models to plan for: a checkpoint's ``config.json``, or the same figures in YAML, no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from moebatch.errors import ConfigError
from moebatch.quoting import shown
from moebatch.spec.files.form import Form, read_form
from moebatch.spec.files.json_file import read_object
from moebatch.spec.files.library import find, is_there, nearest
from moebatch.spec.files.values import Check, Text, WrongValues, one_line
from moebatch.spec.model.config_keys import FaultyConfig
from moebatch.spec.model.named_formats import unknown_format
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_planned_shape

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
    also_published: Mapping[str, str] = field(default_factory=dict)
    """Other formats in which there are checkpoints of the model, by their names, each with the name
    of one."""


def load_model(name_or_path: str) -> ModelEntry:
    """The model in a folder with a ``config.json``, in such a file, in a YAML file with ``name``,
    ``source``, ``also_published`` and ``config``, or of a name in the library.

    Raises CheckpointError for faults in a ``config.json``, and ConfigError for faults in YAML,
    with lines, and for unknown names.
    """
    path = Path(name_or_path)
    if not is_there(path / _CONFIG_FILE):
        path = find("models", name_or_path)
    if path.suffix.lower() != ".json" and not is_there(path, Path.exists):
        guess = nearest("models", path.name)  # of a model's name on Hugging Face, say
        if guess:
            raise ConfigError.at(path, f"no such file or folder; {guess}")
    if is_there(path, Path.is_dir):
        path = path / _CONFIG_FILE
    if path.suffix.lower() == ".json":
        shape = read_planned_shape(read_object(path), str(path))
        named_by = path.absolute().parent.name if path.name == _CONFIG_FILE else path.stem
        return ModelEntry(name=named_by or path.stem, shape=shape, path=path)
    file = read_form(path, _ModelForm, kind="model file")
    return ModelEntry(
        name=file.name.strip() or path.stem,
        shape=file.config,
        path=path,
        source=file.source.strip(),
        also_published=file.also_published,
    )


def _shape(config: object) -> ModelShape:
    if not isinstance(config, Mapping):
        found = "but is missing" if config is None else f"got {shown(config)}"
        raise ValueError(f"must hold the figures of the model's config.json, {found}")
    try:
        return read_planned_shape(config, "config")
    except FaultyConfig as error:
        findings = ((tuple(fault.key.split(".")), fault.message) for fault in error.config_faults)
        raise WrongValues(findings) from None


def _formats(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping such as {{fp8: Qwen/…-FP8}}, got {shown(value)}")
    findings = [((name,), message) for name in value for message in unknown_format(str(name))]
    for name, checkpoint in value.items():
        try:
            one_line(checkpoint)
        except ValueError as error:
            findings.append(((name,), str(error)))
    if findings:
        raise WrongValues(findings)
    return value


class _ModelForm(Form):
    unknown_hint = (
        "allowed are name, source, also_published, config, and figures stand under config"
    )

    name: Text = ""
    source: Text = ""
    also_published: Annotated[Mapping[str, str], Check(_formats)] = Field(default_factory=dict)
    config: Annotated[ModelShape, Check(_shape)] = Field(default=None, validate_default=True)
