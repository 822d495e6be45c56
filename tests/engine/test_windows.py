"""Layers with sliding windows keep what their tokens see, the others all of a sequence: every
schedule says what transformers says, wherever the cache lies, and however prompts are cut."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.spec import EngineSpec
from moebatch.model.native import loader
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model.cache_layout import KvCache
from moebatch.spec.policy.policy import Placement, pages_of
from tests.engine.passes import SLICE, begun, fail_in_the_middle
from tests.engine.test_engine import NEW_TOKENS, engine, policy, requests, tokens_of
from tests.engine.test_memory import assert_cache_is_as_priced, build
from tests.engine.test_schedules import EMULATED, IN_MEMORY, emulated, run
from tests.engine.test_tail import answers, watched
from tests.model.oracle import greedy, greedy_answers, load, rounding_cache
from tests.model.test_cached_numbers import round_trip

ROWS = requests((1, 17, 40, 3, 96, 33))
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "all": ("mixtral", {"sliding_window": 16}),
    "alternating": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "num_hidden_layers": 5,
            "layer_types": [("full" if n % 2 else "sliding") + "_attention" for n in range(5)],
        },
    ),
    "two kinds of heads": ("gemma4_text", {}),
    "chunks": ("llama4_text", {}),
    "latents": ("dots3_note_text", {"index_topk": 5000}),  # of more would be chosen
}
ROUNDED = [model for model in MODELS if model != "latents"]
"""Those that transformers' cache rounds as ours does: it has what rotates apart from latents."""
RINGS = {
    "all": 16 + SLICE - 1,
    "alternating": 9 + SLICE - 1,
    "two kinds of heads": 9 + SLICE - 1,
    "chunks": 16 + SLICE - 1,
    "latents": 9 + SLICE - 1,
}
GROUPS = {
    "all": [3],
    "alternating": [2, 3],
    "two kinds of heads": [1, 2],
    "chunks": [1, 3],
    "latents": [2, 2],
}
"""Layers that keep everything, and those that do not."""
WHERE = {
    "streamed": IN_MEMORY["usual"],
    "resident": IN_MEMORY["everything resident"],
    "on disk": replace(policy(num_slots=9), kv_cache=Placement(disk=1.0)),
    "one by one": policy(batch_size=1, micro_batch_size=1, num_slots=9),
    "small slices": policy(tokens_per_pass=9, batch_size=3, num_slots=9),
    "all at once": policy(
        num_slots=40, resident=0, batch_size=10, tokens_per_pass=1000, micro_batch_size=100
    ),
    "sent back": policy(num_kv_pages=pages_of(96 + NEW_TOKENS), num_slots=9),
    **{name: EMULATED[name] for name in ("CPU attention", "three levels", "everything on the GPU")},
    "three levels, CPU attention": replace(
        EMULATED["three levels, CPU attention, batches of one"], micro_batch_size=3
    ),
}

Expected = Callable[[str, KvCache], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def expected_tokens(tiny_checkpoint: Callable[..., Path]) -> Expected:
    """What transformers says to the rows."""
    found: dict[tuple[str, KvCache], list[tuple[int, ...]]] = {}

    def expected(name: str, cached_in: KvCache) -> list[tuple[int, ...]]:
        if (name, cached_in) not in found:
            model = load(checkpoint(tiny_checkpoint, name))
            found[name, cached_in] = [
                tuple(greedy(model, row.prompt_tokens, NEW_TOKENS, cache=cache_of(cached_in))[0])
                for row in ROWS
            ]
        return found[name, cached_in]

    return expected


def checkpoint(tiny_checkpoint: Callable[..., Path], name: str) -> Path:
    family, options = MODELS[name]
    return tiny_checkpoint(family, **options)


def cache_of(cached_in: KvCache) -> Any:
    if cached_in == "full":
        return None
    return rounding_cache(partial(round_trip, dtype=cached_in))


@pytest.mark.few(name=("klotski", "cgopipe"))
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_transformers(
    tiny_checkpoint: Callable[..., Path],
    expected_tokens: Expected,
    tmp_path: Path,
    name: str,
    model: str,
    title: str,
) -> None:
    chosen = replace(WHERE[title], schedule=name)
    folder = checkpoint(tiny_checkpoint, model)
    outcomes, built = run(folder, chosen, ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens(model, "full")
    assert built.cache.groups[-1].most_rows == RINGS[model]
    assert [len(group.layers) for group in built.cache.groups] == GROUPS[model]


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("title", ["streamed", "on disk", "three levels", "everything on the GPU"])
def test_what_is_written_over_lies_beside_what_is_chosen(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, title: str
) -> None:
    folder = tiny_checkpoint("dots3_note_text")
    outcomes, built = run(folder, WHERE[title], ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == greedy_answers(load(folder), ROWS, NEW_TOKENS)
    assert [len(group.layers) for group in built.cache.groups] == [2, 2, 2]
    assert built.cache.groups[-1].most_rows == 9 + SLICE - 1


@pytest.mark.few()
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("title", ["streamed", "three levels", "three levels, CPU attention"])
@pytest.mark.parametrize("model", ROUNDED)
def test_codes_of_eight_bits_say_what_rounded_numbers_say(
    tiny_checkpoint: Callable[..., Path],
    expected_tokens: Expected,
    tmp_path: Path,
    model: str,
    title: str,
) -> None:
    folder = checkpoint(tiny_checkpoint, model)
    outcomes, _ = run(folder, WHERE[title], ROWS, cached_in="int8", scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens(model, "int8")


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
    folder = checkpoint(tiny_checkpoint, "alternating")
    outcomes, _ = run(folder, WHERE[title], ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens("alternating", "full")


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("model", MODELS)
def test_what_an_earlier_run_has_left_is_gone_on_with(
    tiny_checkpoint: Callable[..., Path], expected_tokens: Expected, model: str
) -> None:
    expected = expected_tokens(model, "full")
    folder = checkpoint(tiny_checkpoint, model)
    assert tokens_of(run(folder, WHERE["streamed"], begun(ROWS, expected))[0]) == expected


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_pass_that_failed_in_the_middle_is_computed_again(
    tiny_checkpoint: Callable[..., Path],
    expected_tokens: Expected,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    """Slices of its second pass have then written over what the first of them sees."""
    fail_in_the_middle(monkeypatch, layer, num_before=8)
    folder, long_one = checkpoint(tiny_checkpoint, "alternating"), ROWS[4]
    with engine(folder, policy(tokens_per_pass=40)) as built:
        (outcome,) = built.engine.run([long_one])
        assert built.engine.statistics.num_shrunk == 1
        built.check_integrity()
    assert tokens_of([outcome]) == expected_tokens("alternating", "full")[4:5]


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("model", MODELS)
def test_rings_give_their_memory_to_experts_as_well(
    tiny_checkpoint: Callable[..., Path],
    expected_tokens: Expected,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    chosen, folder = policy(num_kv_pages=300, batch_size=20), checkpoint(tiny_checkpoint, model)
    with watched(folder, chosen, monkeypatch) as found:
        before = found.built.cache.bytes_beyond(0)
        assert answers(found.built, ROWS) == expected_tokens(model, "full")
        assert found.built.engine.statistics.num_grown > 0
        assert found.built.cache.bytes_beyond(found.built.cache.first.num_pages) == 0
        assert found.built.cache.bytes_beyond(0) < before / 2


def test_long_prompts_in_slices_of_the_usual_size(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("mixtral", sliding_window=60, max_position_embeddings=2048)
    rows = requests((1300, 700))
    model = load(folder)
    expected = greedy_answers(model, rows, NEW_TOKENS)
    for tokens in (3000, 777):
        chosen = policy(tokens_per_pass=tokens, num_kv_pages=100, num_slots=9)
        outcomes, built = run(folder, chosen, rows, max_tokens=2000)
        assert tokens_of(outcomes) == expected, tokens
        assert built.cache.groups[0].most_rows == 60 + 511


def test_all_is_kept_where_no_sequence_is_longer_than_a_ring(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """And beginnings are shared there; with rings they are not."""
    folder = checkpoint(tiny_checkpoint, "all")
    files = open_model(folder, "float32")
    for max_tokens, shares in ((16 + 511, True), (16 + 512, False)):
        spec = EngineSpec(files=files, policy=policy(), max_tokens=max_tokens)
        assert spec.shares_prefixes is spec.cache_groups[0].is_whole is shares


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("title", ["three levels", "CPU attention", "three levels, CPU attention"])
@pytest.mark.parametrize("model", MODELS)
def test_the_cache_takes_what_was_priced(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, model: str, title: str
) -> None:
    folder = checkpoint(tiny_checkpoint, model)
    built = build(open_model(folder, "float32"), WHERE[title], emulated(), tmp_path)
    built.close()
    assert_cache_is_as_priced(built, folder, WHERE[title])
