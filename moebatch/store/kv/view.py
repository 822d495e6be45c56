"""What a micro-batch of a pass reads and writes in the cache of keys and values."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from moebatch.arrays import Ints
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.model.cache import CacheGroup
from moebatch.store.kv.moves import Moves
from moebatch.store.kv.pages import KvPages, rows_of_pages


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
    """A piece with its pages at home and those of a window in which they are, and the rows in both
    of what its new tokens see."""

    piece: KvPiece
    pages: Mapping[int, int]
    rows: Ints
    window_rows: Ints


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
    found = {table: _group_view(pieces, table) for table in {*tables}}
    return KvView(
        place=place,
        window=window,
        pieces=tuple(pieces),
        groups=tuple(found[table] for table in tables),
    )


def _group_view(pieces: Sequence[KvPiece], table: KvPages) -> GroupView:
    """In a window the pages of all pieces follow each other, so nothing has to be gathered there;
    but a page that several of them hold is there once, as a window has no more pages than there
    are."""
    owned: list[_OwnedPages] = []
    places: dict[int, int] = {}
    group = table.group
    for piece in pieces:
        num_pages = group.pages_of(piece.num_tokens)
        held = table.by_owner[piece.owner][:num_pages]
        assert len(held) == num_pages, f"{piece} lacks pages; grow it before"
        pages = {page: places.setdefault(page, len(places)) for page in held}
        in_window = rows_of_pages([*pages.values()], group.page_rows)
        rows, window_rows = (
            seen_rows(rows, piece.num_tokens, piece.num_cached, group)
            for rows in (table.rows(piece.owner), in_window)
        )
        owned.append(_OwnedPages(piece, pages, rows, window_rows))
    return GroupView(
        window_rows={part.piece.owner: part.window_rows for part in owned},
        moves=_moves_of(owned, group, num_pages=len(places)),
    )


def _moves_of(owned: Sequence[_OwnedPages], group: CacheGroup, *, num_pages: int) -> ViewMoves:
    context: dict[int, int] = {}
    touched: dict[int, int] = {}
    new_rows: tuple[list[Ints], list[Ints]] = [], []
    for piece, pages, rows, window_rows in owned:
        num_new = piece.num_tokens - piece.num_cached
        context |= islice(pages.items(), group.pages_of(piece.num_cached))
        touched |= {page: pages[page] for page in (rows[-num_new:] // group.page_rows).tolist()}
        new_rows[0].append(rows[-num_new:])
        new_rows[1].append(window_rows[-num_new:])
    home, window = (torch.from_numpy(np.concatenate(rows)) for rows in new_rows)
    in_window = [*context.values()]
    return ViewMoves(
        context=Moves.of([*context], in_window),
        staged_context=Moves.of(in_window, in_window),
        new=Moves.of(window, home),
        staged_new=Moves.of(window, window),
        touched=Moves.of([*touched.values()], [*touched]),
        num_pages=num_pages,
    )
