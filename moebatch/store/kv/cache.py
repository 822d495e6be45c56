"""Keys and values of all sequences, in pages that sequences hold, alone or together."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.model.cache import CacheGroup
from moebatch.store.kv.layout import KvLayout
from moebatch.store.kv.levels import KvLevels
from moebatch.store.kv.pages import KvPages
from moebatch.store.kv.prefixes import KvPrefix
from moebatch.store.kv.view import KvPiece, KvView, seen_rows, view_of


class KVCache(KvLevels):
    """Pages of groups of layers, each with as many as suit what it keeps of a sequence.

    An owner holds pages of every group. It may have them where there are enough in the first group,
    which keeps most: the others never run short (see `CacheGroup.num_pages`). `rows` of an owner
    are the places of its tokens in the `tensors` of a layer, in order of position. Where a group
    keeps less than all of a sequence its places behind the sinks are a ring, in which a new token
    takes the place of one that none sees any more.

    Layers live where `layout` says: all in main memory if it says nothing, and then rows and
    tensors are all there is to know. A layer that lives elsewhere than it attends is worked on in
    a window: a micro-batch takes a `view`, its context is brought in (`KV_READ`, `KV_UP`),
    attention works on `tensors`, and what is new goes home (`KV_DOWN`, `KV_WRITE`). The lanes of a
    schedule `move` it, several at once.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_pages: Sequence[int],
        dtype: torch.dtype,
        layout: KvLayout | None = None,
        shares: bool = False,
    ) -> None:
        """`num_pages` are those of each group; `shares` lets sequences that begin alike hold that
        beginning together, where all groups keep all.

        Raises StorageError when layers live on a disk that has no room for them.
        """
        self.layers = sorted({layer for group in groups for layer in group.layers})
        """Those that keep anything."""
        if layout is None:
            layout = KvLayout(levels=["dram"] * (self.layers[-1] + 1))
        assert len(layout.levels) > self.layers[-1], "every layer has a home"
        self.groups = tuple(groups)
        super().__init__(groups, num_pages, dtype, layout)
        alike = [(group.sink_window, group.is_state) for group in groups]
        found = {
            kind: KvPages(group, count, shares=shares)
            for kind, group, count in zip(alike, groups, num_pages, strict=True)
        }
        self._tables = [found[kind] for kind in alike]
        """Of each group; those share one that keep as much, of rows that differ."""
        self._distinct = [*found.values()]
        self.apart = tuple(map(alike.index, found))
        """Numbers of groups, one of those whose rows of a sequence are at the same places."""
        self.first = self._tables[0]
        """Of the first group, which keeps most: it says what there is room for, and what of a
        prompt is there."""

    # --- pages ----------------------------------------------------------------------------------

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is written over for as long as its owner holds it."""
        return all(group.is_whole for group in self.groups)

    def begin(
        self,
        owner: Hashable,
        prompt: Sequence[int],
        prefix: KvPrefix,
        tokens: int,
        *,
        expected_tokens: int = 0,
    ) -> None:
        """Gives a new owner pages of every group, as `KvPages.begin` does."""
        for table in self._distinct:
            table.begin(owner, prompt, prefix, tokens, expected_tokens=expected_tokens)

    def holds(self, num_tokens: int) -> bool:
        """Whether an owner of so many tokens can ever be computed."""
        return self.first.group.pages_of(num_tokens) <= self.first.num_pages

    def grow(self, owner: Hashable, num_tokens: int) -> None:
        """Gives `owner` pages until it can hold `num_tokens` tokens."""
        for table in self._distinct:
            table.grow(owner, num_tokens)

    def rows(
        self, owner: Hashable, num_tokens: int, num_before: int = 0, *, group: int = 0
    ) -> Ints:
        """Cache rows, int64, of the owner's first `num_tokens` positions in their order, without
        those that the tokens behind the first `num_before` see no more."""
        table = self._tables[group]
        return seen_rows(table.rows(owner), num_tokens, num_before, table.group)

    def release(self, owner: Hashable) -> None:
        """Takes back what `owner` holds."""
        for table in self._distinct:
            table.release(owner)

    # --- levels ---------------------------------------------------------------------------------

    def view(self, place: Place, window: int, pieces: Sequence[KvPiece]) -> KvView:
        """Where a micro-batch that attends at `place` finds its tokens, for one pass.

        Args:
            window: which of the `NUM_WINDOWS` windows of the place it uses.
            pieces: its sequences, each once, with pages for all of their tokens.
        """
        view = view_of(place, window, pieces, self._tables)
        self.check_fits(view)
        return view

    def parts(self, place: Place, layer: int, window: int) -> tuple[Tensor, ...]:
        """Its tensors; none where the layer keeps nothing."""
        return self.tensors(place, layer, window).parts if layer in self._of_layer else ()

    # --- the end of a job -----------------------------------------------------------------------

    def bytes_beyond(self, num_pages: int) -> int:
        """Bytes of the pages that there would be no more if the first group had so many."""
        return sum(
            max(0, table.num_pages - num_pages) * self.page_bytes(number)
            for number, table in enumerate(self._tables)
        )

    def give_back(self, num_pages: int) -> int:
        """Shrinks the cache to so many pages of the first group, and to no more of any other, for
        good; returns the bytes that the system has back.

        Owners keep what they hold, but rows and views that were handed out before are no longer
        valid: what lies in pages that go moves to others.
        """
        moved = {table: table.shrink(min(table.num_pages, num_pages)) for table in self._distinct}
        for number, table in enumerate(self._tables):
            self.copy_pages(number, moved[table])
        return self.cut_down([table.num_pages for table in self._tables])

    def check_integrity(self) -> None:
        """Asserts that every page is free, kept, or held as often as owners say, and that owners
        hold pages of all groups."""
        owners = self.first.by_owner.keys()
        for number, (table, group) in enumerate(zip(self._tables, self.groups, strict=True)):
            table.check_integrity()
            assert table.by_owner.keys() == owners, "an owner is not in all groups"
            rows = table.num_pages * group.page_rows
            homes = [self.homes.get((layer, number)) for layer in group.layers]
            assert {len(part) for home in homes if home for part in home.parts} <= {rows}, (
                "too large"
            )
