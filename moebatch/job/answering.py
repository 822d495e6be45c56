"""Rows on their way: requests of those that wait, lines of those that have ended."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moebatch.folder.results import Results
from moebatch.job.scan import InputSummary
from moebatch.rows.dialects import Served, result_line
from moebatch.rows.prompts import RowReader
from moebatch.rows.row import FailedRow, Row, Source
from moebatch.spec.request import Begun, Outcome, Request, RowError


class _InWork(NamedTuple):
    row: Row
    key: bytes


class Answering:
    """Between the input, the engine and the journal: every row of a shard that has no answer yet
    goes in once, and comes out once."""

    def __init__(
        self,
        source: Source,
        reader: RowReader,
        results: Results,
        served: Served,
        counted: InputSummary,
    ) -> None:
        """`counted` says which rows are to be answered."""
        self.num_ended = 0
        """Rows that ended in this run."""
        self.num_cut_off = 0
        """Those with an answer that was cut off by its limit of tokens."""
        self.num_cut_thinking = 0
        """Those of them whose answer is empty: the model still thought."""
        self.errors: Counter[str] = Counter()
        """Those that failed, by the code of their error."""
        self.has_gained = False
        """Whether there is an answer, or a token of one, that no earlier run had; rows that failed
        are tried again."""
        self._source = source
        self._reader = reader
        self._results = results
        self._served = served
        self._is_left = counted.is_left
        self._duplicates = counted.duplicates
        self._in_work: dict[int, _InWork] = {}

    def requests(self) -> Iterator[Request]:
        """Rows that can be computed, one by one; bad ones end at once. Raises InputError if the
        input was changed, and StorageError."""
        for raw in self._source:
            if raw.index >= len(self._is_left):
                return  # of what was appended meanwhile the next run knows how long it is
            if not self._is_left[raw.index]:
                continue
            item = self._results.resumed(raw, self._reader.request(raw))
            error = self._duplicates.error_of(raw)
            key = self._results.keys.of(raw, item.row, is_duplicate=error is not None)
            in_work = _InWork(item.row, key)
            if error is not None:
                self._end(in_work, error)
            elif isinstance(item, FailedRow):
                self._end(in_work, item.error)
            else:
                self._in_work[item.row.index] = in_work
                yield item.request

    def ended(self, outcome: Outcome) -> None:
        """Keeps what has become of a request. Raises StorageError."""
        self._end(self._in_work.pop(outcome.request.index), outcome.error or outcome)
        cut_off = [each for each in outcome.choices if each.finish_reason == "length"]
        self.num_cut_off += bool(cut_off)
        if self._served.splits(outcome.request):
            thoughts = (outcome.request.thought(each.tokens) for each in cut_off)
            self.num_cut_thinking += any(thought and thought.end is None for thought in thoughts)

    def keep_unfinished(self, unfinished: Iterable[tuple[Request, tuple[Begun, ...]]]) -> int:
        """Keeps what there is of requests that are cut off; returns how many tokens that are.
        Raises StorageError."""
        num_tokens = 0
        for request, begun in unfinished:
            row, key = self._in_work[request.index]
            self._results.keep(key, row, begun)
            for number, choice in enumerate(begun):
                num_tokens += len(choice.tokens)
                self.has_gained |= len(choice.tokens) > request.num_begun(number)
        return num_tokens

    def _end(self, in_work: _InWork, result: Outcome | RowError) -> None:
        row, key = in_work
        line = result_line(row, result, self._served)
        failed = isinstance(result, RowError)
        self._results.add(key, row, line, failed=failed)
        self.num_ended += 1
        self.has_gained |= not failed
        if isinstance(result, RowError):
            self.errors[result.code] += 1
