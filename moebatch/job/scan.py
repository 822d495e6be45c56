"""One pass over the input before anything runs: how many rows, of which kind, and what is wrong."""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from moebatch.errors import Fault, InputError
from moebatch.folder.duplicates import NO_DUPLICATES, Duplicates, find_duplicates
from moebatch.folder.results import Answered
from moebatch.folder.row_key import name_hash
from moebatch.folder.shard import ALL, Shard
from moebatch.rows.parse import (
    ANY_ROW,
    COLUMN_TAKEN,
    MODEL_MISMATCH,
    NO_PROMPT,
    RowRules,
    parse_row,
)
from moebatch.rows.repeats import Beginnings, RepeatCounter
from moebatch.rows.row import (
    Dialect,
    FailedRow,
    ParsedRow,
    RawRow,
    ReadyRow,
    Row,
    Source,
    no_rows,
)
from moebatch.rows.separated import WRONG_CELLS
from moebatch.rows.strict_json import NOT_JSON
from moebatch.rows.tokenizer import NO_CHAT_TEMPLATE
from moebatch.spec.request import Request
from moebatch.spec.workload import Length, LengthSample, Workload

_MOST_MISSPELT = 5
_OF_ALL_ROWS = frozenset({NO_PROMPT, MODEL_MISMATCH, NOT_JSON, WRONG_CELLS})
"""Codes of what is a mistake in the job file, or another kind of file, if no row can be answered
and that is why."""
Read = Callable[[RawRow], ParsedRow | ReadyRow | FailedRow]
"""`RowReader.parse`, or `RowReader.request` to try the tokenizer on every row as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a look at an input goes by. Of rows that are `answered`, or of another `shard`, only the
    names are looked at: of rows with the same name all but the first are bad."""

    rules: RowRules = ANY_ROW
    """By which rows are read."""
    shares: bool = True
    """Rows, and beginnings of prompts, are looked for that need to be computed once only."""
    shard: Shard = ALL
    answered: Answered | None = None
    most_faults: int = 100
    """So many are kept; all are counted."""


@dataclass(kw_only=True, slots=True)
class InputSummary:
    """What the input holds, as far as it has been looked at."""

    file: str
    asked: Asked
    duplicates: Duplicates = NO_DUPLICATES
    """Rows with the name of an earlier one."""
    names: "array[int]" = field(default_factory=lambda: array("Q"))
    """Hashes of the names of all rows."""
    num_rows: int = 0
    """Those to do, whether they have an answer already or not: all, or those of a shard."""
    num_done: int = 0
    """Rows of those to do that have an answer from an earlier run; no other count has them."""
    num_bad_rows: int = 0
    """Rows that get an error as their answer."""
    is_left: bytearray = field(default_factory=bytearray)
    """By the place of a row, whether it is to be answered: 1 or 0."""
    num_unlisted: int = 0
    """Bad rows of which no fault was kept."""
    first_chat: Row | None = None
    """The first row with messages, None if there is none: without one, no template is needed."""
    first_bare: Row | None = None
    """The first row whose prompt goes to the model without a chat template, though no API was asked
    for that; None if there is none."""
    misspelt: dict[str, Row] = field(default_factory=dict)
    """Columns with nearly the names of parameters, as far as they are kept, and the first row that
    has each."""
    num_repeated: int = 0
    """Good rows that get the answer of an earlier one."""
    _faults: list[Fault] = field(default_factory=list)
    _dialect: Dialect | None = None
    _first_taken: Fault | None = None
    _num_unreadable: int = 0
    """Bad rows of all shards: one may well have no other rows."""
    _first_of_all: dict[str, FailedRow] = field(default_factory=dict)
    _num_of_all: Counter[str] = field(default_factory=Counter)
    _max_total_tokens: int = 0
    _max_new_tokens: int = 0
    _takes_likeliest: bool = True
    _num_held: int = 0
    _lengths: LengthSample = field(default_factory=LengthSample)
    _beginnings: Beginnings = field(default_factory=Beginnings)
    _repeats: RepeatCounter = field(default_factory=RepeatCounter)

    def require_usable(self, *, every_row: bool = False) -> None:
        """Raises InputError if nothing can be run, or if `every_row` must be good and is not."""
        if self.whole:
            raise InputError(self.whole)
        if every_row and self.faults:
            message = f"and {self.num_unlisted} more bad rows"
            rest = [Fault(file=self.file, message=message)] * (self.num_unlisted > 0)
            raise InputError([*self.faults, *rest])

    @property
    def dialect(self) -> Dialect:
        """That of the first row that has one, whatever was done before; bad rows of no dialect are
        written in it."""
        return self._dialect or "openai"

    @property
    def repeated(self) -> Mapping[int, int]:
        """What `Repeats` needs to know of rows that get the answer of an earlier one."""
        return self._repeats.repeated

    @property
    def whole(self) -> tuple[Fault, ...]:
        """Why nothing can be run, if so. It is said once instead of for each row."""
        num_rows = len(self.is_left)
        if not num_rows:
            return (no_rows(self.file),)
        (code, num_alike), *_ = [*self._num_of_all.most_common(1), ("", 0)]
        if self._num_unreadable < num_rows or 2 * num_alike < num_rows:
            return (self._first_taken,) if self._first_taken else ()
        fault = fault_of(self._first_of_all[code], self.file)
        more = f"; so it is with {num_alike} of {num_rows} rows" * (num_rows > 1)
        return (replace(fault, message=fault.message + more),)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What is wrong with single rows, as far as it was kept, beside why nothing can be run."""
        whole = self.whole
        return tuple(one for one in self._faults if not whole or one.code != whole[0].code)

    @property
    def workload(self) -> Workload | None:
        """Lengths of prompts and answers; None if rows were only parsed, or none is good. Of rows
        that are answered once, one counts."""
        lengths = self._lengths
        if not lengths.num_sequences:
            return None
        return Workload(
            num_sequences=lengths.num_sequences,
            mean_prompt_tokens=lengths.num_prompt_tokens / lengths.num_sequences,
            mean_new_tokens=lengths.mean_new_tokens,
            mean_shared_tokens=lengths.num_shared_tokens / lengths.num_sequences,
            max_total_tokens=self._max_total_tokens,
            max_new_tokens=self._max_new_tokens,
            takes_likeliest=self._takes_likeliest,
            share_held=self._num_held / lengths.num_sequences,
            lengths=tuple(lengths.kept),
        )

    def take(self, raw: RawRow, read: Read) -> None:
        """Looks at the next row."""
        asked = self.asked
        if self._dialect is None:
            self._dialect = parse_row(raw, asked.rules).row.dialect
        error, is_ours = self.duplicates.error_of(raw), asked.shard.has(raw.index)
        found = asked.answered.of(raw) if asked.answered and error is None else None
        # Rows that failed are tried again.
        name = found.name if found is not None and found.state == "done" else None
        self.is_left.append(is_ours and name is None)
        if name is None:
            reads = is_ours and error is None
            result = read(raw) if reads else parse_row(raw, asked.rules)
            name = name_hash(result.row.custom_id)
            if error is not None:
                result = FailedRow(row=result.row, error=error)
            if isinstance(result, FailedRow) and result.error.code != NO_CHAT_TEMPLATE:
                self._add_unreadable(result)
            if is_ours:
                self.add(result)
        elif is_ours:
            self.num_rows += 1
            self.num_done += 1
        self.names.append(name)

    def add(self, result: ParsedRow | ReadyRow | FailedRow) -> None:
        """Counts a row that is to be answered."""
        row = result.row
        self.num_rows += 1
        no_template = isinstance(result, FailedRow) and result.error.code == NO_CHAT_TEMPLATE
        if isinstance(result, FailedRow) and not no_template:
            self._add_bad(result)
            return
        if row.kind == "chat":
            self.first_chat = self.first_chat or row
        if row.is_bare:
            self.first_bare = self.first_bare or row
        for name in row.misspelt:
            if len(self.misspelt) < _MOST_MISSPELT:
                self.misspelt.setdefault(name, row)
        if isinstance(result, ReadyRow):
            self._add_good(result.request)

    def _add_good(self, request: Request) -> None:
        if self.asked.shares and self._repeats.add(request):
            self.num_repeated += 1
            return
        sampling, num_prompt = request.sampling, len(request.prompt_tokens)
        longest = num_prompt + sampling.max_tokens
        self._max_total_tokens = max(self._max_total_tokens, longest)
        self._max_new_tokens = max(self._max_new_tokens, sampling.max_tokens)
        self._takes_likeliest &= sampling.takes_likeliest
        self._num_held += sampling.n * (sampling.grammar is not None)
        for choice in range(sampling.n):
            shared = self._beginnings.add(request.prompt_tokens) if self.asked.shares else 0
            known = num_prompt + request.num_begun(choice)
            self._lengths.add(Length(known, longest - known, shared))

    def _add_bad(self, bad: FailedRow) -> None:
        self.num_bad_rows += 1
        if len(self._faults) < self.asked.most_faults:
            self._faults.append(fault_of(bad, self.file))
        else:
            self.num_unlisted += 1

    def _add_unreadable(self, bad: FailedRow) -> None:
        """Counts a bad row of any shard, for what is a fault of the whole input."""
        code = bad.error.code
        self._num_unreadable += 1
        if code == COLUMN_TAKEN:
            self._first_taken = self._first_taken or fault_of(bad, self.file)
        if code in _OF_ALL_ROWS:
            self._num_of_all[code] += 1
            self._first_of_all.setdefault(code, bad)


_USUAL = Asked()


def scan(source: Source, read: Read, asked: Asked = _USUAL) -> InputSummary:
    """Reads all rows, in memory of a few bytes per row. Raises InputError if the source is
    damaged."""

    def look(duplicates: Duplicates) -> InputSummary:
        summary = InputSummary(file=str(source.path), asked=asked, duplicates=duplicates)
        for raw in source:
            summary.take(raw, read)
        return summary

    first = look(NO_DUPLICATES)
    duplicates = find_duplicates(source, first.names, asked.rules)
    return look(duplicates) if duplicates else first


def sample_workload(source: Source, parse: Read, request: Read, *, most_rows: int) -> Workload:
    """Lengths of the rows, of which at most about `most_rows` are tokenised: every k-th.

    Raises InputError if the source is damaged or holds no row that can be run.
    """
    parsed = scan(source, parse)
    parsed.require_usable()
    every = -(-parsed.num_rows // most_rows)
    sampled = InputSummary(file=str(source.path), asked=Asked(most_faults=1))
    for raw in islice(source, 0, None, every):
        sampled.add(request(raw))
    workload = sampled.workload
    if workload is None:
        none_good = Fault(file=sampled.file, message="no row that was looked at can be run")
        raise InputError(sampled.faults or [none_good])
    share = parsed.num_rows / sampled.num_rows
    return replace(workload, num_sequences=round((workload.num_sequences or 0) * share))


def fault_of(bad: FailedRow, file: str) -> Fault:
    """What is wrong with a row, as a finding in its file."""
    row = bad.row
    return Fault(
        file=file,
        line=row.line,
        where=row.place if row.line is None else None,
        message=bad.error.message,
        code=bad.error.code,
    )
