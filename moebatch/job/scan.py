"""One pass over the input before anything runs: how many rows, of which kind, and what is wrong."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from moebatch.errors import Fault, InputError
from moebatch.folder.duplicates import NO_DUPLICATES, Duplicates, find_duplicates
from moebatch.folder.row_key import name_hash
from moebatch.folder.todo import EVERYTHING, Todo
from moebatch.rows.beginnings import Beginnings
from moebatch.rows.parse import ANY_ROW, COLUMN_TAKEN, NO_PROMPT, RowRules, parse_row
from moebatch.rows.raw import RawRow, Source
from moebatch.rows.repeats import RepeatCounter
from moebatch.rows.row import Dialect, FailedRow, ParsedRow, ReadyRow, Row
from moebatch.rows.tokenizer import NO_CHAT_TEMPLATE
from moebatch.spec.request import Request
from moebatch.spec.workload import Length, LengthSample, Workload

MOST_FAULTS = 100
"""So many faults are kept unless told otherwise; all are counted."""
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
    first_bare: Row | None
    """The first row whose prompt goes to the model without a chat template, though no API was asked
    for that; None if there is none."""
    whole: tuple[Fault, ...]
    """Why nothing can be run, if so."""
    faults: tuple[Fault, ...]
    """What is wrong with single rows, as far as they were kept."""
    num_unlisted: int
    """Bad rows that neither is about."""
    workload: Workload | None
    """Lengths of prompts and answers; None if rows were only parsed, or none is good. Of rows that
    are answered once, one counts."""
    num_done: int = 0
    """Rows of those to do that have an answer from an earlier run; no other count has them."""
    is_left: bytes = b""
    """By the place of a row, whether it is to be answered: 1 or 0."""
    duplicates: Duplicates = NO_DUPLICATES
    """Rows with the name of an earlier one."""
    num_repeated: int = 0
    """Good rows that get the answer of an earlier one."""
    repeated: Mapping[int, int] = field(default_factory=dict)
    """What `Repeats` needs to know of them."""

    def require_usable(self, *, every_row: bool = False) -> None:
        """Raises InputError if nothing can be run, or if `every_row` must be good and is not."""
        if self.whole:
            raise InputError(self.whole)
        if every_row and self.faults:
            message = f"and {self.num_unlisted} more bad rows"
            rest = [Fault(file=self.faults[0].file, message=message)] * (self.num_unlisted > 0)
            raise InputError([*self.faults, *rest])


def scan(
    source: Source,
    read: Read,
    *,
    most_faults: int = MOST_FAULTS,
    rules: RowRules = ANY_ROW,
    shares: bool = True,
    todo: Todo = EVERYTHING,
) -> InputSummary:
    """Reads all rows, in memory of a few bytes per row.

    `rules` are those that `read` goes by. `shares` looks for rows, and beginnings of prompts, that
    need to be computed once only. Of rows that are done, or not `todo`, only the names are looked
    at: of rows with the same name all but the first are bad.

    Raises InputError if the source is damaged.
    """

    def look(duplicates: Duplicates) -> _Tally:
        tally = _Tally(
            file=str(source.path),
            most_faults=most_faults,
            shares=shares,
            todo=todo,
            rules=rules,
            duplicates=duplicates,
        )
        for raw in source:
            tally.take(raw, read)
        return tally

    tally = look(NO_DUPLICATES)
    duplicates = find_duplicates(source, tally.names)
    return (look(duplicates) if duplicates else tally).summary()


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
    todo: Todo = EVERYTHING
    rules: RowRules = ANY_ROW
    duplicates: Duplicates = NO_DUPLICATES
    names: "array[int]" = field(default_factory=lambda: array("Q"))
    num_rows: int = 0
    num_done: int = 0
    num_bad_rows: int = 0
    is_left: bytearray = field(default_factory=bytearray)
    dialect: Dialect | None = None
    first_chat: Row | None = None
    first_bare: Row | None = None
    first_promptless: FailedRow | None = None
    num_promptless: int = 0
    whole: list[Fault] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_shared_tokens: int = 0
    num_repeated: int = 0
    max_total_tokens: int = 0
    max_new_tokens: int = 0
    takes_likeliest: bool = True
    lengths: LengthSample = field(default_factory=LengthSample)
    beginnings: Beginnings = field(default_factory=Beginnings)
    repeats: RepeatCounter = field(default_factory=RepeatCounter)

    def take(self, raw: RawRow, read: Read) -> None:
        if self.dialect is None:
            self.dialect = parse_row(raw, self.rules).row.dialect
        error, is_ours = self.duplicates.error_of(raw), self.todo.has(raw)
        name = self.todo.name_if_done(raw) if error is None else None
        self.is_left.append(is_ours and name is None)
        if name is None:
            reads = is_ours and error is None
            result = read(raw) if reads else parse_row(raw, self.rules)
            name = name_hash(result.row.custom_id)
            if error is not None:
                result = FailedRow(row=result.row, error=error)
            if is_ours:
                self.add(result)
        elif is_ours:
            self.num_rows += 1
            self.num_done += 1
        self.names.append(name)

    def add(self, result: ParsedRow | ReadyRow | FailedRow) -> None:
        row = result.row
        self.num_rows += 1
        no_template = isinstance(result, FailedRow) and result.error.code == NO_CHAT_TEMPLATE
        if isinstance(result, FailedRow) and not no_template:
            self._add_bad(result)
            return
        if row.kind == "chat" and self.first_chat is None:
            self.first_chat = row
        if row.is_bare and self.first_bare is None:
            self.first_bare = row
        if isinstance(result, ReadyRow):
            self._add_good(result.request)

    def _add_good(self, request: Request) -> None:
        if self.shares and self.repeats.add(request):
            self.num_repeated += 1
            return
        sampling, num_prompt = request.sampling, len(request.prompt_tokens)
        self.max_total_tokens = max(self.max_total_tokens, num_prompt + sampling.max_tokens)
        self.max_new_tokens = max(self.max_new_tokens, sampling.max_tokens)
        self.takes_likeliest &= sampling.takes_likeliest
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
        if bad.error.code == NO_PROMPT:
            self.num_promptless += 1
            self.first_promptless = self.first_promptless or bad
        if len(self.faults) < self.most_faults:
            self.faults.append(fault)

    def summary(self) -> InputSummary:
        whole = self._faults_of_all()
        return InputSummary(
            num_rows=self.num_rows,
            num_done=self.num_done,
            is_left=bytes(self.is_left),
            num_bad_rows=self.num_bad_rows,
            dialect=self.dialect or "openai",
            first_chat=self.first_chat,
            first_bare=self.first_bare,
            whole=whole,
            faults=tuple(
                fault for fault in self.faults if not whole or fault.code != whole[0].code
            ),
            num_unlisted=self.num_bad_rows - len(self.faults),
            duplicates=self.duplicates,
            workload=self._workload(),
            num_repeated=self.num_repeated,
            repeated=self.repeats.repeated,
        )

    def _faults_of_all(self) -> tuple[Fault, ...]:
        """What makes the input useless, said once instead of for each row: columns of another name
        are a mistake in the job file, if no row can be answered and that is why."""
        if not self.is_left:
            return (Fault(file=self.file, message="holds no rows", code="empty_file"),)
        bad, num_rows = self.first_promptless, self.num_rows
        if bad is None or self.num_bad_rows < num_rows or 2 * self.num_promptless < num_rows:
            return tuple(self.whole)
        fault = fault_of(bad, self.file)
        more = f"; so it is with {self.num_promptless} of {num_rows} rows" * (num_rows > 1)
        return (replace(fault, message=fault.message + more),)

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
            takes_likeliest=self.takes_likeliest,
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
