"""Checks of single values of the job file, and the pydantic types made of them.

Every check raises ValueError with what is allowed and what was found.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainValidator

from moebatch.quoting import shown
from moebatch.spec.limits import CHECKS, number, whole
from moebatch.spec.prompt_template import PromptTemplate
from moebatch.units import parse_bytes

_LONGEST_PATH, _LONGEST_NAME = 4096, 255
"""In bytes, as Linux has it."""
_LARGEST = 1e300
"""Any float, but no huge integer that is none."""


def one_of(*allowed: str) -> PlainValidator:
    """One of a few words."""

    def check(value: object) -> object:
        if isinstance(value, str) and value in allowed:
            return value
        raise ValueError(f"must be one of {', '.join(allowed)}, got {shown(value)}")

    return PlainValidator(check)


def optional(check: Callable[[Any], object]) -> PlainValidator:
    """None, or what a check makes of the value."""
    return PlainValidator(lambda value: None if value is None else check(value))


def row_default(name: str) -> PlainValidator:
    """Default of a sampling parameter of rows, None where the job has none."""
    return optional(CHECKS[name])


def _path(value: object) -> Path:
    if isinstance(value, str) and value.strip() and "\0" not in value:
        if len(value.encode()) >= _LONGEST_PATH or _longest_name(value) > _LONGEST_NAME:
            raise ValueError(f"is longer than a path can be: {shown(value)}")
        return Path(value)
    if isinstance(value, Path):
        return value
    raise ValueError(f"must be a path, got {shown(value)}")


def _longest_name(path: str) -> int:
    return max(len(name.encode()) for name in path.split("/"))


def _text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"must be a text, got {shown(value)}")


def _prompt(value: object) -> str:
    text = _text(value)
    PromptTemplate.parse(text)
    return text


def _size(value: object) -> int | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"must be auto or a size such as 12GiB, got {shown(value)}")
    try:
        return parse_bytes(value)
    except (ValueError, OverflowError):
        raise ValueError(
            "must be auto or a size such as 12GiB, 1.5GB or 800MiB "
            f"(units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), got {shown(value)}"
        ) from None


def _threads(value: object) -> int | None:
    if value == "auto" or value is None:
        return None
    try:
        return whole(value, 1, 4096)
    except ValueError:
        raise ValueError(
            f"must be auto or a whole number from 1 to 4096, got {shown(value)}"
        ) from None


def _threshold(value: object) -> float | None:
    if value == "auto" or value is None:
        return None
    try:
        return number(value, 0, _LARGEST)
    except ValueError:
        raise ValueError(f"must be auto or a number of at least 0, got {shown(value)}") from None


def _job_seed(value: object) -> int:
    return whole(value, -(2**63), 2**63 - 1)


def _hardware(value: object) -> str:
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return value
    raise ValueError(
        "must be auto, which measures this machine, or the name or path of a hardware profile, "
        f"got {shown(value)}"
    )


def _template_kwargs(value: object) -> Mapping[str, object]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"must be a mapping such as {{enable_thinking: false}}, got {shown(value)}")


FilePath = Annotated[Path, PlainValidator(_path)]
OptionalPath = Annotated[Path | None, optional(_path)]
Text = Annotated[str, PlainValidator(_text)]
OptionalText = Annotated[str | None, optional(_text)]
Prompt = Annotated[str | None, optional(_prompt)]
"""A column, or a `PromptTemplate`."""
Size = Annotated[int | None, PlainValidator(_size)]
"""Bytes; None is auto."""
Threads = Annotated[int | None, PlainValidator(_threads)]
"""A number of threads; None is auto."""
Threshold = Annotated[float | None, PlainValidator(_threshold)]
"""How much a gate may change the loss; None is auto."""
Hardware = Annotated[str, PlainValidator(_hardware)]
"""auto, or the name or path of a hardware profile."""
JobSeed = Annotated[int, PlainValidator(_job_seed)]
TemplateVariables = Annotated[Mapping[str, object], PlainValidator(_template_kwargs)]
