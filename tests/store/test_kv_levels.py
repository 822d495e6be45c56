"""Keys and values by level: whatever lives where, attention finds what it stored."""

from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from moebatch.schedule.steps.kv_route import Place
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import SCALE_BYTES, CacheLayout, CachePart
from moebatch.spec.policy.policy import PAGE_TOKENS, pages_of
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.layout import KvLayout, WindowName
from moebatch.store.kv.view import KvPiece, KvView
from moebatch.store.memory import Arena
from tests.few import examples
from tests.store.kv import Owners, bring, moved_by, num_lacking, rows_of, store
from tests.store.test_kv_disk import num_open_files

MAX_TOKENS = 4 * PAGE_TOKENS
SEATS = 2
WINDOW_PAGES = SEATS * pages_of(MAX_TOKENS)
NUM_PAGES = 12
EVERYWHERE: tuple[LevelName, ...] = ("vram", "dram", "disk", "disk")
NO_GPU: tuple[Place, ...] = ("dram",)
ON_GPU: tuple[Place, ...] = ("vram",)
ON_BOTH: tuple[Place, ...] = ("dram", "vram")
SMALL, BLOCKS = CacheLayout.of_heads(1, 2), CacheLayout.of_heads(1, 64)
"""Pages are smaller than a block of a disk, and whole blocks."""
CODED, CODED_BLOCKS = (CacheLayout.of_heads(1, n).cached_in("int8") for n in (6, 254))
"""The same in 8 bits."""
UNEVEN = CacheLayout((CachePart("latents", 1, 6), CachePart("rotated keys", 2, 1)))


def make_cache(
    folder: Path,
    places: Collection[Place],
    *,
    levels: Sequence[LevelName] = EVERYWHERE,
    cached: CacheLayout = SMALL,
    num_pages: int = NUM_PAGES,
    shares: bool = False,
) -> KVCache:
    return KVCache(
        [CacheGroup(layers=tuple(range(len(levels))), layout=cached)],
        num_pages=[num_pages],
        dtype=torch.float32,
        layout=KvLayout(levels=levels, places=places, window_pages=[WINDOW_PAGES], folder=folder),
        shares=shares,
    )


@dataclass
class Program(Owners):
    num_layers: int = len(EVERYWHERE)

    def attend(self, view: KvView, layer: int) -> None:
        """Looks at the whole context, then puts new keys and values beside it."""
        keys_RGC, values_RGC = self.cache.tensors(view.place, layer, view.window).parts
        for piece in view.pieces:
            owner, num_cached, num_tokens = piece
            rows = rows_of(self.cache, view, piece, layer)
            assert len(rows) == num_tokens
            expected = torch.tensor([self.stored[owner, p, layer] for p in range(num_cached)])
            old = rows[:num_cached]
            assert keys_RGC[old, 0, 0].equal(expected)
            assert values_RGC[old, 0, -1].equal(-expected)
            for position in range(num_cached, num_tokens):
                number = float(next(self.numbers))
                self.stored[owner, position, layer] = number
                keys_RGC[rows[position]] = number
                values_RGC[rows[position]] = -number

    def store(self, view: KvView, layer: int) -> None:
        store(self.cache, view, layer)

    def run_pass(self, views: Sequence[KvView]) -> None:
        """Brings the next micro-batch while one attends, unless it continues its sequences."""
        for layer in range(self.num_layers):
            brought: set[int] = set()
            for k, view in enumerate(views):
                for ahead in (k, k + 1):
                    if ahead not in brought and ahead < len(views):
                        owners = {piece.owner for piece in views[ahead].pieces}
                        if ahead == k or owners.isdisjoint(p.owner for p in view.pieces):
                            self.bring(views[ahead], layer)
                            brought.add(ahead)
                self.attend(view, layer)
                self.store(view, layer)


Work = tuple[int, int, bool]
"""Owner, new tokens, and whether they are cut into two micro-batches."""
passes = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, MAX_TOKENS), st.booleans()),
            min_size=1,
            max_size=4,
            unique_by=lambda work: work[0],
        ),
        st.lists(st.integers(0, 4), max_size=2),
        st.booleans(),
    ),
    max_size=6,
)


@pytest.mark.parametrize("cached", [SMALL, BLOCKS, UNEVEN], ids=["small", "blocks", "uneven"])
@pytest.mark.parametrize("places", [NO_GPU, ON_GPU, ON_BOTH], ids="+".join)
@examples(25, HealthCheck.function_scoped_fixture)
@given(program=passes)
def test_attention_finds_all_that_was_stored(
    tmp_path: Path,
    places: tuple[Place, ...],
    cached: CacheLayout,
    program: list[tuple[list[Work], list[int], bool]],
) -> None:
    with closing(make_cache(tmp_path, places, cached=cached)) as cache:
        run = Program(cache)
        for works, releases, prompts_first in program:
            run.run_pass(views_of(run, works, places if prompts_first else places[::-1]))
            for owner in releases:
                run.release(owner)
            cache.check_integrity()


def views_of(run: Program, works: list[Work], places: Sequence[Place]) -> list[KvView]:
    """Micro-batches of up to two sequences, at the places in turn; what does not fit is left."""
    batches: list[list[tuple[Hashable, int]]] = []
    free = run.cache.first.num_free
    for owner, num_tokens, is_cut in works:
        num_tokens = min(num_tokens, MAX_TOKENS - run.lengths.get(owner, 0))
        length = run.lengths.get(owner, 0)
        free -= num_lacking(length, length + num_tokens)
        if num_tokens == 0 or free < 0:
            break
        if is_cut and num_tokens > 1:
            batches += [[(owner, num_tokens // 2)], [(owner, num_tokens - num_tokens // 2)]]
        elif batches and len(batches[-1]) < SEATS and batches[-1][0][0] != owner:
            batches[-1].append((owner, num_tokens))
        else:
            batches.append([(owner, num_tokens)])
    return [run.view(places[k % len(places)], k % 2, batch) for k, batch in enumerate(batches)]


@pytest.mark.parametrize("places", [NO_GPU, ON_GPU], ids="+".join)
def test_two_lanes_in_two_windows_do_not_disturb_each_other(
    tmp_path: Path, places: tuple[Place, ...]
) -> None:
    with closing(make_cache(tmp_path, places, cached=BLOCKS)) as cache:

        def work(run: Program, window: int) -> None:
            for _ in range(20):
                view = run.cache.view(
                    places[0],
                    window,
                    [KvPiece(owner, n - 1, n) for owner, n in run.lengths.items()],
                )
                for layer in range(run.num_layers):
                    run.bring(view, layer)
                    run.attend(view, layer)
                    run.store(view, layer)

        runs = [Program(cache) for _ in range(2)]
        for window, run in enumerate(runs):
            run.run_pass([run.view(places[0], window, [(f"{window}a", 30), (f"{window}b", 17)])])
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work, run, window) for window, run in enumerate(runs)]:
                done.result()


ROW, PAGE = SMALL.width * 4, SMALL.width * 4 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("places", "place", "home", "expected"),
    [
        (NO_GPU, "dram", "dram", {}),
        (NO_GPU, "dram", "disk", {Kind.KV_UP: 3 * PAGE, Kind.KV_DOWN: PAGE}),
        (ON_GPU, "vram", "vram", {}),
        (ON_GPU, "vram", "dram", {Kind.KV_UP: 3 * PAGE, Kind.KV_DOWN: ROW}),
        (
            ON_GPU,
            "vram",
            "disk",
            {
                Kind.KV_READ: 3 * PAGE,
                Kind.KV_UP: 3 * PAGE,
                Kind.KV_DOWN: ROW,
                Kind.KV_WRITE: PAGE,
            },
        ),
        (ON_BOTH, "dram", "disk", {Kind.KV_READ: 3 * PAGE, Kind.KV_WRITE: PAGE}),
        (ON_BOTH, "dram", "vram", {Kind.KV_UP: 3 * PAGE, Kind.KV_DOWN: ROW}),
    ],
)
def test_a_decoding_sequence_moves_its_pages_up_and_one_token_down(
    tmp_path: Path,
    places: tuple[Place, ...],
    place: Place,
    home: LevelName,
    expected: dict[Kind, int],
) -> None:
    with closing(make_cache(tmp_path, places, levels=[home])) as cache:
        cache.grow("a", 2 * PAGE_TOKENS + 2)
        view = cache.view(place, 0, [KvPiece("a", 2 * PAGE_TOKENS + 1, 2 * PAGE_TOKENS + 2)])
        assert moved_by(cache, view, 0) == expected.keys()
        assert {kind: cache.num_bytes(kind, view, 0) for kind in expected} == expected


def test_a_new_prompt_brings_nothing_up(tmp_path: Path) -> None:
    with closing(make_cache(tmp_path, ON_GPU)) as cache:
        cache.grow("a", 20)
        view = cache.view("vram", 0, [KvPiece("a", 0, 20)])
        assert moved_by(cache, view, 1) == {Kind.KV_DOWN}
        assert moved_by(cache, view, 2) == {Kind.KV_DOWN, Kind.KV_WRITE}
        cache.move(Kind.KV_UP, view, 1)
        assert cache.num_bytes(Kind.KV_DOWN, view, 1) == 20 * ROW


def test_rows_in_a_window_follow_each_other_wherever_the_pages_are(tmp_path: Path) -> None:
    with closing(make_cache(tmp_path, ON_GPU)) as cache:
        for num_tokens in (16, 32, 48):
            cache.grow("a", num_tokens)
            cache.grow("b", num_tokens)
        view = cache.view("vram", 1, [KvPiece("b", 40, 41), KvPiece("a", 47, 48)])
        assert np.array_equal(view.groups[0].window_rows["b"], np.arange(41))
        assert np.array_equal(view.groups[0].window_rows["a"], np.arange(48, 96))


def test_a_page_that_several_sequences_hold_is_in_a_window_once(tmp_path: Path) -> None:
    """Or it would need more pages than there are."""
    prompt = range(2 * PAGE_TOKENS + 2)
    with closing(make_cache(tmp_path, ON_GPU, shares=True)) as cache:
        for owner in ("a", "b"):
            prefix = cache.first.find(prompt)
            cache.begin(owner, prompt, prefix, tokens=len(prompt))
            cache.first.publish(owner, len(prompt))
        view = cache.view("vram", 0, [KvPiece(owner, 34, 35) for owner in ("a", "b")])
        rows = view.groups[0].window_rows
        assert np.array_equal(rows["a"], np.arange(35))
        assert np.array_equal(rows["b"], [*range(32), *range(48, 51)])
        assert cache.num_bytes(Kind.KV_READ, view, 2) == 4 * PAGE
        assert cache.num_bytes(Kind.KV_WRITE, view, 2) == 2 * PAGE
        assert cache.num_bytes(Kind.KV_DOWN, view, 1) == 2 * ROW


def test_windows_are_only_where_a_layer_lives_elsewhere(tmp_path: Path) -> None:
    def windows(levels: Sequence[LevelName], places: Collection[Place]) -> frozenset[WindowName]:
        return KvLayout(levels=levels, places=places, folder=tmp_path).windows

    assert windows(["dram", "dram"], NO_GPU) == set()
    assert windows(["vram"], ON_GPU) == set()
    assert windows(["vram", "dram"], ON_GPU) == {("vram", "vram")}
    assert windows(["disk"], NO_GPU) == {("dram", "dram")}
    assert windows(["disk"], ON_GPU) == {("vram", "vram"), ("vram", "dram")}
    assert windows(["dram"], ON_BOTH) == {("vram", "vram")}


def test_where_memory_is_refused_the_room_on_disk_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may go on in less memory, and take it anew."""

    def refuse(num_bytes: int, *, pinned: bool) -> Arena:
        raise MemoryError

    files = num_open_files()
    monkeypatch.setattr("moebatch.store.kv.tensors.Arena", refuse)
    with pytest.raises(MemoryError):
        make_cache(tmp_path, NO_GPU)
    assert num_open_files() == files


def test_a_micro_batch_larger_than_a_window_is_our_mistake(tmp_path: Path) -> None:
    with closing(make_cache(tmp_path, ON_GPU)) as cache:
        cache.grow("a", (WINDOW_PAGES + 1) * PAGE_TOKENS)
        with pytest.raises(AssertionError, match="more pages than a window"):
            cache.view("vram", 0, [KvPiece("a", 0, (WINDOW_PAGES + 1) * PAGE_TOKENS)])


def test_a_task_that_a_layer_never_has_is_our_mistake(tmp_path: Path) -> None:
    with closing(make_cache(tmp_path, NO_GPU)) as cache:
        cache.grow("a", 1)
        view = cache.view("dram", 0, [KvPiece("a", 0, 1)])
        with pytest.raises(AssertionError, match="layer 1 needs no kv up to attend at dram"):
            cache.move(Kind.KV_UP, view, 1)


@pytest.mark.parametrize("cached", [CODED, CODED_BLOCKS])
def test_codes_and_scales_are_what_is_held_and_moved(tmp_path: Path, cached: CacheLayout) -> None:
    with closing(make_cache(tmp_path, ON_GPU, cached=cached)) as cache:
        cache.grow("a", 20)
        view = cache.view("vram", 0, [KvPiece("a", 17, 20)])
        token_bytes = 2 * (cached.parts[0].head_dim + SCALE_BYTES)
        num_layers = len(EVERYWHERE)
        assert cache.bytes_beyond(NUM_PAGES - 1) == num_layers * PAGE_TOKENS * token_bytes
        assert cache.num_bytes(Kind.KV_UP, view, 1) == 2 * PAGE_TOKENS * token_bytes
        assert cache.num_bytes(Kind.KV_DOWN, view, 1) == 3 * token_bytes
        assert cache.num_bytes(Kind.KV_READ, view, 2) == 2 * PAGE_TOKENS * token_bytes
        written = {}
        for layer in range(num_layers):
            window = cache.tensors("vram", layer, 0)
            rows = rows_of(cache, view, view.pieces[0], layer)
            for part in window.parts:
                assert part.dtype == torch.uint8
                part.random_(256)
            written[layer] = [part[rows].clone() for part in window.parts]
            # All of it is new once, so that all of it goes home.
            new = cache.view("vram", 0, [KvPiece("a", 0, 20)])
            store(cache, new, layer)
        later = cache.view("vram", 1, [KvPiece("a", 20, 21)])
        for layer in range(num_layers):
            bring(cache, later, layer)
            rows = rows_of(cache, later, later.pieces[0], layer)[:20]
            found = [part[rows] for part in cache.tensors("vram", layer, 1).parts]
            assert all(map(torch.equal, found, written[layer])), layer
