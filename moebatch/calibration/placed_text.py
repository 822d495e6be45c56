"""A text with the place that each of its tokens has among those that are kept.

A token behind the same beginning is chosen for by gates in the same way, so what sequences begin
with alike has one place: that of the first of them in the text. Places depend on nothing but the
text; in which order a model reads it, and how often, changes nothing.

Shape letters: S tokens of the text, N tokens that are kept, T tokens of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from moebatch.calibration.texts import TokenSequence
from moebatch.predict.predictor import PassTokens
from moebatch.spec.policy import PAGE_TOKENS
from moebatch.store.kv_prefixes import KvPrefixes

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedText:
    """Places are counted from 0, in the order of the text."""

    sequences: Sequence[TokenSequence]
    places_S: NDArray[np.int64]
    """Of all tokens, one sequence behind the other."""
    starts: NDArray[np.int64]
    """Of each sequence, where it begins in `places_S`, and behind all of them its length."""
    ends: NDArray[np.int64]
    """The place behind each sequence."""

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], *, shares: bool) -> "PlacedText":
        """`shares` is whether gates see the same behind equal beginnings, as passes do if they
        compute these once."""
        known, num_kept = KvPrefixes(), 0
        places, ends = [], []
        for owner, tokens in enumerate(sequences):
            common = known.find(tokens).pages if shares else ()
            ranges = [np.arange(first, first + PAGE_TOKENS) for first in common]
            last = num_kept + len(tokens) - PAGE_TOKENS * len(common)
            of_sequence = np.concatenate([*ranges, np.arange(num_kept, last)])
            known.enter(owner, tokens, of_sequence[::PAGE_TOKENS].tolist())
            known.publish(owner, len(tokens))
            places.append(of_sequence)
            ends.append(num_kept := last)
        return cls(
            sequences=sequences,
            places_S=np.concatenate(places),
            starts=np.cumsum([0, *map(len, sequences)]),
            ends=np.array(ends),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return int(self.ends[-1])

    @property
    def num_read(self) -> int:
        """Tokens of the text."""
        return len(self.places_S)

    @property
    def num_counted(self) -> int:
        """Sequences, the first ones, that are not held out."""
        return len(self.sequences) - round(len(self.sequences) * HELD_OUT_SHARE)

    @property
    def counted(self) -> Sequence[TokenSequence]:
        """Those from which something is learnt before it is examined."""
        return self.sequences[: self.num_counted]

    @property
    def held_out(self) -> Sequence[TokenSequence]:
        """The others."""
        return self.sequences[self.num_counted :]

    @property
    def num_known(self) -> int:
        """Tokens that are kept and not held out."""
        return self.place_behind(self.num_counted)

    @property
    def tokens_N(self) -> NDArray[np.int64]:
        """The tokens that are kept."""
        tokens_N = np.empty(self.num_tokens, np.int64)
        tokens_N[self.places_S] = np.fromiter(chain.from_iterable(self.sequences), np.int64)
        return tokens_N

    @property
    def is_first_N(self) -> NDArray[np.bool_]:
        """Those that do not follow the one before them in the same sequence."""
        is_first_N = np.zeros(self.num_tokens, np.bool_)
        is_first_N[[0, *self.ends[:-1]]] = True
        return is_first_N

    def place_behind(self, num_sequences: int) -> int:
        """The place behind so many sequences."""
        return int(self.ends[num_sequences - 1]) if num_sequences else 0

    def places_of(self, tokens: PassTokens) -> NDArray[np.int64]:
        """Places of the tokens of a pass whose requests are sequences of the text, [T]."""
        places_T: NDArray[np.int64] = self.places_S[
            self.starts[tokens.requests_T] + tokens.positions_T
        ]
        return places_T
