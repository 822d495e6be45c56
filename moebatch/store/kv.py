"""Keys and values of all sequences, in pages that sequences hold, alone or together.

Shape letters: R cache rows (one token each), G KV heads, C head size.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from moebatch.schedule.kv_route import Place
from moebatch.schedule.task import Kind
from moebatch.spec.attention import CacheLayout, SinkWindow, num_cached
from moebatch.spec.hardware import LevelName
from moebatch.spec.policy import PAGE_TOKENS, pages_of
from moebatch.store.kv_layout import KvLayout
from moebatch.store.kv_levels import KvLevels
from moebatch.store.kv_prefixes import KvPrefix, KvPrefixes
from moebatch.store.kv_tensors import KvShape, KvTensors
from moebatch.store.kv_view import KvPiece, KvView, seen_rows, view_of


class KVCache:
    """A fixed number of pages, shared by all layers: page p holds the same tokens in each.

    A page is free, kept for what it holds, or held: by one owner, or by several that begin alike
    (see `find` and `begin`). `rows` of an owner are the places of its tokens in `keys_RGC` and
    `values_RGC`, in order of position. Pages of a common beginning are written by the first of its
    owners only.

    With a `sink_window` an owner has pages for `SinkWindow.most_cached` tokens at most: behind the
    sinks its places are a ring, in which a new token takes the place of one that none sees any
    more.

    Layers live where `layout` says: all in main memory if it says nothing, and then rows and
    tensors are all there is to know. A layer that lives elsewhere than it attends is worked on in
    a window: a micro-batch takes a `view`, its context is brought in (`read`, `up`), attention
    works on `tensors`, and what is new goes home (`down`, `write`). These four are called by the
    lanes of a schedule, several at once.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        cache: CacheLayout,
        num_pages: int,
        dtype: torch.dtype,
        layout: KvLayout | None = None,
        shares: bool = False,
        sink_window: SinkWindow | None = None,
    ) -> None:
        """`shares` lets sequences that begin alike hold that beginning together, which none does
        whose places are a ring.

        Raises StorageError when layers live on a disk that has no room for them.
        """
        if layout is None:
            layout = KvLayout(levels=["dram"] * num_layers)
        assert len(layout.levels) == num_layers, "every layer has a home"
        assert not (shares and sink_window), "what is written over is not shared"
        shape = KvShape(cache=cache, dtype=dtype)
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.sink_window = sink_window
        self._levels = KvLevels(shape, layout, num_pages)
        self._free = list(range(num_pages))
        """A heap: the lowest ones are given out first, so that the highest fall free for good."""
        self._kept: dict[int, None] = {}
        """Pages without an owner whose content may be used again: those left longest ago first."""
        self._num_holders = [0] * num_pages
        self._num_joint = 0
        self._prefixes = KvPrefixes() if shares else None
        self._pages: dict[Hashable, list[int]] = {}
        self._rows: dict[Hashable, Tensor] = {}

    @property
    def keys_RGC(self) -> dict[int, Tensor]:
        """By layer, without layers on disk."""
        return {layer: home.keys_RGC for layer, home in self._levels.homes.items()}

    @property
    def values_RGC(self) -> dict[int, Tensor]:
        """By layer, without layers on disk."""
        return {layer: home.values_RGC for layer, home in self._levels.homes.items()}

    @property
    def num_free_pages(self) -> int:
        """Pages without an owner."""
        return len(self._free) + len(self._kept)

    def find(self, prompt: Sequence[int]) -> KvPrefix:
        """What is there of the beginning of a prompt, or will be soon."""
        return self._prefixes.find(prompt) if self._prefixes else KvPrefix()

    def num_unheld(self, prefix: KvPrefix) -> int:
        """Pages of a prefix that count as free."""
        return sum(page in self._kept for page in prefix.pages)

    @property
    def num_pages_held_jointly(self) -> int:
        """Pages with several owners."""
        return self._num_joint

    def num_joint_pages(self, owner: Hashable) -> int:
        """Those among them that `owner` holds: the first ones, as others hold what they share from
        its beginning on."""
        if not self._num_joint:
            return 0
        alone = (n for n, page in enumerate(self._pages[owner]) if self._num_holders[page] < 2)
        return next(alone, len(self._pages[owner]))

    def begin(self, owner: Hashable, prompt: Sequence[int], prefix: KvPrefix, tokens: int) -> None:
        """Gives a new owner the pages of a prefix, and more until it can hold `tokens` tokens.

        What it computes of its prompt is there for others once it is published.
        """
        assert owner not in self._pages, "an owner begins once"
        for page in prefix.pages:
            self._kept.pop(page, None)
            self._num_holders[page] += 1
            self._num_joint += self._num_holders[page] == 2
        self._add_pages(owner, list(prefix.pages))
        self.grow(owner, tokens)
        if self._prefixes:
            self._prefixes.enter(owner, prompt, self._pages[owner])

    def publish(self, owner: Hashable, num_tokens: int) -> None:
        """`owner` has computed so many of its tokens."""
        if self._prefixes:
            self._prefixes.publish(owner, num_tokens)

    def holds(self, num_tokens: int) -> bool:
        """Whether an owner of so many tokens can ever be computed."""
        return pages_of(num_cached(num_tokens, self.sink_window)) <= self.num_pages

    def pages_to_grow(self, owner: Hashable, num_tokens: int) -> int:
        """Pages that `owner` lacks to hold `num_tokens` tokens."""
        needed = pages_of(num_cached(num_tokens, self.sink_window))
        return max(0, needed - len(self._pages.get(owner, ())))

    def grow(self, owner: Hashable, num_tokens: int) -> None:
        """Gives `owner` pages until it can hold `num_tokens` tokens."""
        missing = self.pages_to_grow(owner, num_tokens)
        assert missing <= self.num_free_pages, "ask pages_to_grow before growing"
        # In ascending order, so that rows that follow each other can be read without gathering.
        new = sorted(self._take_page() for _ in range(missing))
        for page in new:
            self._num_holders[page] = 1
        self._add_pages(owner, new)

    def rows(self, owner: Hashable, num_tokens: int, num_before: int = 0) -> Tensor:
        """Cache rows, int64, of the owner's first `num_tokens` positions in their order, without
        those that the tokens behind the first `num_before` see no more."""
        return seen_rows(self._rows[owner], num_tokens, num_before, self.sink_window)

    def release(self, owner: Hashable) -> None:
        """Takes back what `owner` holds."""
        if self._prefixes:
            self._prefixes.withdraw(owner)
        # In reverse, so that the end of a prefix is given up before its beginning.
        for page in reversed(self._pages.pop(owner, [])):
            self._num_holders[page] -= 1
            self._num_joint -= self._num_holders[page] == 1
            if self._num_holders[page]:
                continue
            if self._prefixes and self._prefixes.is_known(page):
                self._kept[page] = None
            else:
                heapq.heappush(self._free, page)
        self._rows.pop(owner, None)

    def view(self, place: Place, window: int, pieces: Sequence[KvPiece]) -> KvView:
        """Where a micro-batch that attends at `place` finds its tokens, for one pass.

        Args:
            window: which of the `NUM_WINDOWS` windows of the place it uses.
            pieces: its sequences, each once, with pages for all of their tokens.
        """
        view = view_of(place, window, pieces, self._pages, self._rows, self.sink_window)
        self._levels.check_fits(view)
        return view

    def is_direct(self, place: Place, layer: int) -> bool:
        """Whether the layer lives at `place`: its tokens are at a view's `direct_rows` there, at
        its `window_rows` otherwise."""
        return self._levels.is_direct(place, layer)

    def tensors(self, place: Place, layer: int, window: int) -> KvTensors:
        """What attention of a layer at `place` reads and writes."""
        return self._levels.tensors(place, layer, window)

    def read(self, view: KvView, layer: int) -> None:
        """The context of the view from disk to a window in main memory.

        This and the following may be called although there is nothing to move, but not for a task
        that the layer never has. All raise StorageError when the disk fails.
        """
        self._levels.move(Kind.KV_READ, view, layer)

    def up(self, view: KvView, layer: int) -> None:
        """The context of the view to where it attends, whole pages."""
        self._levels.move(Kind.KV_UP, view, layer)

    def down(self, view: KvView, layer: int) -> None:
        """New tokens of the view to where they live, or to main memory on their way to disk."""
        self._levels.move(Kind.KV_DOWN, view, layer)

    def write(self, view: KvView, layer: int) -> None:
        """Pages with new tokens of the view from main memory to disk."""
        self._levels.move(Kind.KV_WRITE, view, layer)

    def num_bytes(self, kind: Kind, view: KvView, layer: int) -> int:
        """Bytes that `kind` moves for the view; 0 where it is not needed."""
        return self._levels.num_bytes(kind, view, layer)

    def bytes_on(self, level: LevelName) -> int:
        """What the cache takes of a level, windows included, without what was given back."""
        return self._levels.bytes_on(level)

    @property
    def page_bytes(self) -> int:
        """One page, over all layers."""
        return self._levels.page_bytes

    @property
    def can_shrink(self) -> bool:
        """Whether memory of pages can be given back: all layers are in main memory, and attend
        there."""
        return self._levels.can_shrink

    def give_back(self, num_pages: int) -> int:
        """Shrinks the cache to so many pages, for good; returns the bytes that the system has back.

        Owners keep what they hold, but rows and views that were handed out before are no longer
        valid: what lies in pages that go moves to others. What is only kept is forgotten.
        """
        assert self.num_pages - self.num_free_pages <= num_pages <= self.num_pages, "pages are held"
        going = range(num_pages, self.num_pages)
        held = [page for page in going if self._num_holders[page]]
        for page in [page for page in self._kept if page in going]:
            self._forget(page)
        self._free = [page for page in self._free if page < num_pages]
        heapq.heapify(self._free)
        self._move({page: self._take_page() for page in held})
        del self._num_holders[num_pages:]
        self.num_pages = num_pages
        return self._levels.give_back(num_pages)

    def close(self) -> None:
        """Gives the scratch file back. Nothing may be in flight."""
        self._levels.close()

    def check_integrity(self) -> None:
        """Asserts that every page is free, kept, or held as often as owners say."""
        held = Counter(page for pages in self._pages.values() for page in pages)
        homes = self._levels.homes.values()
        assert {len(home.keys_RGC) for home in homes} <= {self.num_pages * PAGE_TOKENS}, "too large"
        assert [held[page] for page in range(self.num_pages)] == self._num_holders, "holders differ"
        assert self._num_joint == sum(count > 1 for count in held.values()), "joint pages differ"
        everywhere = sorted([*held, *self._free, *self._kept])
        assert everywhere == list(range(self.num_pages)), "pages are lost or in two places"
        for owner, pages in self._pages.items():
            assert len(set(pages)) == len(pages), "an owner holds a page twice"
            rows = self._rows[owner].view(-1, PAGE_TOKENS)
            assert (rows[:, 0] // PAGE_TOKENS).tolist() == pages, "rows of an owner left its pages"

    def _take_page(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        page = next(iter(self._kept))
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        """Forgets what kept pages hold."""
        del self._kept[page]
        assert self._prefixes is not None, "only known pages are kept"
        self._prefixes.forget(page)

    def _move(self, moved: Mapping[int, int]) -> None:
        """What held pages hold goes to free ones."""
        self._levels.copy_pages(moved)
        for source, target in moved.items():
            self._num_holders[target] = self._num_holders[source]
            if self._prefixes:
                self._prefixes.move(source, target)
        for owner, pages in self._pages.items():
            if not moved.keys().isdisjoint(pages):
                pages[:] = [moved.get(page, page) for page in pages]
                self._rows[owner] = _rows_of(pages)

    def _add_pages(self, owner: Hashable, new: list[int]) -> None:
        if not new:
            return
        self._pages.setdefault(owner, []).extend(new)
        rows, held = _rows_of(new), self._rows.get(owner)
        self._rows[owner] = rows if held is None else torch.cat([held, rows])


def _rows_of(pages: Sequence[int]) -> Tensor:
    """Cache rows of pages, in their order."""
    return (torch.tensor(pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).view(-1)
