"""YAML as plain data with line numbers, read from a file that may hold anything."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from moebatch.errors import ConfigError, Fault
from moebatch.quoting import is_text, shown, system_reason
from moebatch.spec.files.place import Place, dotted

Lines = Mapping[Place, int]

_MAX_BYTES = 2**20
_MAX_NODES = 20_000
"""Aliases count every time they are used, so that a few lines cannot grow into gigabytes."""
_MAX_DEPTH = 32
_NO_TEXT = "holds half of a surrogate pair, which is no character"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_EXPONENTIAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][+-]?[0-9]+$")
"""Numbers such as 1e-5 and 1.5e3, which YAML 1.1 takes for text: they lack a point, or a sign."""
_OTHER_BASE = re.compile(r"[+-]?(0[0-7_]+|[0-9_]+:.*)$")
"""Texts such as 010 and 12:30, which YAML 1.1 takes for 8 and 750."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlFile:
    """Content of a file whose top level is a mapping."""

    path: Path
    content: Mapping[str, object]
    """Mappings with text keys, lists, text, numbers, true, false and None."""
    lines: Lines
    """Line of every key and list item, counted from 1."""
    words: Mapping[Place, str]
    """Those that YAML takes for true and false, such as no and on, as they were written."""
    faults: tuple[Fault, ...] = ()
    """What is wrong with single values, which are then missing from the content or None."""

    def line_of(self, place: Place) -> int | None:
        """Line of a value, or of the nearest thing around it."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)


def read_yaml(path: Path, *, kind: str) -> YamlFile:
    """Reads a file that should be, say, a ``kind="job file"``.

    Raises ConfigError where nothing more can be said: a missing file, wrong encoding, wrong
    syntax, objects of Python, a top level that is not a mapping. A key given twice is a fault of
    the result, so that it can be shown together with what its reader finds.
    """
    text = _text_of(path, kind)
    node, loader = _compose(path, text)
    if node is None:
        raise ConfigError.at(path, f"the {kind} is empty")
    if not isinstance(node, yaml.MappingNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        line = node.start_mark.line + 1
        raise ConfigError.at(
            path, f"expected a mapping such as `model: …`, found {found}", line=line
        )
    walk = _Walk(path, loader)
    content = walk.value(node, ())
    return YamlFile(
        path=path,
        content=content,
        lines=MappingProxyType(walk.lines),
        words=MappingProxyType(walk.words),
        faults=tuple(walk.faults),
    )


def _text_of(path: Path, kind: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError.at(path, f"no such file; give the path of a {kind}") from None
    except IsADirectoryError:
        raise ConfigError.at(path, f"is a folder; give the path of a {kind}") from None
    except (OSError, ValueError) as error:
        raise ConfigError.at(path, f"cannot be read: {system_reason(error)}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError.at(path, f"more than {_MAX_BYTES} bytes: this is no {kind}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError.at(path, "is not UTF-8 text; save it as UTF-8", line=line) from None


def _compose(path: Path, text: str) -> tuple[yaml.Node | None, yaml.SafeLoader]:
    try:
        loader = yaml.SafeLoader(text)
        return loader.get_single_node(), loader
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"holds a character that YAML does not allow: {shown(chr(error.character))}"
        raise ConfigError.at(path, message, line=line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or "unreadable"
        if problem.startswith("but "):
            problem = f"{error.context} {problem}"
        if r"'\t'" in problem:
            problem = f"{problem}; write spaces, since YAML takes no tab there"
        at_line = None if mark is None else mark.line + 1
        raise ConfigError.at(path, f"wrong YAML syntax: {problem}", line=at_line) from None
    except RecursionError:
        raise ConfigError.at(path, f"nested deeper than {_MAX_DEPTH} levels") from None


def _paired(text: str) -> str:
    """A text in which two escapes may spell one character, as JSON has it and YAML does not."""
    return _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)


class _Walk:
    """Turns nodes into plain data and notes lines and faults on the way."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self.lines: dict[Place, int] = {}
        self.words: dict[Place, str] = {}
        self.faults: list[Fault] = []
        self._path = path
        self._loader = loader
        self._num_nodes = 0

    def value(self, node: yaml.Node, place: Place) -> Any:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES or len(place) > _MAX_DEPTH:
            message = f"more than {_MAX_NODES} values or {_MAX_DEPTH} levels once aliases are used"
            raise ConfigError.at(self._path, message, line=node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, place)
        assert isinstance(node, yaml.ScalarNode), "YAML has three kinds of nodes"
        return self._scalar(node, place)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        self._refuse_tag(node, place, "map")
        content: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault("a key must be plain text", line, place)
                continue
            key = _paired(key_node.value)
            if key_node.tag == _MERGE:
                self._fault("merge keys are not read here; write out the keys", line, (*place, key))
                continue
            if not is_text(key):
                self._fault(_NO_TEXT, line, place)
                continue
            if key in first_lines:
                self._fault(f"given twice, first in line {first_lines[key]}", line, (*place, key))
                continue
            first_lines[key] = self.lines[(*place, key)] = line
            content[key] = self.value(value_node, (*place, key))
        return content

    def _sequence(self, node: yaml.SequenceNode, place: Place) -> list[Any]:
        self._refuse_tag(node, place, "seq")
        items = []
        for index, item in enumerate(node.value):
            self.lines[(*place, index)] = item.start_mark.line + 1
            items.append(self.value(item, (*place, index)))
        return items

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> object:
        kind = node.tag.removeprefix(_TAG)
        if kind == "str" and node.style is None and _EXPONENTIAL.match(node.value):
            return float(node.value)
        if kind in ("int", "float") and _OTHER_BASE.match(node.value):
            return node.value
        if kind == "bool" and node.value.lower() not in ("true", "false"):
            self.words[place] = node.value
        # Dates are text to us: no key takes one, and a text is what the user wrote.
        if kind in ("str", "timestamp", "value", "merge"):
            text = _paired(node.value)
            if not is_text(text):
                self._fault(_NO_TEXT, node.start_mark.line + 1, place)
                return text.encode("utf-8", "replace").decode()
            return text
        self._refuse_tag(node, place, "null", "bool", "int", "float")
        try:
            return self._loader.construct_object(node)
        except (ValueError, KeyError, ArithmeticError, yaml.YAMLError):
            self._fault(f"cannot be read as {kind}", node.start_mark.line + 1, place)
            return None

    def _refuse_tag(self, node: yaml.Node, place: Place, *allowed: str) -> None:
        if node.tag.removeprefix(_TAG) not in allowed:
            message = f"the tag {shown(node.tag)} is not allowed here; write plain YAML"
            self._fault(message, node.start_mark.line + 1, place)
            raise ConfigError(self.faults)

    def _fault(self, message: str, line: int, place: Place) -> None:
        where = dotted(place)
        self.faults.append(
            Fault(file=str(self._path), message=message, line=line, where=where or None)
        )


def as_yaml(content: Mapping[str, object]) -> str:
    """YAML that `read_yaml` reads as the same plain data, the innermost mappings in one line."""
    return yaml.dump(
        dict(content),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=10**6,
    )


class _Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e5, which are numbers to `read_yaml` though not to YAML 1.1."""


_Dumper.add_implicit_resolver(f"{_TAG}float", _EXPONENTIAL, None)
