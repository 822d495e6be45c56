"""Rows that are answered once: equal prompts, equal parameters, and no chance in them."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from moebatch.spec.policy.policy import PAGE_TOKENS
from moebatch.spec.request import Outcome, Request

_WITHOUT_CHANCE = (
    "max_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
)
"""Parameters that greedy answers depend on, beside the bias of logits."""
_MOST_KEYS = 2**18
_MOST_WAITING = 2**18
"""Rows of 200 bytes that may wait for an answer, or for being written: 50 MiB."""
_MOST_KNOWN = 2**21
"""Numbers of answers that rows to come need, of up to 40 bytes: 80 MiB."""
_NUMBERS_OF_ROW = 16
_NUMBERS_OF_LOGPROB = 4
Run = Callable[[Iterable[Request]], Iterator[Outcome]]


def greedy_key(request: Request) -> Hashable | None:
    """What the answer of a greedy request depends on; None for sampled ones."""
    sampling = request.sampling
    if not sampling.greedy:
        return None
    values = tuple(getattr(sampling, name) for name in _WITHOUT_CHANCE)
    thinks = request.reasoning is not None  # which a grammar leaves free
    return request.prompt_tokens, values, thinks, tuple(sorted(sampling.logit_bias.items()))


class RepeatCounter:
    """Counts rows that are alike, in some bytes for each: only hashes are kept, and of the first
    `_MOST_KEYS` different rows only. Two rows with one hash are compared before one is copied."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._repeated: Counter[int] = Counter()

    def add(self, request: Request) -> bool:
        """Takes in the next row; whether one like it has been there."""
        key = greedy_key(request)
        if key is None:
            return False
        number = hash(key)
        if number in self._seen:
            self._repeated[number] += 1
            return True
        if len(self._seen) < _MOST_KEYS:
            self._seen.add(number)
        return False

    @property
    def repeated(self) -> Mapping[int, int]:
        """How many more rows there are of each kind, by hash."""
        return dict(self._repeated)


class Repeats:
    """Hands on only the first of all rows that are alike, and gives its answer to the others.

    However many are alike, what is held is bounded: rows that wait, and answers that rows to come
    need. A row for which there is no room is computed like others.
    """

    def __init__(self, repeated: Mapping[int, int]) -> None:
        """`repeated` is what a `RepeatCounter` has found in the same process."""
        self.num_copied = 0
        self._to_come = {number: 1 + more for number, more in repeated.items()}
        self._waiting: dict[Hashable, list[Request]] = {}
        """Behind the first, which is being computed."""
        self._num_waiting = 0
        """Those that are ready are counted as well."""
        self._ready: deque[Outcome] = deque()
        self._known: dict[Hashable, Outcome] = {}
        self._num_known = 0
        """Numbers of which they consist."""

    def answer(self, requests: Iterable[Request], run: Run) -> Iterator[Outcome]:
        """Outcomes of all requests, of which only different ones are `run`."""
        for outcome in run(self._first_ones(requests)):
            yield outcome
            yield from self._copies(outcome)
            yield from self._taken()
        yield from self._taken()

    def _first_ones(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            key = greedy_key(request) if self._to_come else None
            number = hash(key)
            if key is None or number not in self._to_come:
                yield request
                continue
            self._to_come[number] -= 1
            if not self._waits(key, request):
                yield request

    def _waits(self, key: Hashable, request: Request) -> bool:
        """Whether the row gets the answer of an equal one, which may still be computed."""
        known = self._known.get(key)
        if known is None and key not in self._waiting:
            self._waiting[key] = [request]
            return False
        if known is not None and self._to_come[hash(key)] <= 0:
            self._num_known -= _numbers_of(self._known.pop(key))
        if self._num_waiting >= _MOST_WAITING:
            return False
        self._num_waiting += 1
        if known is not None:
            self._ready.append(replace(known, request=_sharing(request, known.request)))
        else:
            alike = self._waiting[key]
            alike.append(_sharing(request, alike[0]))
        return True

    def _copies(self, outcome: Outcome) -> Iterator[Outcome]:
        key = greedy_key(outcome.request) if self._waiting else None
        if key is None or key not in self._waiting:
            return
        for request in self._waiting.pop(key)[1:]:
            yield self._copied(replace(outcome, request=request))
        if self._to_come.get(hash(key), 0) > 0 and self._num_known < _MOST_KNOWN:
            self._known[key] = outcome
            self._num_known += _numbers_of(outcome)

    def _taken(self) -> Iterator[Outcome]:
        while self._ready:
            yield self._copied(self._ready.popleft())

    def _copied(self, outcome: Outcome) -> Outcome:
        self.num_copied += 1
        self._num_waiting -= 1
        return outcome


def _sharing(request: Request, first: Request) -> Request:
    """The same row, which holds what `first` does where that is equal."""
    sampling = first.sampling if request.sampling == first.sampling else request.sampling
    return replace(request, prompt_tokens=first.prompt_tokens, sampling=sampling)


def _numbers_of(known: Outcome) -> int:
    """Token ids and log-probabilities that an answer and its prompt hold in memory."""
    numbers = _NUMBERS_OF_ROW + len(known.request.prompt_tokens)
    for choice in known.choices:
        alternatives = (1 + len(each.top) for each in choice.logprobs or ())
        numbers += len(choice.tokens) + _NUMBERS_OF_LOGPROB * sum(alternatives)
    return numbers


_MOST_PAGES = 2**18


class Beginnings:
    """Remembers hashes of the pages of all prompts, of the first `_MOST_PAGES` different ones.

    Good enough to plan with: whether a page is really the same is looked at when it is used, and
    whether it is still there only shows then.
    """

    def __init__(self) -> None:
        self._pages: set[int] = set()

    def add(self, prompt: Sequence[int]) -> int:
        """Takes in the next prompt; the tokens at its beginning that need not be computed again.

        Two tokens of a prompt are always computed, see `store/kv/prefixes.py`.
        """
        number, num_shared = 0, 0
        for first in range(0, len(prompt) - PAGE_TOKENS - 1, PAGE_TOKENS):
            number = hash((number, prompt[first : first + PAGE_TOKENS]))
            if number in self._pages:
                num_shared = first + PAGE_TOKENS
            elif len(self._pages) < _MOST_PAGES:
                self._pages.add(number)
        return num_shared
