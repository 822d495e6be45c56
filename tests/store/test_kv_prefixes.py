"""Sequences that begin alike hold that beginning together, and only what is really alike."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout
from moebatch.spec.policy.policy import PAGE_TOKENS, pages_of
from moebatch.store.kv.cache import KVCache
from tests.store.kv import num_lacking

HEADER = list(range(3 * PAGE_TOKENS))
NUM_PAGES = 12


def make_cache(num_pages: int = NUM_PAGES) -> KVCache:
    return KVCache(
        [CacheGroup(layers=(0,), layout=CacheLayout.of_heads(1, 1))],
        num_pages=[num_pages],
        dtype=torch.float32,
        shares=True,
    )


def begin(cache: KVCache, owner: object, prompt: list[int]) -> int:
    """Tokens that the owner need not compute."""
    prefix = cache.first.find(prompt)
    cache.begin(owner, prompt, prefix, tokens=len(prompt))
    cache.check_integrity()
    return prefix.num_tokens


def test_a_beginning_is_found_once_it_is_computed() -> None:
    cache = make_cache()
    assert begin(cache, "a", [*HEADER, 1, 2]) == 0
    waiting = cache.first.find([*HEADER, 5, 6, 7])
    assert (waiting.num_tokens, waiting.num_pending_tokens) == (0, len(HEADER))
    cache.first.publish("a", PAGE_TOKENS + 3)
    assert cache.first.find([*HEADER, 5, 6, 7]).num_tokens == PAGE_TOKENS
    cache.first.publish("a", len(HEADER) + 2)
    assert begin(cache, "b", [*HEADER, 5, 6, 7]) == len(HEADER)
    rows = cache.rows("b", len(HEADER) + 3)
    assert np.array_equal(rows[: len(HEADER)], cache.rows("a", len(HEADER)))
    assert not set(rows[len(HEADER) :].tolist()) & set(cache.rows("a", len(HEADER) + 2).tolist())


def test_another_token_anywhere_in_the_beginning_makes_another_beginning() -> None:
    cache = make_cache()
    begin(cache, "a", [*HEADER, 1, 2])
    cache.first.publish("a", len(HEADER) + 2)
    for place in (0, PAGE_TOKENS - 1, PAGE_TOKENS, len(HEADER) - 1):
        other = [*HEADER, 1, 2]
        other[place] += 1000
        assert cache.first.find(other).num_tokens == place // PAGE_TOKENS * PAGE_TOKENS


def test_a_page_is_found_only_behind_the_pages_that_it_was_computed_behind() -> None:
    cache, (first, second) = make_cache(), ([3] * PAGE_TOKENS, [4] * PAGE_TOKENS)
    begin(cache, "a", [*first, *second, 1, 2])
    cache.first.publish("a", 2 * PAGE_TOKENS + 2)
    assert cache.first.find([*second, 1, 2]).num_tokens == 0
    assert cache.first.find([*second, *second, 1, 2]).num_tokens == 0
    assert cache.first.find([*first, *first, 1, 2]).num_tokens == PAGE_TOKENS
    assert begin(cache, "b", [*second, *second, 1, 2]) == 0


def test_what_is_computed_behind_a_page_that_is_not_is_awaited_with_it() -> None:
    """Another one had no time to wait, and was quicker."""
    cache, prompt = make_cache(), [*HEADER[: 2 * PAGE_TOKENS], 5, 6]
    begin(cache, "slow", [*HEADER[:PAGE_TOKENS], 1, 2])
    begin(cache, "quick", [*HEADER[: 2 * PAGE_TOKENS], 3, 4])
    cache.first.publish("quick", 2 * PAGE_TOKENS + 2)
    awaited = cache.first.find(prompt)
    assert (awaited.pages, awaited.num_pending_tokens) == ((), 2 * PAGE_TOKENS)
    cache.first.publish("slow", PAGE_TOKENS + 2)
    assert cache.first.find(prompt).num_tokens == 2 * PAGE_TOKENS


def test_two_tokens_at_least_are_left_to_compute() -> None:
    cache = make_cache()
    begin(cache, "a", [*HEADER, 1, 2])
    cache.first.publish("a", len(HEADER) + 2)
    assert cache.first.find(HEADER).num_tokens == len(HEADER) - PAGE_TOKENS
    assert cache.first.find([*HEADER, 1]).num_tokens == len(HEADER) - PAGE_TOKENS
    assert cache.first.find([*HEADER, 1, 2]).num_tokens == len(HEADER)


def test_what_was_computed_is_kept_until_its_pages_are_needed() -> None:
    cache = make_cache(5)
    begin(cache, "a", [*HEADER, 1, 2])
    cache.first.publish("a", len(HEADER) + 2)
    cache.release("a")
    assert cache.first.num_free == 5
    assert begin(cache, "b", [*HEADER, 3, 4]) == len(HEADER)
    cache.release("b")
    begin(cache, "c", [7] * 3 * PAGE_TOKENS)
    cache.release("c")
    assert cache.first.find([*HEADER, 5, 6]).num_tokens == 2 * PAGE_TOKENS, "the end goes first"


def test_what_its_owner_left_unfinished_is_not_found() -> None:
    cache = make_cache()
    begin(cache, "a", [*HEADER, 1, 2])
    cache.first.publish("a", PAGE_TOKENS)
    cache.release("a")
    assert cache.first.find([*HEADER, 1, 2]).num_tokens == PAGE_TOKENS
    assert cache.first.find([*HEADER, 1, 2]).num_pending_tokens == 0
    cache.check_integrity()


def test_owners_know_how_much_of_a_beginning_they_hold_together() -> None:
    cache = make_cache()
    begin(cache, "a", [*HEADER, 1, 2])
    assert (cache.first.num_joint, cache.first.num_joint_of("a")) == (0, 0)
    cache.first.publish("a", len(HEADER) + 2)
    begin(cache, "b", [*HEADER, 3, 4])
    begin(cache, "c", [*HEADER[:PAGE_TOKENS], 5, 6])
    begin(cache, "d", [7, 8])
    assert cache.first.num_joint == 3
    assert [cache.first.num_joint_of(owner) for owner in "abcd"] == [3, 3, 1, 0]
    cache.release("a")
    assert cache.first.num_joint == 1
    assert [cache.first.num_joint_of(owner) for owner in "bcd"] == [1, 1, 0]


def test_of_a_beginning_that_nobody_holds_the_pages_count_as_free() -> None:
    cache = make_cache()
    begin(cache, "a", [*HEADER, 1, 2])
    cache.first.publish("a", len(HEADER) + 2)
    prompt = [*HEADER, 3, 4]
    assert cache.first.num_unheld(cache.first.find(prompt)) == 0
    cache.release("a")
    assert cache.first.num_unheld(cache.first.find(prompt)) == 3


def test_in_a_smaller_cache_beginnings_are_found_where_they_have_moved() -> None:
    """And what nobody holds is not found in pages that are gone."""
    cache = make_cache()
    begin(cache, "early", [5] * 3 * PAGE_TOKENS)
    begin(cache, "a", [*HEADER, 1, 2])
    begin(cache, "late", [6] * 3 * PAGE_TOKENS)
    for owner in ("early", "a", "late"):
        cache.first.publish(owner, 3 * PAGE_TOKENS)
    cache.release("early")
    cache.release("late")
    before = cache.rows("a", len(HEADER)).tolist()
    cache.give_back(4)
    cache.check_integrity()
    assert cache.rows("a", len(HEADER)).tolist() != before
    found = cache.first.find([*HEADER, 3, 4])
    assert list(found.pages) == [row // PAGE_TOKENS for row in cache.rows("a", len(HEADER))[::16]]
    for other in (5, 6):
        assert cache.first.find([other] * 3 * PAGE_TOKENS).pages == ()
    cache.release("a")
    assert cache.first.num_free == 4
    assert begin(cache, "b", [*HEADER, 3, 4]) == len(HEADER)


steps = st.lists(
    st.tuples(
        st.sampled_from(("begin", "publish", "grow", "release")),
        st.integers(0, 5),
        st.integers(0, 2),
        st.integers(1, 70),
    ),
    max_size=60,
)


@given(steps)
def test_whatever_happens_pages_add_up_and_nobody_sees_what_is_not_his(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Every page that has been computed says which tokens it stands for."""
    cache = make_cache()
    prompts: dict[int, list[int]] = {}
    written: dict[int, tuple[int, ...]] = {}
    for what, owner, kind, length in steps:
        prompt = [kind] * length + [owner, owner]
        if what == "begin" and owner not in prompts:
            prefix = cache.first.find(prompt)
            for place, page in enumerate(prefix.pages):
                assert written[page] == tuple(prompt[: (place + 1) * PAGE_TOKENS])
            needed = pages_of(len(prompt)) - len(prefix.pages) + cache.first.num_unheld(prefix)
            if needed <= cache.first.num_free:
                cache.begin(owner, prompt, prefix, tokens=len(prompt))
                prompts[owner] = prompt
        elif what == "publish" and owner in prompts:
            prompt = prompts[owner]
            for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
                page = int(cache.rows(owner, end)[-1]) // PAGE_TOKENS
                written[page] = tuple(prompt[:end])
            cache.first.publish(owner, len(prompt))
        elif what == "grow" and owner in prompts:
            if num_lacking(len(prompts[owner]), 90) <= cache.first.num_free:
                cache.grow(owner, 90)
        elif what == "release":
            cache.release(owner)
            prompts.pop(owner, None)
        cache.check_integrity()
    for owner in prompts:
        cache.release(owner)
    assert cache.first.num_free == NUM_PAGES
