"""What a micro-batch of a pass reads and writes in the cache of keys and values."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.schedule.kv_route import Place
from moebatch.spec.attention import SinkWindow, num_cached
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
    """Cache rows, int64, of what each owner's new tokens see, themselves included, in layers that
    live at the place."""
    window_rows: Mapping[Hashable, Tensor]
    """The same in layers that live elsewhere: rows of the window."""
    moves: ViewMoves

    def rows(self, owner: Hashable, *, direct: bool) -> Tensor:
        """Rows of what the owner's new tokens see, themselves included, in order of position."""
        return (self.direct_rows if direct else self.window_rows)[owner]


class _OwnedPages(NamedTuple):
    """A piece with its pages and rows at home and the first of its pages in a window."""

    piece: KvPiece
    pages: list[int]
    rows: Tensor
    first: int
    sink_window: SinkWindow | None

    @property
    def window_rows(self) -> Tensor:
        start = self.first * PAGE_TOKENS
        places = torch.arange(start, start + len(self.pages) * PAGE_TOKENS)
        return seen_rows(places, self.piece.num_tokens, self.piece.num_cached, self.sink_window)


def seen_rows(
    rows: Tensor, num_tokens: int, num_before: int, sink_window: SinkWindow | None
) -> Tensor:
    """Of an owner's rows those of its first `num_tokens` positions, without those that tokens
    behind the first `num_before` see no more."""
    if sink_window is None or not (skipped := sink_window.num_skipped(num_before)):
        return rows[:num_tokens]
    sinks, num_ring = sink_window.sinks, sink_window.most_cached - sink_window.sinks
    places = torch.arange(skipped, num_tokens - sinks) % num_ring + sinks
    return torch.cat([rows[:sinks], rows[places]])


def view_of(
    place: Place,
    window: int,
    pieces: Sequence[KvPiece],
    pages: Mapping[Hashable, list[int]],
    rows: Mapping[Hashable, Tensor],
    sink_window: SinkWindow | None = None,
) -> KvView:
    """The view of a micro-batch whose owners have these pages and cache rows.

    In a window the pages of all pieces follow each other, so nothing has to be gathered there.
    """
    assert pieces, "a micro-batch has tokens"
    owned: list[_OwnedPages] = []
    first = 0
    for piece in pieces:
        num_pages = pages_of(num_cached(piece.num_tokens, sink_window))
        held = pages[piece.owner][:num_pages]
        assert 0 <= piece.num_cached < piece.num_tokens, f"{piece} has nothing to compute"
        assert len(held) == num_pages, f"{piece} lacks pages; grow it before"
        seen = seen_rows(rows[piece.owner], piece.num_tokens, piece.num_cached, sink_window)
        owned.append(_OwnedPages(piece, held, seen, first, sink_window))
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
        num_new = part.piece.num_tokens - part.piece.num_cached
        new_in_window = part.window_rows[-num_new:]
        touched_there = sorted({row // PAGE_TOKENS for row in new_in_window.tolist()})
        num_context = pages_of(num_cached(part.piece.num_cached, part.sink_window))
        context[0].extend(part.pages[:num_context])
        context[1].extend(range(part.first, part.first + num_context))
        touched[0].extend(part.pages[page - part.first] for page in touched_there)
        touched[1].extend(touched_there)
        new_rows[0].append(part.rows[-num_new:])
        new_rows[1].append(new_in_window)
    home_rows, window_rows = (torch.cat(rows) for rows in new_rows)
    return ViewMoves(
        context=Moves.of(*context),
        staged_context=Moves.of(context[1], context[1]),
        new=Moves.of(window_rows, home_rows),
        staged_new=Moves.of(window_rows, window_rows),
        touched=Moves.of(touched[1], touched[0]),
        num_pages=num_pages,
    )
