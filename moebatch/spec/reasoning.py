"""What a model thinks before it answers, told from the answer by tokens that stand between."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FIRST = 2
"""Tokens within which thinking begins, at the end of a prompt or at the beginning of what follows:
a marker, and perhaps a line feed beside it."""


class Thought(NamedTuple):
    """What a model has thought so far."""

    tokens: tuple[int, ...]
    """Without markers."""
    end: int | None
    """Where the answer begins among the new tokens; None while there is none."""
    stop: int
    """Where what tells the two apart begins, or will begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """How a model marks it. Token ids are those of its vocabulary."""

    headers: Mapping[int, int]
    """A token that opens a stretch of thought, or one of several, and the one with which that
    marker ends: the same where it is a marker by itself."""
    closes: tuple[tuple[int, ...], ...]
    """Each tokens, one behind another, with which thought ends and the answer begins; behind the
    header that they open, if they open one."""
    label: str = ""
    """Text with which thought begins and that says nothing."""

    def thought(self, prompt: Sequence[int], tokens: Sequence[int]) -> Thought | None:
        """What of the new `tokens` is thought; None if the answer begins at once."""
        if not self.is_open(prompt) and self.headers.keys().isdisjoint(tokens[:_FIRST]):
            return None
        closing = self._closing(tokens)
        stop, end = (len(tokens), None) if closing is None else (closing.start, closing.stop)
        return Thought(tuple(self._bare(tokens[:stop])), end, stop)

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Whether the chat template has opened a thought already. One further up is a text that
        speaks of markers, or of an earlier turn."""
        last = prompt[-_FIRST:]
        return not self.headers.keys().isdisjoint(last) and self._closing(last) is None

    def answer_start(self, tokens: Sequence[int], num_seen: int) -> int | None:
        """Where the answer behind a thought begins, which the first `num_seen` tokens have not
        ended; None while it goes on."""
        closing = self._closing(tokens, num_seen)
        return None if closing is None else closing.stop

    def _closing(self, tokens: Sequence[int], num_seen: int = 0) -> range | None:
        """The first places, of which one is not among those seen, that end the thought."""
        lasts = [self.headers.get(closes[0], closes[-1]) for closes in self.closes]
        for stop in range(num_seen + 1, len(tokens) + 1):
            for closes, last in zip(self.closes, lasts, strict=True):
                if tokens[stop - 1] != last:
                    continue
                at = (at for at in reversed(range(stop)) if tokens[at] == closes[0])
                start = next(at, stop)
                if tuple(tokens[start : start + len(closes)]) == closes:
                    return range(start, stop)
        return None

    def _bare(self, tokens: Sequence[int]) -> Iterator[int]:
        """Without headers."""
        until = None
        for token in tokens:
            if until is None:
                until = self.headers.get(token)
                if until is None:
                    yield token
            if token == until:
                until = None
