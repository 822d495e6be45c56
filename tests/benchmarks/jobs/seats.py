"""Continuous batching with a fixed number of sequences, on lengths alone.

Standard library only: a peer's own interpreter imports it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.benchmarks.jobs.lengths import Lengths


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in one call."""

    seat: int
    start: int
    num_tokens: int
    wants_logits: bool


@dataclass(frozen=True)
class Call:
    """What is computed at once."""

    pieces: tuple[Piece, ...]
    ended: tuple[int, ...]
    """Seats that are free after it."""

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def only_decodes(self) -> bool:
        return all(piece.num_tokens == 1 and piece.wants_logits for piece in self.pieces)


@dataclass
class _Sequence:
    seat: int
    prompt: int
    answer: int
    done: int = 0
    given: int = 0
    """Tokens of the answer."""


@dataclass
class Seats:
    """Rows in their order on `num_seats` seats: every call has one token of each sequence that
    decodes, and prompts fill it up to `call_tokens`."""

    lengths: Lengths
    num_seats: int
    call_tokens: int
    is_closed: bool = field(default=False, init=False)
    """Nobody is admitted any more."""
    num_given: int = field(default=0, init=False)
    """Tokens of answers so far."""
    _next: int = field(default=0, init=False)
    _running: list[_Sequence] = field(default_factory=list, init=False)
    _free: deque[int] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        assert self.call_tokens >= self.num_seats, "a call holds a token of every sequence"
        self._free.extend(range(self.num_seats))

    def close(self) -> list[int]:
        """From now on nobody is admitted, and if anybody decodes, prompts that are not done are
        given up. Returns the seats of these."""
        self.is_closed = True
        decoding = [item for item in self._running if item.done >= item.prompt]
        if not decoding:
            return []
        given_up = [item.seat for item in self._running if item.done < item.prompt]
        self._running = decoding
        self._free.extend(given_up)
        return given_up

    def calls(self) -> Iterator[Call]:
        """All calls of the job, or of those that are in when the seats are closed."""
        while True:
            self._admit()
            if not self._running:
                return
            yield self._call()

    def _admit(self) -> None:
        while self._free and self._next < self.lengths.num_rows and not self.is_closed:
            row, self._next = self._next, self._next + 1
            self._running.append(
                _Sequence(
                    self._free.popleft(), self.lengths.prompts[row], self.lengths.answers[row]
                )
            )

    def _call(self) -> Call:
        decoding = [item for item in self._running if item.done >= item.prompt]
        pieces = [Piece(item.seat, item.done, 1, True) for item in decoding]
        room = self.call_tokens - len(decoding)
        gets_token = list(decoding)
        for item in self._running:
            left = item.prompt - item.done
            if left <= 0 or room <= 0:
                continue
            count = min(left, room)
            room -= count
            pieces.append(Piece(item.seat, item.done, count, count == left))
            item.done += count
            if count == left:
                gets_token.append(item)
        for item in decoding:
            item.done += 1
        for item in gets_token:
            item.given += 1
        self.num_given += len(gets_token)
        ended = [item for item in self._running if item.given >= item.answer]
        self._running = [item for item in self._running if item.given < item.answer]
        self._free.extend(item.seat for item in ended)
        return Call(tuple(pieces), tuple(item.seat for item in ended))
