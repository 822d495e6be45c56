"""What pydantic found wrong in a job file, in the words of its reader."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moebatch.errors import Fault
from moebatch.quoting import shown
from moebatch.spec.yaml_file import Place, YamlFile, dotted


class WrongValues(ValueError):
    """Faults that a check of a whole section found in its keys."""

    def __init__(self, messages: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{key} {message}" for key, message in messages.items()))
        self.messages = messages


def faults_of(error: ValidationError, file: YamlFile, top: type[BaseModel]) -> list[Fault]:
    """At least one fault per error."""
    return [
        Fault(file=str(file.path), line=file.line_of(place), where=dotted(place), message=message)
        for details in error.errors(include_url=False)
        for place, message in _findings(details, top)
    ]


def _findings(details: ErrorDetails, top: type[BaseModel]) -> Iterator[tuple[Place, str]]:
    place: Place = details["loc"]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, WrongValues):
        yield from (((*place, key), message) for key, message in cause.messages.items())
    else:
        yield place, _message(details, cause, place, top)


def _message(
    details: ErrorDetails, cause: Exception | None, place: Place, top: type[BaseModel]
) -> str:
    match details["type"]:
        case "missing":
            return _missing(place, top)
        case "extra_forbidden":
            return _unknown(place, top)
        case "value_error" if cause is not None:
            return str(cause)
        case "model_type" | "model_attributes_type" | "dict_type":
            keys = ", ".join(_section(place, top).model_fields)
            found = shown(details["input"])
            return f"must be a mapping with keys of its own ({keys}), got {found}"
    return details["msg"]  # pragma: no cover - all fields have checks of their own


def _missing(place: Place, top: type[BaseModel]) -> str:
    *around, key = place
    field = _section(tuple(around), top).model_fields[str(key)]
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        needed = [name for name, field in kind.model_fields.items() if field.is_required()]
        return f"is missing; add it with {', '.join(needed)}"
    return "is missing and has no default"


def _unknown(place: Place, top: type[BaseModel]) -> str:
    *around, key = place
    section = _section(tuple(around), top)
    near = get_close_matches(str(key), section.model_fields, n=1)
    if near:
        return f"unknown key; did you mean {dotted((*around, *near))}?"
    elsewhere = next(_places_of(str(key), top), None)
    if elsewhere:
        return f"unknown key; did you mean {elsewhere}?"
    return f"unknown key; allowed are {', '.join(section.model_fields)}"


def _places_of(key: str, top: type[BaseModel]) -> Iterator[str]:
    for name, field in top.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
            yield f"{name}.{key}"


def _section(place: Iterable[str | int], top: type[BaseModel]) -> type[BaseModel]:
    for step in place:
        kind = top.model_fields[str(step)].annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel), "only sections have keys"
        top = kind
    return top
