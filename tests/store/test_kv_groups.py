"""Layers that keep all of a sequence, its last tokens, or a state, in one cache: wherever they
live, each finds what it stored, and no row has two owners."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.model import cache_layout
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout, CachePart, SinkWindow
from moebatch.spec.policy.policy import pages_of
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.layout import KvLayout
from moebatch.store.kv.pages import KvPages
from moebatch.store.kv.view import KvPiece, KvView
from tests.few import examples
from tests.store.kv import Owners, moved_by, num_lacking, rows_of, store

SLICE = 6
MAX_TOKENS = 70
SEATS, OWNERS, NUM_PAGES = 2, 4, 14
HEADS = CacheLayout.of_heads(1, 3)
STATE = CacheLayout((CachePart("sum", 2, 5), CachePart("newest", 1, 3)))
BESIDE = CacheLayout((CachePart("beside", 1, 2),))
"""What some layers keep of every token beside what others of their kind keep as well."""
LEVELS: tuple[LevelName, ...] = ("vram",) * 4 + ("dram",) * 4 + ("disk",) * 4
IN_MEMORY: tuple[LevelName, ...] = ("dram",) * 12
GROUPS = (
    CacheGroup(layers=(0, 5, 9), layout=HEADS),
    CacheGroup(layers=(1, 4, 8), layout=HEADS, sink_window=SinkWindow(2, 27)),
    CacheGroup(layers=(2, 6, 10), layout=HEADS, sink_window=SinkWindow(0, 13)),
    CacheGroup(layers=(3, 7, 11), layout=STATE, is_state=True),
    CacheGroup(layers=(5, 9), layout=BESIDE),
)
GROUP_OF = {layer: number for number, group in enumerate(GROUPS[:4]) for layer in group.layers}
NO_GPU: tuple[Place, ...] = ("dram",)
ON_GPU: tuple[Place, ...] = ("vram",)
ON_BOTH: tuple[Place, ...] = ("vram", "dram")


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_layout, "LARGEST_SLICE", SLICE)


def pages(number: int) -> int:
    """By arithmetic: as many as admission gives out, or a ring, or a state, for each owner."""
    ring = OWNERS * pages_of(27 + 2 + SLICE - 1)
    return (NUM_PAGES, ring, OWNERS * 2, OWNERS, NUM_PAGES)[number]


def make_cache(folder: Path, places: Sequence[Place], levels: Sequence[LevelName]) -> KVCache:
    window_pages = [SEATS * group.pages_of(MAX_TOKENS) for group in GROUPS]
    return KVCache(
        GROUPS,
        num_pages=[pages(number) for number in range(len(GROUPS))],
        dtype=torch.float32,
        layout=KvLayout(levels=levels, places=places, window_pages=window_pages, folder=folder),
    )


class Program(Owners):
    def run_pass(self, views: Sequence[KvView]) -> None:
        for layer in range(len(LEVELS)):
            for view in views:
                self.bring(view, layer)
                self.attend(view, layer)
                store(self.cache, view, layer)

    def attend(self, view: KvView, layer: int) -> None:
        """Looks at all that new tokens see, then puts new numbers beside it."""
        group = GROUPS[GROUP_OF[layer]]
        parts = self.cache.tensors(view.place, layer, view.window).parts
        for piece in view.pieces:
            owner, num_cached, num_tokens = piece
            rows = rows_of(self.cache, view, piece, layer, group=GROUP_OF[layer])
            new = range(num_cached, num_tokens)
            if group.is_state:
                assert len(rows) == 1
                self._remember(layer, owner, new, [part[rows[0]] for part in parts])
                continue
            visible = self._visible(group, num_cached)
            assert len(rows) == len(visible) + len(new)
            expected = torch.tensor([self.stored[owner, p, layer] for p in visible])
            factors = (1, -1, 2)[: 2 + (layer in GROUPS[4].layers)]
            for part, factor in zip(parts, factors, strict=True):
                old = part[rows[: len(visible)], 0]
                assert old.equal((factor * expected)[:, None].expand(old.shape))
            for position, row in zip(new, rows[len(visible) :], strict=True):
                number = float(next(self.numbers))
                self.stored[owner, position, layer] = number
                for part, factor in zip(parts, factors, strict=True):
                    part[row] = factor * number

    def _remember(
        self, layer: int, owner: Hashable, new: range, state: Sequence[torch.Tensor]
    ) -> None:
        """A running sum, and the newest number."""
        total = 0.0
        if new.start:
            total = self.stored[owner, new.start - 1, layer]
            assert (state[0] == total).all(), "the sum so far"
            assert (state[1] == self.stored[owner, new.start - 1, layer + 1000]).all()
        for position in new:
            number = float(next(self.numbers) % 7)
            total += number
            self.stored[owner, position, layer] = total
            self.stored[owner, position, layer + 1000] = number
        state[0].fill_(total)
        state[1].fill_(number)

    def _visible(self, group: CacheGroup, num_cached: int) -> list[int]:
        """Positions before new ones that the first of these sees."""
        if group.sink_window is None:
            return list(range(num_cached))
        sinks, window = group.sink_window.sinks, group.sink_window.window
        return [p for p in range(num_cached) if p < sinks or p > num_cached - window]

    def check(self) -> None:
        self.cache.check_integrity()
        for number, group in enumerate(self.cache.groups):
            held = [
                row
                for owner, length in self.lengths.items()
                for row in self.cache.rows(owner, length, group=number).tolist()
            ]
            assert len(held) == len(set(held)), f"a row of {group} has two owners"


Work = tuple[int, int]
passes = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(1, OWNERS), st.integers(1, 25)),
            min_size=1,
            max_size=4,
            unique_by=lambda work: work[0],
        ),
        st.lists(st.integers(1, OWNERS), max_size=2),
        st.booleans(),
    ),
    max_size=7,
)


def views_of(run: Program, works: Sequence[Work], places: Sequence[Place]) -> Iterator[KvView]:
    """Micro-batches of short slices of up to two sequences, and of long slices piece by piece; what
    does not fit is left."""
    batches: list[list[tuple[Hashable, int]]] = []
    free = run.cache.first.num_free
    for owner, num_tokens in works:
        num_tokens = min(num_tokens, MAX_TOKENS - run.lengths.get(owner, 0))
        length = run.lengths.get(owner, 0)
        free -= num_lacking(length, length + num_tokens)
        if num_tokens == 0 or free < 0:
            break
        if num_tokens > SLICE:
            starts = range(0, num_tokens, SLICE)
            batches += [[(owner, min(SLICE, num_tokens - start))] for start in starts]
        elif batches and len(batches[-1]) < SEATS and batches[-1][0][0] != owner:
            batches[-1].append((owner, num_tokens))
        else:
            batches.append([(owner, num_tokens)])
    for k, batch in enumerate(batches):
        yield run.view(places[k % len(places)], k % 2, batch)


@pytest.mark.parametrize("levels", [LEVELS, IN_MEMORY], ids=["levels", "memory"])
@pytest.mark.parametrize("places", [NO_GPU, ON_GPU, ON_BOTH], ids="+".join)
@examples(25, HealthCheck.function_scoped_fixture)
@given(program=passes)
def test_every_layer_finds_what_it_keeps(
    tmp_path: Path,
    places: tuple[Place, ...],
    levels: tuple[LevelName, ...],
    program: list[tuple[list[Work], list[int], bool]],
) -> None:
    """Other groups never run short where the first one has pages."""
    with closing(make_cache(tmp_path, places, levels)) as cache:
        run = Program(cache)
        for works, releases, prompts_first in program:
            order = places if prompts_first else places[::-1]
            run.run_pass(list(views_of(run, works, order)))
            run.check()
            for owner in releases:
                run.release(owner)
            if cache.can_shrink and prompts_first:
                fewer = max(cache.first.num_pages - cache.first.num_free, cache.first.num_pages - 1)
                before = cache.bytes_on("dram")
                back = cache.give_back(fewer)
                assert cache.bytes_on("dram") == before - back
            run.check()


def test_groups_whose_rows_are_alike_share_windows(tmp_path: Path) -> None:
    """The window of a micro-batch goes from layer to layer, so it is as large as one of them
    needs; homes are as large as what each layer keeps."""
    row, state, beside = 2 * 3 * 4, (2 * 5 + 3) * 4, 2 * 4
    page_bytes = (16 * row, 16 * row, 16 * row, state, 16 * beside)
    with closing(make_cache(tmp_path, ON_GPU, LEVELS)) as cache:
        windows = 2 * SEATS * (pages_of(MAX_TOKENS) * 16 * (row + beside) + state)
        of_levels = [
            sum(
                pages(number) * page_bytes[number] * (LEVELS[layer] == level)
                for number, group in enumerate(GROUPS)
                for layer in group.layers
            )
            for level in ("vram", "dram", "disk")
        ]
        assert cache.bytes_on("vram") == of_levels[0] + windows
        assert cache.bytes_on("dram") == of_levels[1] + windows  # on the way to disk
        file = cache._file
        assert file is not None and file.num_bytes == of_levels[2]


def test_a_state_moves_whole_and_nothing_comes_up_where_it_begins(tmp_path: Path) -> None:
    state = (2 * 5 + 3) * 4
    with closing(make_cache(tmp_path, ON_GPU, LEVELS)) as cache:
        cache.grow("a", 20)
        begin = cache.view("vram", 0, [KvPiece("a", 0, 5)])
        later = cache.view("vram", 0, [KvPiece("a", 5, 11)])
        for layer, kinds in ((7, ("kv up", "kv down")), (11, ("kv read", "kv up", "kv down"))):
            assert moved_by(cache, later, layer) >= set(kinds)
            assert "kv up" not in moved_by(cache, begin, layer)
            assert {cache.num_bytes(kind, later, layer) for kind in kinds} == {state}


def test_groups_that_keep_all_lie_at_the_same_places_and_share_what_begins_alike() -> None:
    wide = CacheGroup(layers=(1,), layout=CacheLayout.of_heads(2, 5))
    narrow = CacheGroup(layers=(0, 2), layout=HEADS)
    with closing(
        KVCache((narrow, wide), num_pages=[8, 8], dtype=torch.float32, shares=True)
    ) as cache:
        prompt = list(range(40))
        cache.begin("a", prompt, cache.first.find(prompt), 40)
        cache.first.publish("a", 40)
        prefix = cache.first.find([*prompt[:32], 7])
        assert prefix.pages
        cache.begin("b", [*prompt[:32], 7], prefix, 33)
        assert cache.first.num_free == 8 - 3 - (3 - len(prefix.pages))
        for owner, length in (("a", 40), ("b", 33)):
            rows = cache.rows(owner, length, group=0)
            assert np.array_equal(rows, cache.rows(owner, length, group=1))
        first = cache.rows("b", 33)[0]
        cache.parts("dram", 1, 0)[0][first] = 3.0
        cache.release("a")
        assert cache.bytes_beyond(3) == 5 * 16 * (2 * 24 + 80)
        cache.give_back(3)
        assert cache.first.num_pages == 3
        first = cache.rows("b", 33, group=1)[0]
        assert (cache.parts("dram", 1, 0)[0][first] == 3.0).all()
        cache.check_integrity()


def test_what_is_written_over_is_not_shared() -> None:
    for group in GROUPS[1:4]:
        with pytest.raises(AssertionError, match="not shared"):
            KvPages(group, 1, shares=True)
