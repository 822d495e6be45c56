"""CSV and TSV, plain or compressed, as a stream of raw rows: the first line names the columns."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from moebatch.errors import InputError
from moebatch.rows.lines import MAX_LINE_BYTES, without_mark
from moebatch.rows.parse import PLAIN_PARAMETERS
from moebatch.rows.refused import RowRefused
from moebatch.rows.row import RawRow, require_different
from moebatch.rows.strict_json import parse
from moebatch.spec.request import RowError
from moebatch.units import count_of, format_bytes

SUFFIXES: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
"""Of names, with what usually stands between cells."""
WRONG_CELLS = "wrong_number_of_cells"
"""Code of rows that have more or fewer cells than there are columns."""
_SEPARATORS = ",;\t"
_QUOTED = re.compile('"[^"]*"?')
_AS_JSON = PLAIN_PARAMETERS | {"messages"}


def separated_rows(path: Path, stream: BinaryIO, usual: str) -> Iterator[RawRow]:
    """One for each row behind the first line, whose cells are text; but cells of parameters, and of
    messages, are what they say as JSON, and nothing where they are empty. Cells are apart by the
    `usual` of comma, semicolon and tab, or another one if the first line has that only.

    Raises InputError where quotes or bytes cannot be read: rows behind would not be told apart.
    """
    # Python's own limit for the whole process, 128 KiB, is shorter than prompts are.
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = _lines(path, stream)
    num_blank, first = next((one for one in enumerate(lines) if one[1].strip()), (0, ""))
    marks = [mark for mark in _QUOTED.sub("", first) if mark in _SEPARATORS]
    separator = usual if usual in marks or not marks else marks[0]
    reader = csv.reader(chain((first,), lines), delimiter=separator, strict=True)
    names: Sequence[str] | None = None
    begin, index = num_blank + 1, 0
    try:
        for cells in reader:
            if cells and names is None:
                names = cells
                require_different(path, names)
            elif cells and names is not None:
                yield RawRow(index=index, line=begin, content=_content(names, cells))
                index += 1
            begin = num_blank + reader.line_num + 1
    except csv.Error as error:
        fault, *_ = str(error).split(" - ")  # what follows is advice for programs
        raise InputError.at(
            path, f"the row that begins here is no CSV: {fault}", line=begin
        ) from None


def _content(names: Sequence[str], cells: Sequence[str]) -> Mapping[str, object] | RowError:
    if len(cells) != len(names):
        have, need = count_of(len(cells), "cell"), count_of(len(names), "column")
        message = f"has {have}, the first line names {need}"
        return RowError(status=400, code=WRONG_CELLS, message=message)
    pairs = zip(names, cells, strict=True)
    return {name: _as_json(cell) if name in _AS_JSON else cell for name, cell in pairs}


def _as_json(cell: str) -> object:
    try:
        return parse(cell.encode()) if cell else None
    except RowRefused:
        return cell


def _lines(path: Path, stream: BinaryIO) -> Iterator[str]:
    """With the ends that they have, which may stand in a cell."""
    number = 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            limit = format_bytes(MAX_LINE_BYTES)
            raise InputError.at(path, f"is longer than {limit}, the most that is read", line=number)
        try:
            yield (without_mark(path, data) if number == 1 else data).decode()
        except UnicodeDecodeError as error:
            message = f"is not UTF-8 (byte {error.start + 1} of the line); save it as UTF-8"
            raise InputError.at(path, message, line=number) from None
