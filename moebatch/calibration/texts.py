"""A text as sequences of tokens, for whoever wants to see a model read and not answer."""

from collections.abc import Iterator
from pathlib import Path

from moebatch.errors import InputError
from moebatch.job.scan import fault_of
from moebatch.rows.prompts import RowReader
from moebatch.rows.raw import refusal
from moebatch.rows.row import FailedRow
from moebatch.rows.source import open_source

SEQUENCE_TOKENS = 512
"""As in Klotski's warm-up."""
_TEXT_SUFFIXES = frozenset({"", ".txt", ".text", ".md", ".rst", ".tokens"})
_BLOCK_CHARACTERS = 2**16
"""A text is encoded in blocks of about so much, which end with a line."""

TokenSequence = tuple[int, ...]


def read_sequences(
    path: Path, reader: RowReader, *, num_tokens: int, sequence_tokens: int
) -> list[TokenSequence]:
    """The first `num_tokens` tokens of a plain text, or of the prompts of a job's input, in
    sequences of at most `sequence_tokens`. Rows that cannot be run are passed over.

    Raises InputError if there is nothing to read.
    """
    texts = _of_text(path, reader) if is_plain_text(path) else _of_rows(path, reader)
    sequences, left = [], num_tokens
    for tokens in texts:
        for start in range(0, min(len(tokens), left), sequence_tokens):
            piece = tokens[start : min(start + sequence_tokens, left)]
            sequences.append(piece)
        left -= min(len(tokens), left)
        if left == 0:
            break
    if not sequences:
        raise refusal(path, "holds no text")
    return sequences


def is_plain_text(path: Path) -> bool:
    """Whether a path is that of a text, by its name; others have prompts."""
    return not path.is_dir() and path.suffix.lower() in _TEXT_SUFFIXES


def _of_text(path: Path, reader: RowReader) -> Iterator[TokenSequence]:
    try:
        with path.open(encoding="utf-8") as file:
            while block := file.read(_BLOCK_CHARACTERS):
                yield reader.tokenizer.encode(block + file.readline(_BLOCK_CHARACTERS))
    except UnicodeDecodeError as error:
        raise refusal(path, f"is no UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise refusal(path, f"cannot be read: {error.strerror}") from None


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
