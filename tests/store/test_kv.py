"""Pages of keys and values: one owner each, whatever happens."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout, SinkWindow
from moebatch.spec.policy.policy import PAGE_TOKENS, pages_of
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.prefixes import KvPrefix
from moebatch.store.memory import resident_bytes
from tests.store.kv import num_lacking

NUM_PAGES = 12


def make_cache(num_pages: int, *, head_dim: int = 2, shares: bool = False) -> KVCache:
    return KVCache(
        [CacheGroup(layers=(0, 1), layout=CacheLayout.of_heads(1, head_dim))],
        num_pages=[num_pages],
        dtype=torch.float32,
        shares=shares,
    )


@given(steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=40))
def test_every_page_has_one_owner_and_rows_never_overlap(steps: list[tuple[int, int]]) -> None:
    cache = make_cache(12)
    lengths: dict[int, int] = {}
    for owner, num_tokens in steps:
        if num_tokens < lengths.get(owner, 0) or num_tokens == 0:
            cache.release(owner)
            lengths.pop(owner, None)
        elif num_lacking(lengths.get(owner, 0), num_tokens) <= cache.first.num_free:
            cache.grow(owner, num_tokens)
            lengths[owner] = num_tokens
        cache.check_integrity()
        rows = [row for o, length in lengths.items() for row in cache.rows(o, length).tolist()]
        assert len(rows) == len(set(rows))
        assert cache.first.num_free == 12 - sum(pages_of(n) for n in lengths.values())


def test_growing_keeps_the_rows_that_are_in_use() -> None:
    cache = make_cache(4)
    cache.grow("a", 3)
    before = cache.rows("a", 3)
    cache.grow("b", PAGE_TOKENS)
    cache.grow("a", 2 * PAGE_TOKENS)
    assert np.array_equal(cache.rows("a", 3), before)


@pytest.mark.parametrize("shares", [False, True])
def test_the_lowest_pages_are_given_out_first(shares: bool) -> None:
    cache = make_cache(6, shares=shares)
    for owner in "abc":
        cache.grow(owner, 2 * PAGE_TOKENS)
    cache.release("b")
    cache.release("a")
    cache.grow("d", 3 * PAGE_TOKENS)
    assert (cache.rows("d", 3 * PAGE_TOKENS)[::PAGE_TOKENS] // PAGE_TOKENS).tolist() == [0, 1, 2]


def test_the_lowest_pages_are_given_out_first_of_those_that_are_left() -> None:
    """Whatever the order in which they fell free."""
    cache = make_cache(8)
    for page in range(8):
        cache.grow(page, 1)
    for page in (0, 3, 1, 4, 7, 2, 5, 6):
        cache.release(page)
    cache.give_back(7)
    for page in range(7):
        cache.grow(page, 1)
        assert cache.rows(page, 1).tolist() == [page * PAGE_TOKENS]


def begin(cache: KVCache, owner: str, num_pages: int, expected_pages: int) -> None:
    """With a prompt of whole pages."""
    prompt = [ord(owner)] * (num_pages * PAGE_TOKENS)
    expected = expected_pages * PAGE_TOKENS
    cache.begin(owner, prompt, KvPrefix(), tokens=len(prompt), expected_tokens=expected)


def test_an_owner_grows_into_pages_behind_those_that_it_began_with() -> None:
    cache = make_cache(8)
    begin(cache, "a", 1, expected_pages=3)
    begin(cache, "b", 1, expected_pages=2)
    assert cache.first.num_free == 6
    for owner, pages in (("b", [3, 4]), ("a", [0, 1, 2]), ("a", [0, 1, 2, 5])):
        cache.grow(owner, len(pages) * PAGE_TOKENS)
        assert cache.first.by_owner[owner] == pages
        cache.check_integrity()
    cache.release("a")
    assert cache.first.num_free == 6


def test_pages_that_an_owner_would_grow_into_are_there_for_all_when_no_others_are_left() -> None:
    cache = make_cache(6)
    begin(cache, "a", 1, expected_pages=2)
    begin(cache, "b", 1, expected_pages=9)
    begin(cache, "c", 3, expected_pages=9)
    cache.check_integrity()
    assert sorted(cache.first.by_owner["c"]) == [3, 4, 5]
    cache.grow("c", 4 * PAGE_TOKENS)
    assert cache.first.num_free == 0
    assert cache.first.by_owner["c"][-1] == 1
    cache.check_integrity()
    cache.release("a")
    cache.grow("b", 2 * PAGE_TOKENS)
    assert cache.first.by_owner["b"] == [2, 0]


class Owned:
    """Tokens of owners with the numbers that stand for their keys, in every layer."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.numbers: dict[int, list[float]] = {}

    def begin(self, owner: int, kind: int, length: int) -> None:
        prompt = [kind] * length + [100 + owner] * 2
        prefix = self.cache.first.find(prompt)
        needed = pages_of(len(prompt)) - len(prefix.pages) + self.cache.first.num_unheld(prefix)
        if owner in self.numbers or needed > self.cache.first.num_free:
            return
        expected = len(prompt) + kind * PAGE_TOKENS * owner
        self.cache.begin(owner, prompt, prefix, tokens=len(prompt), expected_tokens=expected)
        # What is shared is known by its tokens and its place; the rest is the owner's.
        self.numbers[owner] = [1000.0 * token + place for place, token in enumerate(prompt)]
        self.write(owner, prefix.num_tokens)
        self.cache.first.publish(owner, len(prompt))

    def grow(self, owner: int, count: int) -> None:
        if owner not in self.numbers:
            return
        wanted = len(self.numbers[owner]) + count
        if num_lacking(len(self.numbers[owner]), wanted) <= self.cache.first.num_free:
            self.cache.grow(owner, wanted)
            start = len(self.numbers[owner])
            self.numbers[owner] += [1e6 * (1 + owner) + n for n in range(start, wanted)]
            self.write(owner, start)

    def write(self, owner: int, start: int) -> None:
        rows = self.cache.rows(owner, len(self.numbers[owner]))[start:]
        numbers = torch.tensor(self.numbers[owner][start:])[:, None, None]
        for layer in range(2):
            keys_RGC, values_RGC = self.cache.parts("dram", layer, 0)
            keys_RGC[rows], values_RGC[rows] = numbers + layer, -numbers - layer

    def check(self) -> None:
        self.cache.check_integrity()
        for owner, numbers in self.numbers.items():
            rows, expected = self.cache.rows(owner, len(numbers)), torch.tensor(numbers)
            for layer in range(2):
                keys_RGC, values_RGC = self.cache.parts("dram", layer, 0)
                assert keys_RGC[rows, 0, 0].equal(expected + layer)
                assert values_RGC[rows, 0, 1].equal(-expected - layer)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(("begin", "grow", "release", "give back")),
            st.integers(0, 4),
            st.integers(0, 1),
            st.integers(1, 60),
        ),
        max_size=40,
    ),
    shares=st.booleans(),
    head_dim=st.sampled_from((2, 64)),
)
@example(steps=[("give back", 0, 0, 3)] * 4, shares=False, head_dim=2)
def test_what_is_held_survives_whatever_is_given_back(
    steps: list[tuple[str, int, int, int]], shares: bool, head_dim: int
) -> None:
    cache = make_cache(NUM_PAGES, head_dim=head_dim, shares=shares)
    owned, num_bytes = Owned(cache), cache.bytes_on("dram")
    for what, owner, kind, length in steps:
        if what == "begin":
            owned.begin(owner, kind, length)
        elif what == "grow":
            owned.grow(owner, length)
        elif what == "release":
            cache.release(owner)
            owned.numbers.pop(owner, None)
        else:
            num_held = cache.first.num_pages - cache.first.num_free
            fewer = max(num_held, cache.first.num_pages - length % 4)
            back = cache.give_back(fewer)
            assert cache.first.num_pages == fewer
            assert cache.bytes_on("dram") == num_bytes - back
            num_bytes -= back
        owned.check()
    for owner in owned.numbers:
        cache.release(owner)
    assert cache.first.num_free == cache.first.num_pages
    # Two layers' keys and values; what the system cannot have back is less than a page of each.
    kept = 4 * PAGE_TOKENS * head_dim * 4 * cache.first.num_pages
    assert kept <= num_bytes < kept + 4 * 4096 * 2


def test_pages_that_are_held_cannot_be_given_back() -> None:
    cache = make_cache(4)
    cache.grow("a", 2 * PAGE_TOKENS)
    with pytest.raises(AssertionError, match="pages are held"):
        cache.give_back(1)


def test_memory_of_pages_that_were_given_back_is_not_resident_any_more() -> None:
    cache = make_cache(2048, head_dim=256)
    before, total = resident_bytes(), cache.bytes_on("dram")
    back = cache.give_back(512)
    assert back == total * 3 // 4 > 90 * 2**20
    assert resident_bytes() < before - back // 2


def test_of_pages_beyond_some_as_many_bytes_are_told_as_come_back() -> None:
    """None of a group that has no more than these."""
    layout = CacheLayout.of_heads(1, 64)
    groups = [
        CacheGroup(layers=(0, 2), layout=layout),
        CacheGroup(layers=(1,), layout=layout, sink_window=SinkWindow(0, 17)),
    ]
    cache = KVCache(groups, num_pages=[20, 6], dtype=torch.float32)
    page_bytes = 2 * PAGE_TOKENS * 64 * 4
    for num_pages, expected in ((8, 2 * 12), (4, 2 * 4 + 2), (4, 0)):
        assert cache.bytes_beyond(num_pages) == expected * page_bytes
        assert cache.give_back(num_pages) == expected * page_bytes
