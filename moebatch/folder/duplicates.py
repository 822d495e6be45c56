"""Rows that have the name of an earlier row: an answer under it would be taken for that one's."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from moebatch.folder.results import Answered
from moebatch.folder.row_key import name_hash
from moebatch.rows.parse import ANY_ROW, RowRules, parse_row
from moebatch.rows.row import RawRow, Row, Source
from moebatch.spec.request import RowError

DUPLICATE = "duplicate_custom_id"
"""Code of rows whose custom_id is that of an earlier one."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Which rows of an input these are: of several with one name all but the first."""

    first: Mapping[str, Row] = field(default_factory=dict)
    """The first rows, by the names that are there more than once."""
    rules: RowRules = ANY_ROW
    """By which rows have their names."""

    def __bool__(self) -> bool:
        return bool(self.first)

    def error_of(self, raw: RawRow) -> RowError | None:
        """What is wrong with a row, None if it is no duplicate."""
        if not self.first:
            return None
        name = parse_row(raw, self.rules).row.custom_id
        first = None if name is None else self.first.get(name)
        if first is None or first.index == raw.index:
            return None
        message = f"custom_id {first.custom_id!r:.80} is already that of {first.place}"
        return RowError(status=400, code=DUPLICATE, message=message, param="custom_id")


NO_DUPLICATES = Duplicates()


def find_duplicates(source: Source, names: "array[int]", rules: RowRules) -> Duplicates:
    """Those of an input whose rows have names of these hashes by the `rules` of the job, in order;
    0 is no name.

    Looks at the input again only if hashes are equal, which alone proves nothing.
    """
    suspects = _repeated(names)
    if not suspects:
        return NO_DUPLICATES
    first: dict[str, Row] = {}
    repeated: dict[str, Row] = {}
    for raw in source:
        if raw.index >= len(names) or names[raw.index] not in suspects:
            continue
        row = parse_row(raw, rules).row
        if row.custom_id is None:
            continue
        if first.setdefault(row.custom_id, row) is not row:
            repeated[row.custom_id] = first[row.custom_id]
    return Duplicates(repeated, rules)


def recorded_duplicates(source: Source, answered: Answered, rules: RowRules) -> Duplicates:
    """Those of an input as far as its rows are known from earlier runs. Of a row that is known to
    repeat a name the first one may not be known yet: another shard may have it."""
    names, known_repeats = array("Q"), False
    for raw in source:
        found = answered.of(raw)
        repeating = None if found else answered.of(raw, is_duplicate=True)
        known_repeats |= repeating is not None
        known = found or repeating
        names.append(known.name if known else 0)
    if known_repeats:
        for raw in source:
            if raw.index < len(names) and not names[raw.index]:
                names[raw.index] = name_hash(parse_row(raw, rules).row.custom_id)
    return find_duplicates(source, names, rules)


def _repeated(names: "array[int]") -> set[int]:
    """Hashes that occur more than once. Numpy sorts a copy, eight bytes each."""
    import numpy as np

    hashes = np.array(names, dtype=np.uint64)
    hashes.sort()
    return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist()) - {0}
