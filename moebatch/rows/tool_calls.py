"""Calls of tools, read from what a model has written.

Models write them in forms of their own. Which one a model has is seen from its chat template, which
shows calls to it in that form; a form is an entry of `FORMS`.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from moebatch.rows.refused import RowRefused
from moebatch.rows.strict_json import parse
from moebatch.spec.request import Choice, Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.tools import ToolChoice, Tools

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
"""Types of JSON schemas, but for those of values that have parts."""


class Call(NamedTuple):
    """Of one function."""

    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    """As the model has it; None where it gives none."""


class Spelled(NamedTuple):
    """Text of some tokens, special ones by their name."""

    text: str
    shows: bytes
    """For each of its characters, 0 where it belongs to the name of a special token, else 1."""


Spell = Callable[[Sequence[int]], Spelled]
Calls = Iterator[Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a model writes calls."""

    signs: tuple[str, ...]
    """What is in chat templates that have this form, and not in those of a form further down."""
    call: re.Pattern[str]
    """Everything from where a call begins to its end, or to that of the text where it has none."""
    calls: Callable[[re.Match[str], Tools], Calls]
    """Those of a match. Raises ValueError or RowRefused if it is none."""
    around: re.Pattern[str] | None = None
    """Marks around all calls."""
    headers: tuple[str, ...] = ()
    """Text with which a thought ends because a call begins."""
    ends: tuple[str, ...] = ()
    """Tokens with which an answer ends that is a call."""


class Said(NamedTuple):
    """An answer with what may be calls."""

    calls: tuple[Call, ...]
    """None if one cannot be read, since it was cut off or is malformed."""
    text: str
    """What else it says; all of it, with special tokens by their name, where there are no calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallReader:
    """Reads calls in what a model has answered."""

    form: Form | None
    """Of the model; None if it is not known."""
    spell: Spell

    def read(self, choice: Choice, request: Request, *, with_thought: bool) -> Said | None:
        """The calls of an answer, whose text begins with what was thought or does not; None if it
        begins no call."""
        tools, form = request.sampling.offered, _form_asked_for(request.sampling) or self.form
        if tools is None or form is None:
            return None
        said, thought = choice.said, request.thought(choice.said)
        stop, end = (0, 0) if thought is None else (thought.stop, thought.end)
        if end is None:
            return None
        start = stop if form.headers else end
        header, rest = self.spell(said[start:end]), self.spell(said[end:])
        behind = Spelled(header.text + rest.text, bytes(len(header.text)) + rest.shows)
        if isinstance(choice.stop_reason, str):
            behind = _cut_off(behind, choice.stop_reason)
        found = _read(form, behind, tools)
        if found is None or not with_thought:
            return found
        before = self.spell(said[:start])
        return found._replace(text="".join(compress(*before)) + found.text)


def form_of(template: str, has_token: Callable[[str], bool]) -> Form | None:
    """That of a model with such a chat template and vocabulary; None if it is not known."""
    for form in FORMS:
        if all(sign in template for sign in form.signs) and all(map(has_token, form.ends)):
            return form
    return None


def _read(form: Form, spelled: Spelled, tools: Tools) -> Said | None:
    matches = list(form.call.finditer(spelled.text))
    try:
        calls = tuple(call for match in matches for call in form.calls(match, tools))
    except (ValueError, RowRefused, RecursionError):
        calls = ()
    if not matches:
        return None
    if not calls or not all(call.name for call in calls):
        return Said((), spelled.text)
    shows = bytearray(spelled.shows)
    for match in (*matches, *(form.around.finditer(spelled.text) if form.around else ())):
        start, stop = match.span()
        shows[start:stop] = bytes(stop - start)
    return Said(calls, "".join(compress(spelled.text, shows)))


def _cut_off(spelled: Spelled, stop: str) -> Spelled:
    """Without the stop text that has ended it."""
    end = spelled.text.rfind(stop)
    return spelled if end < 0 else Spelled(spelled.text[:end], spelled.shows[:end])


# --- calls that are JSON -------------------------------------------------------------------------


def _call(
    said: Any, arguments: str = "arguments", *, name: str = "name", identity: str = "id"
) -> Call:
    """Of an object with the name of a function and its arguments, each under a key."""
    if not isinstance(said, dict) or not isinstance(said.get(name), str):
        raise ValueError("it names no function")
    known = said.get(identity)
    known = known if isinstance(known, str) and known else None
    return Call(said[name], _dumped(said.get(arguments, {})), known)


def _json(text: str) -> Any:
    return parse(text.strip().encode())


def _list(text: str) -> list[Any]:
    value = _json(text)
    if not isinstance(value, list):
        raise ValueError("it is no list")
    return value


def _object(text: str) -> str:
    """A JSON object as the interface has it."""
    return _dumped(_json(text))


def _dumped(value: Any) -> str:
    if isinstance(value, str):  # some models quote the object
        value = _json(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _tagged(match: re.Match[str], tools: Tools) -> Calls:
    yield _call(_json(match[1]))


def _lines(match: re.Match[str], tools: Tools) -> Calls:
    """A call on each line, or a list of calls."""
    body = match[1].strip()
    said = _list(body) if body.startswith("[") else map(_json, filter(str.strip, body.split("\n")))
    yield from map(_call, said)


def _cohere(match: re.Match[str], tools: Tools) -> Calls:
    names = {"name": "tool_name", "identity": "tool_call_id"}
    yield from (_call(each, "parameters", **names) for each in _list(match[1]))


def _mistral(match: re.Match[str], tools: Tools) -> Calls:
    """A list of calls; later models write one call behind each mark."""
    body = match[1].strip()
    if body.startswith("["):
        yield from map(_call, _list(body))
        return
    name, _, arguments = body.partition("[ARGS]")
    name, _, identity = name.partition("[CALL_ID]")
    yield Call(name.strip(), _object(arguments), identity.strip() or None)


def _whole_answer(match: re.Match[str], tools: Tools) -> Calls:
    """Other answers may be JSON as well: a call has the name of a tool and ``parameters``."""
    said = _json(match[1])
    if not isinstance(said, dict) or said.keys() - {"type"} != {"name", "parameters"}:
        raise ValueError("it is no call")
    call = _call(said, "parameters")
    if call.name not in tools.parameters:
        raise ValueError("it is no call of a tool")
    yield call


def _deepseek(match: re.Match[str], tools: Tools) -> Calls:
    """Arguments of V3 and R1 stand in a block of Markdown, behind the type of the tool."""
    head, _, body = match[1].partition("<｜tool▁sep｜>")
    name, fence, block = body.partition("\n```json\n")
    if fence and head.strip() == "function":
        head, body = name, block.rstrip().removesuffix("```")
    yield Call(head.strip(), _object(body))


def _kimi(match: re.Match[str], tools: Tools) -> Calls:
    """What tells calls apart, such as ``functions.name:0``, has the name."""
    identity, _, arguments = match[1].partition("<|tool_call_argument_begin|>")
    name = identity.strip().rpartition(":")[0].removeprefix("functions.")
    yield Call(name, _object(arguments), identity.strip())


def _harmony(match: re.Match[str], tools: Tools) -> Calls:
    yield Call(match["by_role"] or match["by_channel"], _object(match["arguments"]))


def _gemma(match: re.Match[str], tools: Tools) -> Calls:
    """Objects whose keys have no quotes, and whose texts have marks in their place."""
    yield Call(match["name"].strip(), _object(_GEMMA.sub(_quoted, match["arguments"])))


def _quoted(match: re.Match[str]) -> str:
    if match["text"] is not None:
        return json.dumps(match["text"])
    return match[0] if match["key"] is None else json.dumps(match["key"])


# --- calls as Python writes them -----------------------------------------------------------------


class _Words(ast.NodeTransformer):
    """Words of JSON, which some models write within."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _pythonic(match: re.Match[str], tools: Tools) -> Calls:
    """A list of calls whose arguments are literals with names; or of objects, which prompts may ask
    for."""
    body = match[1].strip()
    if body.startswith(("{", "[{")):
        yield from map(_call, _list(body) if body.startswith("[") else [_json(body)])
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = _Words().visit(ast.parse(body, mode="eval")).body
        yield from map(_python_call, tree.elts if isinstance(tree, ast.List) else [tree])
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError("it is no Python") from error


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(not each.arg for each in node.keywords):
        raise ValueError("it is no call, or some arguments have no names")
    values = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    return Call(ast.unparse(node.func), _dumped(values))


# --- calls whose arguments are text between tags -------------------------------------------------


def _spelt(
    match: re.Match[str], tools: Tools, *, argument: re.Pattern[str], ends: str, closes: str
) -> Calls:
    """A name, and arguments that are texts; schemas say what they stand for."""
    name = match["name"].strip()
    *parts, rest = match["body"].split(ends)
    found = [each for each in map(argument.fullmatch, parts) if each]
    if len(found) < len(parts) or rest.strip() or not match[0].endswith(closes):
        raise ValueError("it is cut off, or its tags are those of another form")
    schema = tools.parameters.get(name, {})
    values = {each["name"].strip(): _argument(each, schema) for each in found}
    yield Call(name, json.dumps(values, ensure_ascii=False))


def _argument(match: re.Match[str], schema: Mapping[str, Any]) -> Any:
    """By its tag, where that says whether it is text, else by its schema."""
    is_text = match.groupdict().get("is_text")
    if is_text is None:
        return _typed(match["text"], _part_of(schema, schema, match["name"].strip()), schema)
    return match["text"] if is_text == "true" else _json(match["text"])


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """What a text stands for by its schema, a part of another one; text where that is allowed, or
    nothing else makes sense of it."""
    kinds = frozenset(_kinds(schema, root))
    is_null = text == "null" and "null" in kinds
    if not is_null and (not kinds or "string" in kinds):
        return text
    try:
        value = _json(text)
    except (ValueError, RowRefused):
        word = text.strip().lower()  # some write words of Python
        return {"true": True, "false": False, "none": None}.get(word, text)
    return value


def _kinds(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Types of values that a schema allows, as far as it says so."""
    for each in _ways(schema, root, set()):
        yield from (kind for kind in _listed(each.get("type")) if isinstance(kind, str))
        for value in (*_listed(each.get("enum")), *_listed(each.get("const"))):
            yield _KINDS.get(type(value), "object")


def _part_of(schema: Any, root: Mapping[str, Any], name: str | None) -> Mapping[str, Any]:
    """The schema of a property; of the items of a list where there is no name."""
    if name is None:
        return {"anyOf": [each.get("items") for each in _ways(schema, root, set())]}
    named = (each.get("properties") for each in _ways(schema, root, set()))
    return {"anyOf": [each.get(name) for each in named if isinstance(each, Mapping)]}


def _ways(schema: Any, root: Mapping[str, Any], seen: set[str]) -> Iterator[Mapping[str, Any]]:
    """A schema and those that it is made of. References are followed once."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema.get(key)):
            yield from _ways(each, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        yield from _ways(_found(root, reference[2:].split("/")), root, seen)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _found(root: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


# --- calls whose arguments are elements within elements -----------------------------------------


class _Element(NamedTuple):
    """A tag, what stands behind it, and what is in it before it is closed."""

    name: str
    text: str
    parts: "list[_Element]"


def _nested(match: re.Match[str], tools: Tools) -> Calls:
    """A name, and an element for each argument; parts of objects are elements, too, and entries of
    lists are all called ``item``."""
    name = match["name"].strip()
    if not match["end"]:
        raise ValueError("it is cut off")
    schema = tools.parameters.get(name, {"type": "object"})
    yield Call(name, _dumped(_value(_tree(match["body"]), schema, schema)))


def _tree(body: str) -> _Element:
    """Elements of a text with a mark before each tag, as parts of one without a name."""
    text, *tags = body.split(_MARK)
    opened = [_Element("", text, [])]
    for tag in map(_TAG.fullmatch, tags):
        if tag is None:
            raise ValueError("a mark stands before no tag")
        if not tag["closes"]:
            opened[-1].parts.append(_Element(tag["name"], tag["text"], []))
            opened.append(opened[-1].parts[-1])
        elif opened.pop().name != tag["name"] or tag["text"].strip():
            raise ValueError("a tag closes another element, or text stands behind it")
    if len(opened) > 1:
        raise ValueError("an element is not closed")
    return opened[0]


def _value(element: _Element, schema: Any, root: Mapping[str, Any]) -> Any:
    """What an element stands for by its schema, a part of another one."""
    kinds, names = frozenset(_kinds(schema, root)), [each.name for each in element.parts]
    if not names:
        nothing = not element.text.strip() and "string" not in kinds
        empty = next((each for kind, each in _EMPTY.items() if nothing and kind in kinds), None)
        return _typed(element.text, schema, root) if empty is None else empty
    if element.text.strip():
        raise ValueError("text stands between elements")
    if {*names} == {"item"} and ("array" in kinds or "object" not in kinds):
        of_items = _part_of(schema, root, None)
        return [_value(each, of_items, root) for each in element.parts]
    if len({*names}) < len(names):
        raise ValueError("an object has several parts of one name")
    return {
        each.name: _value(each, _part_of(schema, root, each.name), root) for each in element.parts
    }


# --- calls that were asked for -------------------------------------------------------------------


def _form_asked_for(sampling: Sampling) -> Form | None:
    """Of answers that are held to `grammar_of_calls`; None if the model may write as it likes."""
    if not sampling.must_call:
        return None
    calls = partial(_asked_for, choice=sampling.tool_choice)
    return Form(signs=(), call=_ALL, calls=calls)


def _asked_for(match: re.Match[str], tools: Tools, *, choice: ToolChoice) -> Calls:
    if choice.kind == "function":
        yield Call(choice.name, _object(match[0]))
    else:
        yield from (_call(each, "parameters") for each in _list(match[0]))


_ALL = re.compile(r"\A.+\Z", re.DOTALL)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_MARK = "]<]minimax[>["
_TAG = _pattern(r"<(?P<closes>/?)(?P<name>[^<>]+)>(?P<text>.*)")
_EMPTY: Mapping[str, list[Any] | dict[str, Any]] = {"array": [], "object": {}}
_GEMMA = _pattern(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|"(?:\\.|[^"\\])*"|(?<=[{,])\s*(?P<key>[^\s"{}\[\],:<]+)\s*(?=:)'
)
_HEADERS = ("<|channel|>commentary to", "<|channel|>analysis to", "<|start|>assistant to")
FORMS = (
    Form(  # gpt-oss
        signs=("<|channel|>", "<|call|>", "functions."),
        call=_pattern(
            r"(?:<\|start\|>assistant)?"
            r"(?: ?to=functions\.(?P<by_role>[^\s<]+)\s*<\|channel\|>\w+"
            r"|<\|channel\|>\w+ to=functions\.(?P<by_channel>[^\s<]+))"
            r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(?P<arguments>.*)"
        ),
        calls=_harmony,
        headers=_HEADERS,
        ends=("<|call|>",),
    ),
    Form(  # Gemma 4
        signs=("<|tool_call>", "call:"),
        call=_pattern(
            r"<\|tool_call>(?:call:)?(?P<name>[^{]*)(?P<arguments>.*?)(?:<tool_call\|>|\Z)"
        ),
        calls=_gemma,
        ends=("<|tool_response>",),
    ),
    Form(  # DeepSeek-V3, R1 and V3.1
        signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        call=_pattern(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)"),
        calls=_deepseek,
        around=_pattern(r"<｜tool▁calls▁(?:begin|end)｜>"),
    ),
    Form(  # DeepSeek-V3.2 and V4
        signs=("｜DSML｜", "invoke name="),
        call=_pattern(
            r'<｜DSML｜invoke name="(?P<name>[^">]*)">(?P<body>.*?)(?:</｜DSML｜invoke>|\Z)'
        ),
        calls=partial(
            _spelt,
            argument=_pattern(
                r'\s*<｜DSML｜parameter name="(?P<name>[^">]*)" string="(?P<is_text>true|false)">'
                r"(?P<text>.*)"
            ),
            ends="</｜DSML｜parameter>",
            closes="</｜DSML｜invoke>",
        ),
        around=_pattern(r"</?｜DSML｜(?:(?:function|tool)_calls>|\w*\Z)"),
    ),
    Form(  # Kimi-K2
        signs=("<|tool_calls_section_begin|>",),
        call=_pattern(r"<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)"),
        calls=_kimi,
        around=_pattern(r"<\|tool_calls_section_(?:begin|end)\|>"),
    ),
    Form(  # MiniMax-M3
        signs=(_MARK, "<invoke name="),
        call=_pattern(
            rf'{re.escape(_MARK)}<invoke name="(?P<name>[^">]*)">(?P<body>.*?)'
            rf"(?:(?P<end>{re.escape(_MARK)}</invoke>)|\Z)"
        ),
        calls=_nested,
        around=_pattern(rf"{re.escape(_MARK)}(?:</?tool_call>|[<\w]*\Z)"),
    ),
    Form(  # MiniMax-M2
        signs=("<minimax:tool_call>", "<invoke name="),
        call=_pattern(r'<invoke name="(?P<name>[^">]*)">(?P<body>.*?)(?:</invoke>|\Z)'),
        calls=partial(
            _spelt,
            argument=_pattern(r'\s*<parameter name="(?P<name>[^">]*)">(?P<text>.*)'),
            ends="</parameter>",
            closes="</invoke>",
        ),
        around=_pattern(r"</?minimax:tool_call>"),
    ),
    Form(  # Qwen3-Coder, Qwen3.5, Nemotron 3; Seed's mark has another name
        signs=("<function=", "<parameter="),
        call=_pattern(r"<function=(?P<name>[^>]*)>(?P<body>.*?)(?:</function>|\Z)"),
        calls=partial(
            _spelt,
            # Its tags stand on lines of their own.
            argument=_pattern(r"\s*<parameter=(?P<name>[^>]*)>\n?(?P<text>.*?)\n?"),
            ends="</parameter>",
            closes="</function>",
        ),
        around=_pattern(r"</?(?:seed:)?tool_call>"),
    ),
    Form(  # GLM-4.5 and later
        signs=("<tool_call>", "<arg_key>", "<arg_value>"),
        call=_pattern(r"<tool_call>(?P<name>[^<]*)(?P<body>.*?)(?:</tool_call>|\Z)"),
        calls=partial(
            _spelt,
            argument=_pattern(r"\s*<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>(?P<text>.*)"),
            ends="</arg_value>",
            closes="</tool_call>",
        ),
    ),
    Form(  # Hermes, Qwen3, Granite-4
        signs=("<tool_call>", "arguments"),
        call=_pattern(r"<tool_call>(.*?)(?:</tool_call>|\Z)"),
        calls=_tagged,
    ),
    Form(  # Cohere
        signs=("<|START_ACTION|>", "tool_name"),
        call=_pattern(r"<\|START_ACTION\|>(.*?)(?:<\|END_ACTION\|>|\Z)"),
        calls=_cohere,
    ),
    Form(  # MiniMax-M1, Hunyuan-A13B
        signs=("<tool_calls>", "arguments"),
        call=_pattern(r"<tool_calls>(.*?)(?:</tool_calls>|\Z)"),
        calls=_lines,
    ),
    Form(  # Mistral
        signs=("[TOOL_CALLS]",),
        call=_pattern(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)"),
        calls=_mistral,
    ),
    Form(  # Llama 3 and 4
        signs=("dictionary of argument name and its value",),
        call=_pattern(r"\A\s*(?:<\|python_(?:tag|start)\|>\s*)?(\{.*\})\s*(?:<\|python_end\|>)?\Z"),
        calls=_whole_answer,
    ),
    Form(  # LFM2, whose template shows tools alone
        signs=("List of tools: ", "<|im_start|>"),
        call=_pattern(r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)"),
        calls=_pythonic,
    ),
)
