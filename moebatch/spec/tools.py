"""Tools that a model may call, and whether it may, must or must not.

Each check takes a parameter as JSON or YAML gave it. It raises ValueError with what is allowed and
what was found, ready to stand behind the parameter's name; of a part it begins with a bracket.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from moebatch.quoting import not_one_of, shown
from moebatch.spec.grammar import Grammar, entries

_EXAMPLE = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
_NO_PARAMETERS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may ask its user to call."""

    text: str
    """A JSON list of them, each as OpenAI's interface has it."""

    @property
    def definitions(self) -> tuple[Mapping[str, Any], ...]:
        """The entries of the list."""
        return tuple(json.loads(self.text))

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """By the name of each function, the JSON schema of an object with its arguments."""
        functions = [each["function"] for each in self.definitions]
        schemas = {each["name"]: each.get("parameters", _NO_PARAMETERS) for each in functions}
        return {name: {"type": "object", **schema} for name, schema in schemas.items()}

    def __str__(self) -> str:
        """All of them: two that look alike are alike."""
        return self.text


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called."""

    kind: Literal["none", "auto", "required", "function"]
    """none: the model is not even told of them. auto: as it likes. required: at least one is.
    function: one is."""
    name: str = ""
    """Of the function, where it is one."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


AUTO = ToolChoice("auto")
_CHOICES = {each.kind: each for each in (ToolChoice("none"), AUTO, ToolChoice("required"))}


def tools(value: object) -> Tools | None:
    """As OpenAI has them; the list and schemas of parameters may be JSON as text, as they have to
    be where a table's columns have types."""
    value = _from_text(value)
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list of tools such as {_EXAMPLE}, got {shown(value)}")
    found = [_tool(entry, f"[{place}]") for place, entry in enumerate(value)]
    names = Counter(entry["function"]["name"] for entry in found)
    name, times = max(names.items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise ValueError(f"holds {times} functions named {shown(name)}; a name must be unique")
    try:
        text = json.dumps(found, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must hold JSON, but {error}") from None
    return Tools(text) if found else None


def tool_choice(value: object) -> ToolChoice:
    """As OpenAI has it: ``none``, ``auto``, ``required`` or a function by its name."""
    if isinstance(value, str) and value in _CHOICES:
        return _CHOICES[value]
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(value, Mapping) and value.get("type") == "function" and _is_name(name):
        return ToolChoice("function", name)
    by_name = '{"type": "function", "function": {"name": …}}'
    raise ValueError(not_one_of((*_CHOICES, by_name), value))


def grammar_of_calls(tools: Tools, choice: ToolChoice, *, several: bool) -> Grammar:
    """What an answer is that must call a tool, as vLLM has it: the arguments of the function that
    was asked for, or a list of calls, each with ``name`` and ``parameters``."""
    schemas = tools.parameters
    if choice.kind == "function":
        return Grammar("schema", json.dumps(schemas[choice.name], ensure_ascii=False))
    kept = {str(place): _moved(each, place) for place, each in enumerate(schemas.values())}
    calls = [_call(name, f"#/$defs/{place}") for place, name in enumerate(schemas)]
    most = {} if several else {"maxItems": 1}
    listed = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": kept}
    return Grammar("schema", json.dumps(listed, ensure_ascii=False))


def _call(name: str, reference: str) -> Mapping[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": reference}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: int) -> Any:
    """A schema that has become a part of another one: what it refers to within itself lies
    deeper."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(each, place) for key, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{place}{reference[1:]}"
    return moved


def _tool(entry: object, where: str) -> dict[str, Any]:
    """What tables fill with null is not said."""
    said = entries(entry, _EXAMPLE, part=where)
    if said.get("type") != "function":
        raise ValueError(f"{where}.type must be function, got {shown(said.get('type'))}")
    of_function = '{"name": …, "parameters": {…}}'
    function = entries(said.get("function"), of_function, part=f"{where}.function")
    if not _is_name(function.get("name")):
        found = shown(function.get("name"))
        raise ValueError(f"{where}.function.name must be a text, got {found}")
    if "parameters" in function:
        schema = function["parameters"] = _from_text(function["parameters"])
        if not isinstance(schema, Mapping):
            must = f"{where}.function.parameters must be a JSON schema, which is a mapping"
            raise ValueError(f"{must}, got {shown(schema)}")
    return {**said, "function": function}


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _from_text(value: object) -> object:
    """What a text stands for, if it is JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
