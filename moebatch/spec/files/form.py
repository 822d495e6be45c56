"""YAML files as pydantic models: one loader, and one translation of what pydantic finds wrong.

Every finding becomes a `Fault` with file, line, key, what is needed and what was found.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema

from moebatch.errors import ConfigError, Fault
from moebatch.quoting import not_one_of, shown
from moebatch.spec.files.place import Findings, Place, dotted
from moebatch.spec.files.suggestion import did_you_mean
from moebatch.spec.files.values import WrongValues
from moebatch.spec.files.yaml_file import YamlFile, read_yaml


class Form(BaseModel):
    """A mapping with keys of its own, and without room for others."""

    model_config = ConfigDict(
        extra="forbid", strict=True, arbitrary_types_allowed=True, defer_build=True
    )
    example: ClassVar[str] = ""
    """``{path: x}``, for where the mapping is missing or is none; by default its keys."""
    unknown_hint: ClassVar[str] = ""
    """Shown with a key that is like none of this mapping; by default all its keys are."""

    @classmethod
    def completed(cls, file: YamlFile) -> Mapping[str, Any]:
        """The content of a file with what it leaves to other files. Raises ConfigError."""
        return file.content

    @classmethod
    def contradictions(cls, content: Mapping[str, Any]) -> Findings:
        """What does not go together in a file, be the rest right or wrong."""
        return ()


Filled = TypeVar("Filled", bound=Form)


def read_form(path: Path, form: type[Filled], *, kind: str, **context: object) -> Filled:
    """The form that a YAML file fills in; a ``kind="job file"`` is called so in messages. The
    validators of the form share a dict as their `context`.

    Raises ConfigError with all faults of the file at once.
    """
    file = read_yaml(path, kind=kind)
    content = form.completed(file)
    findings = list(form.contradictions(content))
    try:
        filled = form.model_validate(content, context=context)
    except ValidationError as error:
        findings += _findings(error, form)
    faults = [*file.faults, *_new_faults(findings, file)]
    if faults:
        raise ConfigError(sorted(faults, key=lambda fault: fault.line or 0))
    return filled


@dataclass(frozen=True, slots=True)
class Built:
    """In ``Annotated[T, Built(form, build)]``: a value is checked as a form, then `build` makes a T
    of the keys that are given."""

    form: type[Form]
    build: Callable[..., Any]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_after_validator_function(
            lambda filled: self.build(**given(filled)), handler.generate_schema(self.form)
        )


def given(filled: Form) -> dict[str, Any]:
    """Keys and values of a form, those left out that have no default."""
    return {key: value for key, value in filled if value is not None}


def form_of(described: type[Any], **others: Any) -> type[Form]:
    """A form with the fields, checks and defaults of a dataclass; `others` are the types of those
    that a file writes differently."""
    hints = {**get_type_hints(described, include_extras=True), **others}
    entries: dict[str, Any] = {
        entry.name: (hints[entry.name], ... if entry.default is MISSING else entry.default)
        for entry in fields(described)
    }
    return create_model(described.__name__, __base__=Form, **entries)


def _new_faults(findings: Findings, file: YamlFile) -> Iterator[Fault]:
    """Faults of a file save those of values that YAML itself could not read."""
    known = {(fault.line, fault.where) for fault in file.faults}
    for place, message in findings:
        line, where = file.line_of(place), dotted(place)
        if (line, where) not in known:
            message += _meant(place, file)
            yield Fault(file=str(file.path), line=line, where=where, message=message)


def _meant(place: Place, file: YamlFile) -> str:
    """What a word that was taken for true or false is to be written like, if it was one."""
    word = next((word for at, word in file.words.items() if at[: len(place)] == place), None)
    return f'; YAML takes {word} for true or false unless it is in quotes: "{word}"' if word else ""


def _findings(error: ValidationError, form: type[Form]) -> Iterator[tuple[Place, str]]:
    for details in error.errors(include_url=False):
        place: Place = details["loc"]
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, WrongValues):
            yield from (((*place, *inner), message) for inner, message in cause.findings)
        else:
            yield place, _message(details, place, form)


def _message(details: ErrorDetails, place: Place, form: type[Form]) -> str:
    found = shown(details["input"])
    match details["type"]:
        case "missing":
            return _missing(place, form)
        case "extra_forbidden":
            return _unknown(place, form)
        case "value_error":
            return str(details["ctx"]["error"])
        case "literal_error":
            allowed = re.findall("'([^']*)'", details["ctx"]["expected"])
            return not_one_of(allowed, details["input"])
        case "bool_type":
            return f"must be true or false, got {found}"
        case "model_type" | "model_attributes_type":
            return f"must be a mapping {_keys_of(_form_at(place, form))}, got {found}"
    return details["msg"]  # pragma: no cover - all fields have checks of their own


def _keys_of(form: type[Form]) -> str:
    if form.example:
        return f"such as {form.example}"
    return f"with keys of its own ({', '.join(form.model_fields)})"


def _missing(place: Place, form: type[Form]) -> str:
    *around, key = place
    found = _form_in(_form_at(tuple(around), form).model_fields[str(key)])
    if found is None:
        return "is missing and has no default"
    needed = [name for name, entry in found.model_fields.items() if entry.is_required()]
    if found.example:
        return f"is missing; write it like {found.example}"
    return f"is missing; add it with {', '.join(needed or found.model_fields)}"


def _unknown(place: Place, form: type[Form]) -> str:
    *around, key = place
    found = _form_at(tuple(around), form)
    guess = did_you_mean(str(key), found.model_fields, spelled=lambda near: dotted((*around, near)))
    forms = ((name, _form_in(entry)) for name, entry in form.model_fields.items())
    places = (f"{name}.{key}" for name, inner in forms if inner and key in inner.model_fields)
    elsewhere = next(places, None)
    if not guess and elsewhere:
        guess = f"did you mean {elsewhere}?"
    allowed = f"allowed are {', '.join(found.model_fields)}"
    return f"unknown key; {guess or found.unknown_hint or allowed}"


def _form_at(place: Place, form: type[Form]) -> type[Form]:
    for step in place:
        inner = _form_in(form.model_fields[str(step)])
        assert inner is not None, "only forms have keys"
        form = inner
    return form


def _form_in(entry: FieldInfo) -> type[Form] | None:
    """The form as which the value of a key is checked, None where it is a single value."""
    built = (extra.form for extra in entry.metadata if isinstance(extra, Built))
    kind = next(built, entry.annotation)
    kinds = (kind, *get_args(kind))  # X | None
    forms = (one for one in kinds if isinstance(one, type) and issubclass(one, Form))
    return next(forms, None)
