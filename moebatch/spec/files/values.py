"""Single values of a file: their checks, and the annotated types made of them.

Every check raises ValueError with what is allowed and what was found. pydantic calls it where the
type stands in a form; nothing here imports pydantic, so that what is annotated loads fast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from moebatch.quoting import not_one_of, shown
from moebatch.spec.files.limits import number, whole
from moebatch.spec.files.place import Findings, dotted
from moebatch.spec.prompt_template import PromptTemplate
from moebatch.units import UnitMissing, parse_bytes

_LONGEST_PATH, _LONGEST_NAME = 4096, 255
"""In bytes, as Linux has it."""
_LARGEST = 1e300
"""Any float, but no huge integer that is none."""


class WrongValues(ValueError):
    """Faults that a check of a mapping found in its keys, or deeper."""

    def __init__(self, findings: Findings) -> None:
        self.findings = tuple(findings)
        """Places, seen from the mapping, and messages."""
        super().__init__("; ".join(f"{dotted(at)} {message}" for at, message in self.findings))


@dataclass(frozen=True, slots=True)
class Check:
    """In ``Annotated[T, Check(read)]``: `read` makes a T of what YAML gave."""

    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.read)


def whole_number(low: int, high: int) -> Check:
    """A whole number within the bounds, which belong to it."""
    return Check(partial(whole, low=low, high=high))


def real_number(low: float, high: float) -> Check:
    """A finite number within the bounds, which belong to it."""
    return Check(partial(number, low=low, high=high))


def one_of(*allowed: str) -> Check:
    """One of a few names, and not null."""

    def read(value: object) -> object:
        if isinstance(value, str) and value in allowed:
            return value
        raise ValueError(not_one_of(allowed, value))

    return Check(read)


def optional(read: Callable[[Any], object]) -> Check:
    """None, or what a check makes of the value."""
    return Check(lambda value: None if value is None else read(value))


def _or_auto(read: Callable[[Any], object], noun: str) -> Check:
    def checked(value: object) -> object:
        if value is None or value == "auto":
            return None
        try:
            return read(value)
        except UnitMissing:
            raise
        except (ValueError, OverflowError):
            raise ValueError(f"must be auto or {noun}, got {shown(value)}") from None

    return Check(checked)


def _path(value: object) -> Path:
    if isinstance(value, str) and value.strip() and "\0" not in value:
        longest_name = max(len(name.encode()) for name in value.split("/"))
        if len(value.encode()) >= _LONGEST_PATH or longest_name > _LONGEST_NAME:
            raise ValueError(f"is longer than a path can be: {shown(value)}")
        return Path(value)
    if isinstance(value, Path):
        return value
    raise ValueError(f"must be a path, got {shown(value)}")


def _text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"must be a text, got {shown(value)}")


def one_line(value: object) -> str:
    text = " ".join(value.split()) if isinstance(value, str) else ""
    # A file may come from anywhere, and its texts go to a terminal.
    if text and text.isprintable():
        return text
    raise ValueError(f"must be a text, got {shown(value)}")


def _prompt(value: object) -> str:
    text = _text(value)
    PromptTemplate.parse(text)
    return text


def _hardware(value: object) -> str:
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return value
    raise ValueError(
        "must be auto, which measures this machine, or the name or path of a hardware profile, "
        f"got {shown(value)}"
    )


def _template_variables(value: object) -> Mapping[str, object]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"must be a mapping such as {{enable_thinking: false}}, got {shown(value)}")


Line = Annotated[str | None, Check(one_line)]
"""A text, its white space and line ends shown as single blanks."""
Text = Annotated[str, Check(_text)]
OptionalText = Annotated[str | None, optional(_text)]
FilePath = Annotated[Path, Check(_path)]
OptionalPath = Annotated[Path | None, optional(_path)]
Prompt = Annotated[str | None, optional(_prompt)]
"""A column, or a `PromptTemplate`."""
Size = Annotated[
    int | None,
    _or_auto(
        parse_bytes,
        "a size such as 12GiB, 1.5GB or 800MiB (units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)",
    ),
]
"""Bytes; None is auto."""
Threads = Annotated[
    int | None, _or_auto(partial(whole, low=1, high=4096), "a whole number from 1 to 4096")
]
"""A number of threads; None is auto."""
Threshold = Annotated[
    float | None, _or_auto(partial(number, low=0, high=_LARGEST), "a number of at least 0")
]
"""How much a gate may change the loss; None is auto."""
Sinks = Annotated[int, whole_number(0, 2**20)]
Window = Annotated[int, whole_number(1, 2**30)]
"""Tokens that others see."""
Hardware = Annotated[str, Check(_hardware)]
"""auto, or the name or path of a hardware profile."""
JobSeed = Annotated[int, whole_number(-(2**63), 2**63 - 1)]
TemplateVariables = Annotated[Mapping[str, object], Check(_template_variables)]
