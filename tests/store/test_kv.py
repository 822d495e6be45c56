"""Pages of keys and values: one owner each, whatever happens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.spec.policy import PAGE_TOKENS, pages_of
from moebatch.store.kv import KVCache


def make_cache(num_pages: int) -> KVCache:
    return KVCache(
        num_layers=2, num_kv_heads=1, head_dim=2, num_pages=num_pages, dtype=torch.float32
    )


@given(steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=40))
def test_every_page_has_one_owner_and_rows_never_overlap(steps: list[tuple[int, int]]) -> None:
    cache = make_cache(12)
    lengths: dict[int, int] = {}
    for owner, num_tokens in steps:
        if num_tokens < lengths.get(owner, 0) or num_tokens == 0:
            cache.release(owner)
            lengths.pop(owner, None)
        elif cache.pages_to_grow(owner, num_tokens) <= cache.num_free_pages:
            cache.grow(owner, num_tokens)
            lengths[owner] = num_tokens
        cache.check_integrity()
        rows = [row for o, length in lengths.items() for row in cache.rows(o, length).tolist()]
        assert len(rows) == len(set(rows))
        assert cache.num_free_pages == 12 - sum(pages_of(n) for n in lengths.values())


def test_growing_keeps_the_rows_that_are_in_use() -> None:
    cache = make_cache(4)
    cache.grow("a", 3)
    before = cache.rows("a", 3)
    cache.grow("b", PAGE_TOKENS)
    cache.grow("a", 2 * PAGE_TOKENS)
    assert cache.rows("a", 3).equal(before)
