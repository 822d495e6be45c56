"""Which sequences of a pass attend together."""

from collections.abc import Sequence
from math import ceil

from moebatch.engine.batcher import Slice
from moebatch.layout.scratch import PROMPT_ROWS


def micro_batches(slices: Sequence[Slice], size: int) -> list[list[Slice]]:
    """Decoding sequences in micro-batches that have the same work, then slices of prompts.

    They are made anew in every pass, so they stay even while sequences grow and end. A slice of
    more than `PROMPT_ROWS` tokens is alone.
    """
    decoding = [piece for piece in slices if piece.num_tokens == 1]
    return balanced(decoding, size) + _prompts([s for s in slices if s.num_tokens > 1], size)


def balanced(decoding: Sequence[Slice], size: int) -> list[list[Slice]]:
    """As few micro-batches of at most `size` as possible, with about as many positions each: the
    longest sequence first, into the one that has least (MoE-Lightning, Algorithm 2; what does not
    fit into the cache has been left waiting by the batcher)."""
    groups: list[list[Slice]] = [[] for _ in range(ceil(len(decoding) / size))]
    positions = [0] * len(groups)
    for piece in sorted(decoding, key=lambda piece: -piece.context):
        open_groups = (number for number, group in enumerate(groups) if len(group) < size)
        least = min(open_groups, key=lambda number: positions[number])
        groups[least].append(piece)
        positions[least] += piece.context
    return groups


def _prompts(slices: Sequence[Slice], size: int) -> list[list[Slice]]:
    """In their order, so that every slice comes after those that it continues."""
    groups: list[list[Slice]] = []
    num_rows = PROMPT_ROWS
    for piece in slices:
        num_rows += piece.num_tokens
        if num_rows > PROMPT_ROWS or len(groups[-1]) >= size:
            groups.append([])
            num_rows = piece.num_tokens
        groups[-1].append(piece)
    return groups
