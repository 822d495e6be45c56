"""What a model folder says about generating: default parameters and end tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moebatch.errors import CheckpointError
from moebatch.quoting import shown
from moebatch.spec.json_file import read_json
from moebatch.spec.limits import whole


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """Content of generation_config.json, and the end tokens that it and config.json name."""

    values: Mapping[str, object]
    """The file as it is; empty if there is none."""
    end_tokens: frozenset[int]


def read_generation_config(folder: Path, *, vocab_size: int) -> GenerationConfig:
    """Reads both files of a model folder; either may be missing.

    Raises CheckpointError if one is damaged or names an end token that the model does not have.
    """
    values = _read(folder / "generation_config.json")
    config = _read(folder / "config.json")
    inner = config.get("text_config")
    tokens: set[int] = set()
    for file, content in (
        ("generation_config.json", values),
        ("config.json", config),
        ("config.json", inner if isinstance(inner, dict) else {}),
    ):
        tokens |= _end_tokens(folder / file, content.get("eos_token_id"), vocab_size)
    return GenerationConfig(values=values, end_tokens=frozenset(tokens))


def _end_tokens(file: Path, value: object, vocab_size: int) -> set[int]:
    if value is None:
        return set()
    try:
        tokens = value if isinstance(value, list) else [value]
        return {whole(token, 0, vocab_size - 1) for token in tokens}
    except ValueError as error:
        raise CheckpointError(f"{file}: eos_token_id {error}") from None


def _read(file: Path) -> dict[str, object]:
    try:
        content = read_json(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected an object, got {shown(content)}")
    return content
