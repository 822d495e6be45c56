"""Rows as they stand in the input, not yet understood."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moebatch.errors import Fault, InputError
from moebatch.spec.request import RowError


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow:
    """One row."""

    index: int
    """Place among the rows, counted from 0; blank lines are no rows."""
    line: int | None
    """Line in the file, counted from 1; None where the file has no lines."""
    content: bytes | Mapping[str, object] | RowError
    """The line, the columns, or why the row could not even be read."""


class Source(Protocol):
    """An input that can be read from its beginning as often as needed, in constant memory."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    def __iter__(self) -> Iterator[RawRow]:
        """The rows in order. Raises InputError where the file is damaged or was changed."""


def refusal(
    path: Path, message: str, *, line: int | None = None, code: str | None = None
) -> InputError:
    """The whole input is unusable for one reason."""
    return InputError([Fault(file=str(path), message=message, line=line, code=code)])
