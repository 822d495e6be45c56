"""What a micro-batch of a pass reads and writes in the cache of keys and values."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moebatch.arrays import Ints
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.model.cache import CacheGroup
from moebatch.store.kv.moves import Moves
from moebatch.store.kv.pages import KvPages


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
class GroupView:
    """What a micro-batch reads and writes in the layers of a group."""

    window_rows: Mapping[Hashable, Ints]
    """Rows of the window, int64, of what each owner's new tokens see, themselves included, in order
    of position: for layers that live elsewhere. For others `KVCache.rows` says where that is."""
    moves: ViewMoves


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvView:
    """What a micro-batch of a pass reads and writes, in all layers.

    It is valid for as long as its owners keep their pages. If it continues another view's sequence,
    its context must come up after that view's tokens were stored.
    """

    place: Place
    """Where attention is computed."""
    window: int
    """Which of the windows at that place it uses in layers that live elsewhere."""
    pieces: tuple[KvPiece, ...]
    groups: tuple[GroupView, ...]
    """As the cache has them."""


class _OwnedPages(NamedTuple):
    """A piece with its pages and rows at home and the first of its pages in a window."""

    piece: KvPiece
    pages: list[int]
    rows: Ints
    first: int
    group: CacheGroup

    @property
    def window_rows(self) -> Ints:
        start = self.first * self.group.page_rows
        places = np.arange(start, start + len(self.pages) * self.group.page_rows)
        return seen_rows(places, self.piece.num_tokens, self.piece.num_cached, self.group)


def seen_rows(rows: Ints, num_tokens: int, num_before: int, group: CacheGroup) -> Ints:
    """Of an owner's rows those of its first `num_tokens` positions, without those that tokens
    behind the first `num_before` see no more; or that of its state."""
    sink_window = group.sink_window
    if sink_window is None or not (skipped := sink_window.num_skipped(num_before)):
        return rows[: group.num_rows(num_tokens)]
    sinks, num_ring = sink_window.sinks, sink_window.most_cached - sink_window.sinks
    places = np.arange(skipped, num_tokens - sinks) % num_ring + sinks
    return np.concatenate([rows[:sinks], rows[places]])


def view_of(
    place: Place, window: int, pieces: Sequence[KvPiece], tables: Sequence[KvPages]
) -> KvView:
    """The view of a micro-batch whose owners have pages in these tables, one of each group."""
    assert pieces, "a micro-batch has tokens"
    for piece in pieces:
        assert 0 <= piece.num_cached < piece.num_tokens, f"{piece} has nothing to compute"
    assert len({piece.owner for piece in pieces}) == len(pieces), "a sequence is there once"
    return KvView(
        place=place,
        window=window,
        pieces=tuple(pieces),
        groups=tuple(_group_view(pieces, table) for table in tables),
    )


def _group_view(pieces: Sequence[KvPiece], table: KvPages) -> GroupView:
    """In a window the pages of all pieces follow each other, so nothing has to be gathered
    there."""
    owned: list[_OwnedPages] = []
    first, group = 0, table.group
    for piece in pieces:
        num_pages = group.pages_of(piece.num_tokens)
        held = table.by_owner[piece.owner][:num_pages]
        assert len(held) == num_pages, f"{piece} lacks pages; grow it before"
        rows = table.rows(piece.owner)
        seen = seen_rows(rows, piece.num_tokens, piece.num_cached, group)
        owned.append(_OwnedPages(piece, held, seen, first, group))
        first += len(held)
    return GroupView(
        window_rows={part.piece.owner: part.window_rows for part in owned},
        moves=_moves_of(owned, group, num_pages=first),
    )


def _moves_of(owned: Sequence[_OwnedPages], group: CacheGroup, *, num_pages: int) -> ViewMoves:
    context: tuple[list[int], list[int]] = [], []
    touched: tuple[list[int], list[int]] = [], []
    new_rows: tuple[list[Ints], list[Ints]] = [], []
    for part in owned:
        num_new = part.piece.num_tokens - part.piece.num_cached
        new_in_window = part.window_rows[-num_new:]
        touched_there = sorted({row // group.page_rows for row in new_in_window.tolist()})
        num_context = group.pages_of(part.piece.num_cached)
        context[0].extend(part.pages[:num_context])
        context[1].extend(range(part.first, part.first + num_context))
        touched[0].extend(part.pages[page - part.first] for page in touched_there)
        touched[1].extend(touched_there)
        new_rows[0].append(part.rows[-num_new:])
        new_rows[1].append(new_in_window)
    home_rows, window_rows = (torch.from_numpy(np.concatenate(rows)) for rows in new_rows)
    return ViewMoves(
        context=Moves.of(*context),
        staged_context=Moves.of(context[1], context[1]),
        new=Moves.of(window_rows, home_rows),
        staged_new=Moves.of(window_rows, window_rows),
        touched=Moves.of(touched[1], touched[0]),
        num_pages=num_pages,
    )
