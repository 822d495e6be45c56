"""What passes ask of a cache of keys and values, in words of tests."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from moebatch.arrays import Ints
from moebatch.schedule.steps.kv_route import Place
from moebatch.schedule.task import Kind
from moebatch.spec.policy.policy import pages_of
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.view import KvPiece, KvView


def rows_of(cache: KVCache, view: KvView, piece: KvPiece, layer: int, *, group: int = 0) -> Ints:
    """Where attention finds what new tokens see, themselves included."""
    if cache.is_direct(view.place, layer):
        return cache.rows(piece.owner, piece.num_tokens, piece.num_cached, group=group)
    return view.groups[group].window_rows[piece.owner]


def moved_by(cache: KVCache, view: KvView, layer: int) -> set[Kind]:
    """Tasks that have something to move."""
    kinds = (Kind.KV_READ, Kind.KV_UP, Kind.KV_DOWN, Kind.KV_WRITE)
    return {kind for kind in kinds if cache.num_bytes(kind, view, layer)}


def bring(cache: KVCache, view: KvView, layer: int) -> None:
    """The context of a view, to where it attends."""
    _move(cache, view, layer, Kind.KV_READ, Kind.KV_UP)


def store(cache: KVCache, view: KvView, layer: int) -> None:
    """What is new in a view, to where it lives."""
    _move(cache, view, layer, Kind.KV_DOWN, Kind.KV_WRITE)


def _move(cache: KVCache, view: KvView, layer: int, *kinds: Kind) -> None:
    needs = moved_by(cache, view, layer)
    for kind in kinds:
        if kind in needs:
            cache.move(kind, view, layer)


def num_lacking(length: int, num_tokens: int) -> int:
    """Pages that an owner of so many tokens lacks to hold more."""
    return max(0, pages_of(num_tokens) - pages_of(length))


@dataclass
class Owners:
    """Does with a cache what passes do for some owners, and remembers what must be in it."""

    cache: KVCache
    lengths: dict[Hashable, int] = field(default_factory=dict)
    stored: dict[tuple[Hashable, int, int], float] = field(default_factory=dict)
    """By owner, position and layer; of states, what they have come to."""
    numbers: Iterator[int] = field(default_factory=count)

    def view(self, place: Place, window: int, work: Sequence[tuple[Hashable, int]]) -> KvView:
        """The next tokens of some owners."""
        pieces = []
        for owner, num_tokens in work:
            start = self.lengths.get(owner, 0)
            self.cache.grow(owner, start + num_tokens)
            self.lengths[owner] = start + num_tokens
            pieces.append(KvPiece(owner, start, start + num_tokens))
        return self.cache.view(place, window, pieces)

    def bring(self, view: KvView, layer: int) -> None:
        if not self.cache.is_direct(view.place, layer):  # nothing old may be of any use
            for part in self.cache.tensors(view.place, layer, view.window).parts:
                part.fill_(torch.nan)
        bring(self.cache, view, layer)

    def release(self, owner: Hashable) -> None:
        self.cache.release(owner)
        self.lengths.pop(owner, None)
