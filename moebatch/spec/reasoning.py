"""What a model thinks before it answers, told from the answer by tokens that stand between."""

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """How a model marks it. Token ids are those of its vocabulary."""

    headers: Mapping[int, int]
    """A token that opens a stretch of thought, or one of several, and the one with which that
    marker ends: the same where it is a marker by itself."""
    closes: tuple[int, ...]
    """Tokens, one behind another, with which thought ends and the answer begins."""
    label: str = ""
    """Text with which thought begins and that says nothing."""

    def thought(self, prompt: Sequence[int], tokens: Sequence[int]) -> Thought | None:
        """What of the new `tokens` is thought; None if the answer begins at once."""
        if not self.is_open(prompt) and self.headers.keys().isdisjoint(tokens[:_FIRST]):
            return None
        end = _first(self.closes, tokens)
        thought = tokens if end is None else tokens[:end]
        bare = tuple(self._without_headers(thought))
        return Thought(bare, None if end is None else end + len(self.closes))

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Whether the chat template has opened a thought already. One further up is a text that
        speaks of markers, or of an earlier turn."""
        last = prompt[-_FIRST:]
        return not self.headers.keys().isdisjoint(last) and _first(self.closes, last) is None

    def _without_headers(self, tokens: Sequence[int]) -> list[int]:
        kept, until = list[int](), None
        for token in tokens:
            if until is None:
                until = self.headers.get(token)
                if until is None:
                    kept.append(token)
            if token == until:
                until = None
        return kept


def _first(wanted: tuple[int, ...], tokens: Sequence[int]) -> int | None:
    starts = range(len(tokens) - len(wanted) + 1)
    return next((at for at in starts if tuple(tokens[at : at + len(wanted)]) == wanted), None)
