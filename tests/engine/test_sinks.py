"""Sinks and a window: every schedule, wherever keys and values lie, says what a reference without a
cache says; and no sequence has more of them than the configuration allows."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.model.native import loader
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model import cache_layout
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout, KvCache, SinkWindow
from moebatch.spec.policy.policy import pages_of
from moebatch.store.kv.pages import KvPages
from moebatch.store.kv.view import seen_rows
from tests.engine.passes import SLICE, begun
from tests.engine.test_engine import LENGTHS, NEW_TOKENS, policy, requests, tokens_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, run
from tests.model.oracle import load
from tests.model.sinks import greedy_with_sinks
from tests.model.test_cached_numbers import round_trip
from tests.tiny import GROUPED, LATENT

SINKS = SinkWindow(4, 12)
PLACES = 4 + 12 + SLICE - 1
ROWS = requests((1, 17, 40, 3, 96, 33))
WHERE = {
    "streamed": IN_MEMORY["usual"],
    "resident": IN_MEMORY["everything resident"],
    "one by one": policy(batch_size=1, micro_batch_size=1, num_slots=9),
    "small slices": policy(tokens_per_pass=9, batch_size=3, num_slots=9),
    "all at once": policy(
        num_slots=40, resident=0, batch_size=10, tokens_per_pass=1000, micro_batch_size=100
    ),
    "sent back": policy(num_kv_pages=pages_of(PLACES) + 1, num_slots=9),
    **{name: EMULATED[name] for name in ("CPU attention", "three levels")},
}


Expected = Callable[[KvCache], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def expected_tokens(tiny_checkpoint: Callable[..., Path]) -> Expected:
    """What the reference says to the rows."""
    model = load(tiny_checkpoint("mixtral"))

    @cache
    def expected(cached_in: KvCache) -> list[tuple[int, ...]]:
        rounded = None if cached_in == "full" else partial(round_trip, dtype=cached_in)
        return [
            tuple(
                greedy_with_sinks(model, row.prompt_tokens, NEW_TOKENS, SINKS, rounded=rounded)[0]
            )
            for row in ROWS
        ]

    return expected


@pytest.fixture
def num_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of owners, whenever they get some."""
    held, grow = [], KvPages.grow

    def counting(self: KvPages, owner: Hashable, num_tokens: int) -> None:
        grow(self, owner, num_tokens)
        held.append(len(self.by_owner[owner]))

    monkeypatch.setattr(KvPages, "grow", counting)
    return held


@pytest.mark.few(name=("klotski", "cgopipe"))
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("cached_in", ["full", "int8"])
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_says_what_the_reference_says(
    tiny_checkpoint: Callable[..., Path],
    expected_tokens: Expected,
    num_held: list[int],
    tmp_path: Path,
    name: str,
    title: str,
    cached_in: KvCache,
) -> None:
    chosen = replace(WHERE[title], schedule=name)
    outcomes, _ = run(
        tiny_checkpoint("mixtral"),
        chosen,
        ROWS,
        cached_in=cached_in,
        sink_window=SINKS,
        scratch=tmp_path,
    )
    assert tokens_of(outcomes) == expected_tokens(cached_in)
    assert max(num_held) == pages_of(PLACES)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("title", ["streamed", "three levels"])
def test_without_kernels_it_says_the_same(
    tiny_checkpoint: Callable[..., Path],
    expected_tokens: Expected,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    title: str,
) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    folder = tiny_checkpoint("mixtral")
    outcomes, _ = run(folder, WHERE[title], ROWS, sink_window=SINKS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens("full")


@pytest.mark.usefixtures("small_slices")
def test_what_an_earlier_run_has_left_is_gone_on_with(
    tiny_checkpoint: Callable[..., Path], expected_tokens: Expected
) -> None:
    """Prompt and answer so far are computed anew, in slices: windows are where they were."""
    expected = expected_tokens("full")
    folder, rows = tiny_checkpoint("mixtral"), begun(ROWS, expected)
    assert tokens_of(run(folder, WHERE["streamed"], rows, sink_window=SINKS)[0]) == expected


@pytest.mark.exhaustive
def test_long_prompts_in_slices_of_the_usual_size(
    tiny_checkpoint: Callable[..., Path], num_held: list[int]
) -> None:
    folder, rows = tiny_checkpoint("mixtral"), requests((1300, 700))
    sink_window = SinkWindow(4, 60)
    expected = [
        tuple(greedy_with_sinks(load(folder), row.prompt_tokens, NEW_TOKENS, sink_window)[0])
        for row in rows
    ]
    for tokens in (3000, 777):
        chosen = policy(tokens_per_pass=tokens, num_kv_pages=100, num_slots=9)
        outcomes, _ = run(folder, chosen, rows, sink_window=sink_window, max_tokens=2000)
        assert tokens_of(outcomes) == expected, tokens
    assert max(num_held) == pages_of(4 + 60 + 511)


@pytest.mark.few
@pytest.mark.parametrize("family", (*GROUPED, *LATENT, "longcat_flash", "bailing_hybrid"))
def test_sequences_that_see_all_of_themselves_say_what_transformers_says(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    family: str,
) -> None:
    folder, longest = tiny_checkpoint(family), max(LENGTHS) + NEW_TOKENS
    outcomes, _ = run(
        folder, policy(num_slots=9), requests(), sink_window=SinkWindow(4, longest - 4)
    )
    assert tokens_of(outcomes) == expected(family)


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 12), st.data())
def test_what_a_slice_sees_is_in_places_of_its_own(
    sinks: int, window: int, largest: int, data: st.DataObject
) -> None:
    """By arithmetic from the configuration: nothing that a slice sees has been written over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_layout, "LARGEST_SLICE", largest)
        sink_window, written, position = SinkWindow(sinks, window), {}, 0
        assert sink_window.most_cached == sinks + window + largest - 1
        group = CacheGroup(layers=(0,), layout=CacheLayout.of_heads(1, 1), sink_window=sink_window)
        rows = torch.arange(group.most_rows)
        sizes = data.draw(st.lists(st.integers(1, largest), max_size=30))
        for size in [*sizes, *[largest] * (2 * len(rows) // largest)]:  # all the way round
            seen = seen_rows(rows, position + size, position, group).tolist()
            assert len(set(seen)) == len(seen)
            written |= dict(zip(seen[-size:], range(position, position + size), strict=True))
            found = [written[row] for row in seen]
            for query in range(position, position + size):
                visible = {p for p in range(query + 1) if p < sinks or p > query - window}
                assert visible <= set(found)
            assert found == sorted(found)
            position += size
            assert group.num_rows(position) == min(position, len(rows))
