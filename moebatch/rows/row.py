"""What is known of a row while it travels from the input to the output."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from moebatch.errors import Fault, InputError
from moebatch.quoting import shown
from moebatch.spec.request import Request, RowError


class Base64(str):
    """What stands for bytes of a table, which JSON cannot hold. Models are not given it as text."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbered:
    index: int
    """Place among the rows, counted from 0; blank lines are no rows."""
    line: int | None = None
    """Line in the file, counted from 1; None where the file has no lines."""

    @property
    def place(self) -> str:
        """``line 3``, or ``row 3`` where there are no lines."""
        return f"row {self.index + 1}" if self.line is None else f"line {self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow(_Numbered):
    """One row."""

    content: bytes | Mapping[str, object] | RowError
    """The line, the columns, or why the row could not even be read."""


class Source(Protocol):
    """An input that can be read from its beginning as often as needed, in constant memory."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    def __iter__(self) -> Iterator[RawRow]:
        """The rows in order. Raises InputError where the file is damaged or was changed."""


def require_different(path: Path, names: Sequence[str]) -> None:
    """Of columns with the same name a row would have the last one only: raises InputError."""
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise InputError.at(
            path, f"has {times} columns named {shown(name)}; give each a name of its own"
        )


def no_rows(file: str) -> Fault:
    """What is wrong with an input that has nothing to answer."""
    return Fault(file=file, message="holds no rows", code="empty_file")


Dialect = Literal["openai", "plain"]
Kind = Literal["chat", "completion"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(_Numbered):
    """What the writer needs to know of a row; small enough to keep while the row is computed."""

    custom_id: str | None = None
    """The user's name of the row; None where it could not be read."""
    dialect: Dialect | None = None
    """How the row is written; None where it could not be told."""
    kind: Kind = "chat"
    """What the row asks for."""
    model: str | None = None
    """The model name that the row asked for."""
    is_named: bool = False
    """Whether the name is the row's own; otherwise it is its place."""
    is_bare: bool = False
    """Whether its prompt is text that the model gets as it stands, without a chat template, though
    no API was asked for that."""
    misspelt: tuple[str, ...] = ()
    """Columns that are none of its parameters, though their names are nearly those of some."""
    columns: bytes = b""
    """A plain row as JSON, for the output; empty for batch lines, whose answers repeat nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages and how the chat template is to render them."""

    messages: tuple[Mapping[str, object], ...]
    """Each with role and content, which is text; other keys are for the template."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """``chat_template_kwargs`` of the row."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the model may call."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRow:
    """A row that is well-formed; whether model and context can take it is not yet known."""

    row: Row
    prompt: Prompt
    parameters: Mapping[str, object]
    """Everything else of the request, unchecked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyRow:
    """A row that can be computed."""

    row: Row
    request: Request


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRow:
    """A row that cannot be computed, and why."""

    row: Row
    error: RowError
