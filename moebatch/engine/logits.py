"""Logits of the tokens after which a pass chooses, block by block.

Shape letters: T tokens of the pass, R rows of one block, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from moebatch.engine.broken import BrokenRows
from moebatch.engine.layout import Layout
from moebatch.engine.sequence import Sequence as TokenSequence
from moebatch.layout.scratch import logits_rows
from moebatch.model.decoder import Decoder


class LogitsBlock(NamedTuple):
    """Logits of sequences whose known tokens have all been computed."""

    sequences: list[TokenSequence]
    logits_RV: Tensor
    """In main memory."""
    rows: list[int]
    """Row of each sequence's last token in the pass."""
    broken: BrokenRows


def logits_blocks(
    decoder: Decoder, x_TD: Tensor, layout: Layout, broken: BrokenRows
) -> Iterator[LogitsBlock]:
    """The blocks of a pass that has gone through all layers; counts its tokens as cached first."""
    ends = layout.ends
    for piece in layout.ordered:
        piece.sequence.num_cached += piece.num_tokens
    at_once = logits_rows(decoder.shape, decoder.dtype.itemsize)
    for first in range(0, len(ends), at_once):
        block = ends[first : first + at_once]
        sequences, rows = [sequence for sequence, _ in block], [row for _, row in block]
        yield LogitsBlock(sequences, decoder.logits(x_TD[rows]).cpu(), rows, broken)
