"""A text as sequences of tokens, which a model reads and does not answer, with the place that each
token has among those that are kept.

A token behind the same beginning is chosen for by gates in the same way, so what sequences begin
with alike has one place: that of the first of them in the text. Places depend on nothing but the
text; in which order a model reads it, and how often, changes nothing.

Shape letters: S tokens of the text, N tokens that are kept, T tokens of a pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path

import numpy as np

from moebatch.arrays import Bools, Ints
from moebatch.errors import InputError
from moebatch.job.scan import fault_of
from moebatch.predict.predictor import PassTokens
from moebatch.rows.prompts import RowReader
from moebatch.rows.row import FailedRow
from moebatch.rows.source import open_source
from moebatch.spec.policy.policy import PAGE_TOKENS
from moebatch.store.kv.prefixes import KvPrefixes

SEQUENCE_TOKENS = 512
"""As in Klotski's warm-up."""
HELD_OUT_SHARE = 0.1
"""Of the sequences of a text, the last ones."""
_TEXT_SUFFIXES = frozenset({"", ".txt", ".text", ".md", ".rst", ".tokens"})
_BLOCK_CHARACTERS = 2**16
"""A text is encoded in blocks of about so much, which end with a line."""

TokenSequence = tuple[int, ...]


def read_sequences(
    path: Path, reader: RowReader, *, num_tokens: int, sequence_tokens: int
) -> list[TokenSequence]:
    """The first `num_tokens` tokens of a plain text, or of the prompts of a job's input, in
    sequences of at most `sequence_tokens` for which the model has positions. Rows that cannot be
    run are passed over.

    Raises InputError if there is nothing to read, or no position to read it in.
    """
    texts = _of_text(path, reader) if is_plain_text(path) else _of_rows(path, reader)
    longest = min(sequence_tokens, reader.max_positions - 1)
    if longest < 1:
        raise InputError.at(
            path, "cannot be read: a text takes two positions, and the model has one"
        )
    sequences, left = [], num_tokens
    for tokens in texts:
        for start in range(0, min(len(tokens), left), longest):
            piece = tokens[start : min(start + longest, left)]
            sequences.append(piece)
        left -= min(len(tokens), left)
        if left == 0:
            break
    if not sequences:
        raise InputError.at(path, "holds no text")
    return sequences


def is_plain_text(path: Path) -> bool:
    """Whether a path is that of a text, by its name; others have prompts."""
    return not path.is_dir() and path.suffix.lower() in _TEXT_SUFFIXES


def _of_text(path: Path, reader: RowReader) -> Iterator[TokenSequence]:
    try:
        with path.open("rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig") as file:
            try:
                while block := file.read(_BLOCK_CHARACTERS):
                    yield reader.tokenizer.encode(block + file.readline(_BLOCK_CHARACTERS))
            except UnicodeDecodeError as error:  # of a part of the file, up to what has been read
                place = raw.tell() - len(error.object) + error.start
                raise InputError.at(
                    path, f"is no UTF-8 text: {error.reason} at byte {place}; save it as UTF-8"
                ) from None
    except OSError as error:
        raise InputError.at(path, f"cannot be read: {error.strerror}") from None


def _of_rows(path: Path, reader: RowReader) -> Iterator[TokenSequence]:
    first_bad, num_good = None, 0
    for item in reader.requests(open_source(path)):
        if isinstance(item, FailedRow):
            first_bad = first_bad or item
        else:
            num_good += 1
            yield item.request.prompt_tokens
    if first_bad is not None and not num_good:
        raise InputError([fault_of(first_bad, str(path))])


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedText:
    """Places are counted from 0, in the order of the text."""

    sequences: Sequence[TokenSequence]
    places_S: Ints
    """Of all tokens, one sequence behind the other."""
    starts: Ints
    """Of each sequence, where it begins in `places_S`, and behind all of them its length."""
    ends: Ints
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
    def held_out(self) -> Sequence[TokenSequence]:
        """The others."""
        return self.sequences[self.num_counted :]

    @property
    def num_known(self) -> int:
        """Tokens that are kept and not held out."""
        return self.place_behind(self.num_counted)

    @property
    def tokens_N(self) -> Ints:
        """The tokens that are kept."""
        tokens_N = np.empty(self.num_tokens, np.int64)
        tokens_N[self.places_S] = np.fromiter(chain.from_iterable(self.sequences), np.int64)
        return tokens_N

    @property
    def is_first_N(self) -> Bools:
        """Those that do not follow the one before them in the same sequence."""
        is_first_N = np.zeros(self.num_tokens, np.bool_)
        is_first_N[[0, *self.ends[:-1]]] = True
        return is_first_N

    def place_behind(self, num_sequences: int) -> int:
        """The place behind so many sequences."""
        return int(self.ends[num_sequences - 1]) if num_sequences else 0

    def places(self, sequences: range) -> range:
        """Those of the tokens of neighbouring sequences."""
        return range(self.place_behind(sequences.start), self.place_behind(sequences.stop))

    def places_of(self, tokens: PassTokens) -> Ints:
        """Places of the tokens of a pass whose requests are sequences of the text, [T]."""
        places_T: Ints = self.places_S[self.starts[tokens.requests_T] + tokens.positions_T]
        return places_T
