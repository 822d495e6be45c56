"""Which pages of a group of layers a sequence holds, alone or together with others."""

import heapq
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain

import numpy as np

from moebatch.arrays import Ints
from moebatch.spec.model.cache import CacheGroup
from moebatch.store.kv.prefixes import KvPrefix, KvPrefixes


class KvPages:
    """A fixed number of pages: page p holds the same tokens in each layer of the group.

    A page is free, kept for what it holds, or held: by one owner, or by several that begin alike
    (see `find` and `begin`). Pages of a common beginning are written by the first of its owners
    only.
    """

    def __init__(self, group: CacheGroup, num_pages: int, *, shares: bool) -> None:
        """`shares` lets sequences that begin alike hold that beginning together, which none does
        where less than all of it is there."""
        assert not shares or group.is_whole, "what is written over is not shared"
        self.group = group
        self.num_pages = num_pages
        self.num_joint = 0
        """Pages with several owners."""
        self.by_owner: dict[Hashable, list[int]] = {}
        self._free = list(range(num_pages))
        """A heap: the lowest ones are given out first, so that the highest fall free for good."""
        self._ahead: dict[Hashable, deque[int]] = {}
        """Of owners: free pages behind those that they hold, which they grow into, so that their
        pages lie together. Others get them only where no other is free."""
        self._num_ahead = 0
        self._kept: dict[int, None] = {}
        """Pages without an owner whose content may be used again: those left longest ago first."""
        self._num_holders = [0] * num_pages
        self._prefixes = KvPrefixes() if shares else None
        self._rows: dict[Hashable, Ints] = {}

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free) + self._num_ahead + len(self._kept)

    def find(self, prompt: Sequence[int]) -> KvPrefix:
        """What is there of the beginning of a prompt, or will be soon."""
        return self._prefixes.find(prompt) if self._prefixes else KvPrefix()

    def num_unheld(self, prefix: KvPrefix) -> int:
        """Pages of a prefix that count as free."""
        return sum(page in self._kept for page in prefix.pages)

    def num_joint_of(self, owner: Hashable) -> int:
        """Pages with several owners that `owner` holds: the first ones, as others hold what they
        share from its beginning on."""
        if not self.num_joint:
            return 0
        held = self.by_owner[owner]
        alone = (number for number, page in enumerate(held) if self._num_holders[page] < 2)
        return next(alone, len(held))

    def begin(
        self,
        owner: Hashable,
        prompt: Sequence[int],
        prefix: KvPrefix,
        tokens: int,
        *,
        expected_tokens: int = 0,
    ) -> None:
        """Gives a new owner the pages of a prefix, and more until it can hold `tokens` tokens. It
        grows into those behind them up to `expected_tokens`, if they are still free then.

        What it computes of its prompt is there for others once it is published.
        """
        assert owner not in self.by_owner, "an owner begins once"
        for page in prefix.pages:
            self._kept.pop(page, None)
            self._num_holders[page] += 1
            self.num_joint += self._num_holders[page] == 2
        self._add(owner, list(prefix.pages))
        self.grow(owner, tokens)
        num_ahead = self.group.pages_of(max(tokens, expected_tokens)) - len(self.by_owner[owner])
        if num_ahead > 0:
            pages = [heapq.heappop(self._free) for _ in range(min(num_ahead, len(self._free)))]
            self._ahead[owner] = deque(pages)
            self._num_ahead += len(pages)
        if self._prefixes:
            self._prefixes.enter(owner, prompt, self.by_owner[owner])

    def publish(self, owner: Hashable, num_tokens: int) -> None:
        """`owner` has computed so many of its tokens."""
        if self._prefixes:
            self._prefixes.publish(owner, num_tokens)

    def grow(self, owner: Hashable, num_tokens: int) -> None:
        """Gives `owner` pages until it can hold `num_tokens` tokens."""
        if self.group.num_rows(num_tokens) <= len(self._rows.get(owner, ())):
            return  # mostly: every sequence is asked for in each pass
        missing = self.group.pages_of(num_tokens) - len(self.by_owner.get(owner, ()))
        assert missing <= self.num_free, "ask how many are lacking before growing"
        # In ascending order, so that rows that follow each other can be read without gathering.
        new = sorted(self._take(owner) for _ in range(missing))
        for page in new:
            self._num_holders[page] = 1
        self._add(owner, new)

    def rows(self, owner: Hashable) -> Ints:
        """Cache rows, int64, of all that the owner's pages hold, in the order of its places."""
        return self._rows[owner]

    def release(self, owner: Hashable) -> None:
        """Takes back what `owner` holds."""
        if self._prefixes:
            self._prefixes.withdraw(owner)
        self._open_up(owner)
        # In reverse, so that the end of a prefix is given up before its beginning.
        for page in reversed(self.by_owner.pop(owner, [])):
            self._num_holders[page] -= 1
            self.num_joint -= self._num_holders[page] == 1
            if self._num_holders[page]:
                continue
            if self._prefixes and self._prefixes.is_known(page):
                self._kept[page] = None
            else:
                heapq.heappush(self._free, page)
        self._rows.pop(owner, None)

    def shrink(self, num_pages: int) -> Mapping[int, int]:
        """Leaves only the first pages, for good; returns where held ones go that do not stay. What
        is only kept is forgotten."""
        assert self.num_pages - self.num_free <= num_pages <= self.num_pages, "pages are held"
        for owner in [*self._ahead]:
            self._open_up(owner)
        going = range(num_pages, self.num_pages)
        held = [page for page in going if self._num_holders[page]]
        for page in [page for page in self._kept if page in going]:
            self._forget(page)
        self._free = [page for page in self._free if page < num_pages]
        heapq.heapify(self._free)
        moved = {page: self._take() for page in held}
        self._move(moved)
        del self._num_holders[num_pages:]
        self.num_pages = num_pages
        return moved

    def check_integrity(self) -> None:
        """Asserts that every page is free, kept, or held as often as owners say."""
        held = Counter(page for pages in self.by_owner.values() for page in pages)
        assert [held[page] for page in range(self.num_pages)] == self._num_holders, "holders differ"
        assert self.num_joint == sum(count > 1 for count in held.values()), "joint pages differ"
        everywhere = sorted([*held, *self._free, *chain(*self._ahead.values()), *self._kept])
        assert self._ahead.keys() <= self.by_owner.keys(), "one that is gone would grow"
        assert sum(map(len, self._ahead.values())) == self._num_ahead, "pages ahead differ"
        assert everywhere == list(range(self.num_pages)), "pages are lost or in two places"
        if self._prefixes:
            assert self._prefixes.computing <= self.by_owner.keys(), "one that is gone is awaited"
        for owner, pages in self.by_owner.items():
            assert len(set(pages)) == len(pages), "an owner holds a page twice"
            rows = self._rows[owner].reshape(-1, self.group.page_rows)
            assert (rows[:, 0] // self.group.page_rows).tolist() == pages, (
                "rows of an owner left its pages"
            )

    def _take(self, owner: Hashable = None) -> int:
        if ahead := self._ahead.get(owner):
            self._num_ahead -= 1
            return ahead.popleft()
        if self._free:
            return heapq.heappop(self._free)
        if self._num_ahead:
            self._num_ahead -= 1
            return self._last_ahead().pop()
        page = next(iter(self._kept))
        self._forget(page)
        return page

    def _last_ahead(self) -> deque[int]:
        """Of the owner that began last, most of whose answer is to come."""
        while not self._ahead[last := next(reversed(self._ahead))]:
            del self._ahead[last]
        return self._ahead[last]

    def _open_up(self, owner: Hashable) -> None:
        """Gives everyone what an owner would grow into."""
        ahead = self._ahead.pop(owner, ())
        self._num_ahead -= len(ahead)
        for page in ahead:
            heapq.heappush(self._free, page)

    def _forget(self, page: int) -> None:
        """Forgets what a kept page holds."""
        del self._kept[page]
        assert self._prefixes is not None, "only known pages are kept"
        self._prefixes.forget(page)

    def _move(self, moved: Mapping[int, int]) -> None:
        """What held pages hold goes to free ones."""
        for source, target in moved.items():
            self._num_holders[target] = self._num_holders[source]
            if self._prefixes:
                self._prefixes.move(source, target)
        for owner, pages in self.by_owner.items():
            pages[:] = [moved.get(page, page) for page in pages]
            self._rows[owner] = rows_of_pages(pages, self.group.page_rows)

    def _add(self, owner: Hashable, new: list[int]) -> None:
        self.by_owner.setdefault(owner, []).extend(new)
        rows, held = rows_of_pages(new, self.group.page_rows), self._rows.get(owner)
        self._rows[owner] = rows if held is None else np.concatenate([held, rows])


def rows_of_pages(pages: Sequence[int], page_rows: int) -> Ints:
    """Rows, int64, of pages of so many, in their order."""
    first_P = page_rows * np.array(pages, np.int64)
    return (first_P[:, None] + np.arange(page_rows)).reshape(-1)
