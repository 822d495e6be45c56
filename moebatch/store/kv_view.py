"""What a micro-batch of a pass reads and writes in the cache of keys and values."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.schedule.kv_route import Place
from moebatch.spec.policy import PAGE_TOKENS, pages_of
from moebatch.store.kv_moves import Moves


class KvPiece(NamedTuple):
    """The tokens of one sequence that a micro-batch computes: those from `num_cached` on."""

    owner: Hashable
    num_cached: int
    """Tokens whose keys and values the cache holds before."""
    num_tokens: int
    """Tokens whose keys and values it holds afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ViewMoves:
    """What a micro-batch moves in every layer that does not live where it attends."""

    context: Moves
    """Pages with tokens that are cached: from home into a window."""
    staged_context: Moves
    """The same pages from window to window."""
    new: Moves
    """Rows of new tokens: from a window to home."""
    staged_new: Moves
    """The same rows from window to window."""
    touched: Moves
    """Pages with new tokens: from a window to home, where home takes whole pages only."""
    num_pages: int
    """Pages of a window that are taken."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvView:
    """Where the tokens of a micro-batch lie, in every layer.

    A view holds for one pass, and for as long as its owners keep their pages. If it continues
    another view's sequence, its context must come up after that view's tokens were stored.
    """

    place: Place
    """Where attention is computed."""
    window: int
    """Which of the windows at that place it uses in layers that live elsewhere."""
    pieces: tuple[KvPiece, ...]
    direct_rows: Mapping[Hashable, Tensor]
    """Cache rows of each owner's tokens, int64, in layers that live at the place."""
    window_rows: Mapping[Hashable, Tensor]
    """The same in layers that live elsewhere: rows of the window."""
    moves: ViewMoves

    def rows(self, owner: Hashable, *, direct: bool) -> Tensor:
        """Rows of all of the owner's tokens, new ones included, in order of position."""
        return (self.direct_rows if direct else self.window_rows)[owner]


class _OwnedPages(NamedTuple):
    """A piece with its pages and rows at home and the first of its pages in a window."""

    piece: KvPiece
    pages: list[int]
    rows: Tensor
    first: int

    @property
    def window_rows(self) -> Tensor:
        start = self.first * PAGE_TOKENS
        return torch.arange(start, start + self.piece.num_tokens)


def view_of(
    place: Place,
    window: int,
    pieces: Sequence[KvPiece],
    pages: Mapping[Hashable, list[int]],
    rows: Mapping[Hashable, Tensor],
) -> KvView:
    """The view of a micro-batch whose owners have these pages and cache rows.

    In a window the pages of all pieces follow each other, so nothing has to be gathered there.
    """
    assert pieces, "a micro-batch has tokens"
    owned: list[_OwnedPages] = []
    first = 0
    for piece in pieces:
        held = pages[piece.owner][: pages_of(piece.num_tokens)]
        assert 0 <= piece.num_cached < piece.num_tokens, f"{piece} has nothing to compute"
        assert len(held) == pages_of(piece.num_tokens), f"{piece} lacks pages; grow it before"
        owned.append(_OwnedPages(piece, held, rows[piece.owner][: piece.num_tokens], first))
        first += len(held)
    direct_rows = {part.piece.owner: part.rows for part in owned}
    assert len(direct_rows) == len(pieces), "a sequence may be in a micro-batch once"
    return KvView(
        place=place,
        window=window,
        pieces=tuple(pieces),
        direct_rows=direct_rows,
        window_rows={part.piece.owner: part.window_rows for part in owned},
        moves=_moves_of(owned, num_pages=first),
    )


def _moves_of(owned: Sequence[_OwnedPages], *, num_pages: int) -> ViewMoves:
    context: tuple[list[int], list[int]] = [], []
    touched: tuple[list[int], list[int]] = [], []
    new_rows: tuple[list[Tensor], list[Tensor]] = [], []
    for part in owned:
        num_cached = part.piece.num_cached
        num_context, first_new = pages_of(num_cached), num_cached // PAGE_TOKENS
        context[0].extend(part.pages[:num_context])
        context[1].extend(range(part.first, part.first + num_context))
        touched[0].extend(part.pages[first_new:])
        touched[1].extend(range(part.first + first_new, part.first + len(part.pages)))
        new_rows[0].append(part.rows[num_cached:])
        new_rows[1].append(part.window_rows[num_cached:])
    home_rows, window_rows = (torch.cat(rows) for rows in new_rows)
    return ViewMoves(
        context=Moves.of(*context),
        staged_context=Moves.of(context[1], context[1]),
        new=Moves.of(window_rows, home_rows),
        staged_new=Moves.of(window_rows, window_rows),
        touched=Moves.of(touched[1], touched[0]),
        num_pages=num_pages,
    )
