"""What an answer must look like: a grammar that every token has to go with.

Each check takes a parameter as JSON or YAML gave it. It raises ValueError with what is allowed and
what was found, ready to stand behind the parameter's name.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from moebatch.quoting import not_one_of, shown


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as text; whether it can be compiled is only known where a tokenizer is."""

    kind: Literal["schema", "regex", "choice", "lark"]
    text: str
    """A JSON schema, a regular expression, a JSON list of texts, or a grammar in Lark's form."""

    @property
    def most_tokens(self) -> int | None:
        """Tokens that no answer has more of, with the one that ends it: each but that has a byte at
        least. None where there is no such number."""
        if self.kind != "choice":
            return None
        return 1 + max(len(text.encode()) for text in json.loads(self.text))

    def __str__(self) -> str:
        """All of it: two that look alike are alike."""
        return f"{self.kind} {self.text}"


_OBJECT = Grammar("schema", '{"type": "object"}')
_KINDS: Mapping[str, Grammar | None] = {"text": None, "json_object": _OBJECT}


def response_format(value: object) -> Grammar | None:
    """As OpenAI has it: ``text``, ``json_object`` or ``json_schema``."""
    said = entries(value, '{"type": "json_object"}')
    kind = said.get("type")
    if kind == "json_schema":
        return _named_schema(said.get("json_schema"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"has a type that {not_one_of((*_KINDS, 'json_schema'), kind)}")
    _only(said, ("type",))
    return _KINDS[kind]


def structured_outputs(value: object) -> Grammar | None:
    """As vLLM has it: one of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object``."""
    said = entries(value, '{"choice": ["yes", "no"]}')
    _only(said, _STRUCTURED)
    if len(said) != 1:
        raise ValueError(f"must have one of {', '.join(_STRUCTURED)}, got {shown(list(said))}")
    (name, given), *_ = said.items()
    return _STRUCTURED[name](given)


def _named_schema(value: object) -> Grammar:
    if not isinstance(value, Mapping) or value.get("schema") is None:
        example = '{"name": …, "schema": {…}}'
        raise ValueError(f"must have json_schema such as {example}, got {shown(value)}")
    _only(value, ("name", "description", "schema", "strict"), of=" of json_schema")
    return _schema(value["schema"])


def entries(value: object, example: str, *, part: str = "") -> dict[str, object]:
    """What is said, in a part of the parameter if it has a name; tables fill with null what a row
    does not have."""
    if not isinstance(value, Mapping):
        must = f"{part} must".lstrip()
        raise ValueError(f"{must} be a mapping such as {example}, got {shown(value)}")
    return {str(key): entry for key, entry in value.items() if entry is not None}


def _only(said: Mapping[str, object], allowed: Iterable[str], *, of: str = "") -> None:
    for name in said:
        if name not in allowed:
            raise ValueError(f"has a key{of} that {not_one_of(allowed, name)}")


def _schema(value: object) -> Grammar:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"must hold a JSON schema, but {shown(value)} is none: {error}"
            ) from None
    if not isinstance(value, Mapping | bool):
        raise ValueError(f"must hold a JSON schema, which is a mapping, got {shown(value)}")
    try:
        return Grammar("schema", json.dumps(value, allow_nan=False, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must hold a JSON schema, which is JSON, but {error}") from None


def _text_of(kind: Literal["regex", "lark"]) -> Callable[[object], Grammar]:
    def check(value: object) -> Grammar:
        if isinstance(value, str) and value:
            return Grammar(kind, value)
        raise ValueError(f"must hold a text, got {shown(value)}")

    return check


def _choice(value: object) -> Grammar:
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) and v for v in value):
        return Grammar("choice", json.dumps(value, ensure_ascii=False))
    raise ValueError(f"must hold a list of texts to choose from, none empty, got {shown(value)}")


def _any_object(value: object) -> Grammar | None:
    if isinstance(value, bool):
        return _OBJECT if value else None
    raise ValueError(f"must have json_object true or false, got {shown(value)}")


_STRUCTURED: Mapping[str, Callable[[object], Grammar | None]] = {
    "json": _schema,
    "regex": _text_of("regex"),
    "choice": _choice,
    "grammar": _text_of("lark"),
    "json_object": _any_object,
}
