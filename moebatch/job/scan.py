"""One pass over the input before anything runs: how many rows, of which kind, and what is wrong."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from moebatch.errors import Fault, InputError
from moebatch.folder.row_key import name_hash
from moebatch.folder.todo import EVERYTHING, Todo
from moebatch.rows.beginnings import Beginnings
from moebatch.rows.parse import COLUMN_TAKEN, RowRules, parse_row
from moebatch.rows.raw import RawRow, Source
from moebatch.rows.repeats import RepeatCounter
from moebatch.rows.row import Dialect, FailedRow, ParsedRow, ReadyRow, Row
from moebatch.rows.tokenizer import NO_CHAT_TEMPLATE
from moebatch.spec.request import Request
from moebatch.spec.workload import Length, LengthSample, Workload

MOST_FAULTS = 100
"""So many faults are kept unless told otherwise; all are counted."""
_MOST_SUSPECTS = 10_000
Read = Callable[[RawRow], ParsedRow | ReadyRow | FailedRow]
"""`RowReader.parse`, or `RowReader.request` to try the tokenizer on every row as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSummary:
    """What the input holds."""

    num_rows: int
    """Those to do, whether they have an answer already or not: all, or those of a shard."""
    num_bad_rows: int
    """Rows that get an error as their answer."""
    dialect: Dialect
    """That of the first row that has one, whatever was done before; bad rows of no dialect are
    written in it."""
    first_chat: Row | None
    """The first row with messages, None if there is none: without one, no template is needed."""
    whole: tuple[Fault, ...]
    """Why nothing can be run, if so."""
    faults: tuple[Fault, ...]
    """What is wrong with single rows, as far as they were kept."""
    workload: Workload | None
    """Lengths of prompts and answers; None if rows were only parsed, or none is good. Of rows that
    are answered once, one counts."""
    num_done: int = 0
    """Rows of those to do that have an answer from an earlier run; no other count has them."""
    is_left: bytes = b""
    """By the place of a row, whether it is to be answered: 1 or 0."""
    num_repeated: int = 0
    """Good rows that get the answer of an earlier one."""
    repeated: Mapping[int, int] = field(default_factory=dict)
    """What `Repeats` needs to know of them."""

    def require_usable(self, *, every_row: bool = False) -> None:
        """Raises InputError if nothing can be run, or if `every_row` must be good and is not."""
        if self.whole:
            raise InputError(self.whole)
        if every_row and self.faults:
            more = self.num_bad_rows - len(self.faults)
            rest = [Fault(file=self.faults[0].file, message=f"and {more} more bad rows")]
            raise InputError([*self.faults, *(rest if more else [])])


def scan(
    source: Source,
    read: Read,
    *,
    most_faults: int = MOST_FAULTS,
    shares: bool = True,
    todo: Todo = EVERYTHING,
) -> InputSummary:
    """Reads all rows, in memory of a few bytes per row.

    `shares` looks for rows, and beginnings of prompts, that need to be computed once only. Of rows
    that are done, or not `todo`, only the names are looked at: no two rows may have the same.

    Raises InputError if the source is damaged.
    """
    tally = _Tally(file=str(source.path), most_faults=most_faults, shares=shares)
    names = array("Q")
    for raw in source:
        tally.look(raw)
        name = todo.name_if_done(raw)
        tally.is_left.append(name is None and todo.has(raw))
        if name is not None:
            tally.num_rows += todo.has(raw)
            tally.num_done += todo.has(raw)
        else:
            name = _add(tally, raw, read, todo)
        if name:
            names.append(name)
    if not tally.is_left:
        message = "holds no rows"
        tally.whole.append(Fault(file=tally.file, message=message, code="empty_file"))
    twice = _repeated(names)
    if twice:
        tally.whole += _duplicates(source, twice)
    return tally.summary()


def _add(tally: "_Tally", raw: RawRow, read: Read, todo: Todo) -> int:
    """Takes a row in that is not done; returns the hash of its name, 0 if it has none."""
    if todo.has(raw):
        result = read(raw)
        tally.add(result)
        row = result.row
    else:
        row = parse_row(raw, RowRules()).row
    return 0 if row.custom_id is None else name_hash(row.custom_id)


def sample_workload(source: Source, parse: Read, request: Read, *, most_rows: int) -> Workload:
    """Lengths of the rows, of which at most about `most_rows` are tokenised: every k-th.

    Raises InputError if the source is damaged or holds no row that can be run.
    """
    parsed = scan(source, parse)
    parsed.require_usable()
    every = -(-parsed.num_rows // most_rows)
    tally = _Tally(file=str(source.path), most_faults=1)
    for raw in islice(source, 0, None, every):
        tally.add(request(raw))
    sampled = tally.summary()
    if sampled.workload is None:
        none_good = Fault(file=tally.file, message="no row that was looked at can be run")
        raise InputError(sampled.faults or [none_good])
    share = parsed.num_rows / tally.num_rows
    sequences = sampled.workload.num_sequences or 0
    return replace(sampled.workload, num_sequences=round(sequences * share))


@dataclass(kw_only=True, slots=True)
class _Tally:
    file: str
    most_faults: int
    shares: bool = True
    num_rows: int = 0
    num_done: int = 0
    num_bad_rows: int = 0
    is_left: bytearray = field(default_factory=bytearray)
    dialect: Dialect | None = None
    first_chat: Row | None = None
    whole: list[Fault] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_shared_tokens: int = 0
    num_repeated: int = 0
    max_total_tokens: int = 0
    max_new_tokens: int = 0
    lengths: LengthSample = field(default_factory=LengthSample)
    beginnings: Beginnings = field(default_factory=Beginnings)
    repeats: RepeatCounter = field(default_factory=RepeatCounter)

    def look(self, raw: RawRow) -> None:
        if self.dialect is None:
            self.dialect = parse_row(raw, RowRules()).row.dialect

    def add(self, result: ParsedRow | ReadyRow | FailedRow) -> None:
        row = result.row
        self.num_rows += 1
        no_template = isinstance(result, FailedRow) and result.error.code == NO_CHAT_TEMPLATE
        if isinstance(result, FailedRow) and not no_template:
            self._add_bad(result)
            return
        if row.kind == "chat" and self.first_chat is None:
            self.first_chat = row
        if isinstance(result, ReadyRow):
            self._add_good(result.request)

    def _add_good(self, request: Request) -> None:
        if self.shares and self.repeats.add(request):
            self.num_repeated += 1
            return
        sampling, num_prompt = request.sampling, len(request.prompt_tokens)
        self.max_total_tokens = max(self.max_total_tokens, num_prompt + sampling.max_tokens)
        self.max_new_tokens = max(self.max_new_tokens, sampling.max_tokens)
        for choice in range(sampling.n):
            shared = self.beginnings.add(request.prompt_tokens) if self.shares else 0
            known = num_prompt + request.num_begun(choice)
            new = num_prompt + sampling.max_tokens - known
            self.num_sequences += 1
            self.num_prompt_tokens += known
            self.num_new_tokens += new
            self.num_shared_tokens += shared
            self.lengths.add(Length(known, new, shared))

    def _add_bad(self, bad: FailedRow) -> None:
        self.num_bad_rows += 1
        fault = fault_of(bad, self.file)
        if bad.error.code == COLUMN_TAKEN and not self.whole:
            self.whole.append(fault)
        if len(self.faults) < self.most_faults:
            self.faults.append(fault)

    def summary(self) -> InputSummary:
        return InputSummary(
            num_rows=self.num_rows,
            num_done=self.num_done,
            is_left=bytes(self.is_left),
            num_bad_rows=self.num_bad_rows,
            dialect=self.dialect or "openai",
            first_chat=self.first_chat,
            whole=tuple(self.whole),
            faults=tuple(self.faults),
            workload=self._workload(),
            num_repeated=self.num_repeated,
            repeated=self.repeats.repeated,
        )

    def _workload(self) -> Workload | None:
        if not self.num_sequences:
            return None
        return Workload(
            num_sequences=self.num_sequences,
            mean_prompt_tokens=self.num_prompt_tokens / self.num_sequences,
            mean_new_tokens=self.num_new_tokens / self.num_sequences,
            mean_shared_tokens=self.num_shared_tokens / self.num_sequences,
            max_total_tokens=self.max_total_tokens,
            max_new_tokens=self.max_new_tokens,
            lengths=tuple(self.lengths.kept),
        )


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


def _repeated(names: "array[int]") -> set[int]:
    """Some hashes that occur more than once. Numpy sorts them in place, eight bytes each."""
    import numpy as np

    hashes = np.frombuffer(names, dtype=np.uint64) if names else np.empty(0, np.uint64)
    hashes.sort()
    return set(hashes[1:][hashes[1:] == hashes[:-1]][:_MOST_SUSPECTS].tolist())


def _duplicates(source: Source, suspects: set[int]) -> Iterator[Fault]:
    """The names that really are given twice; equal hashes alone prove nothing."""
    first: dict[str, tuple[int, str]] = {}
    num_found = 0
    for raw in source:
        row = parse_row(raw, RowRules()).row
        if row.custom_id is None or name_hash(row.custom_id) not in suspects:
            continue
        index, place = first.setdefault(row.custom_id, (row.index, row.place))
        if index == row.index:
            continue
        num_found += 1
        if num_found > MOST_FAULTS:
            yield Fault(file=str(source.path), message="and more", code="duplicate_custom_id")
            return
        yield Fault(
            file=str(source.path),
            line=row.line,
            where=row.place if row.line is None else None,
            message=f"custom_id {row.custom_id[:80]!r} is already that of {place}",
            code="duplicate_custom_id",
        )
