"""Tokens that choose what they attend to: wherever the cache lies, and however prompts are cut,
answers are those of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import ConfigError
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model.cache_layout import CacheDtype, SinkWindow
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from tests.engine.passes import begun
from tests.engine.test_engine import NEW_TOKENS, policy, requests, tokens_of
from tests.engine.test_memory import MAX_TOKENS, assert_cache_is_as_priced
from tests.engine.test_schedules import EMULATED, IN_MEMORY, built_for, run
from tests.model.oracle import greedy_answers, load

SHARED = ["full", "shared", "full"]
NUM_LAYERS = len(SHARED)
ROWS = requests((1, 17, 40, 3, 96, 33, 29, 30, 31))
"""Some of which are longer than the 30 tokens that are chosen, or these and 5 behind pools of 6."""
WHERE = IN_MEMORY | {title: each for title, each in EMULATED.items() if each.attention_on_gpu}


@pytest.fixture(scope="module", params=["all choose", "some share", "in pools", "in blocks"])
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    if request.param == "all choose":
        return tiny_checkpoint("deepseek_v32")
    if request.param == "in blocks":  # of which three are chosen, for each head of keys
        return tiny_checkpoint("minimax_m3_vl")
    if request.param == "in pools":
        return tiny_checkpoint("glm5_next", layer_types=["full_attention"] * NUM_LAYERS)
    return tiny_checkpoint("glm_moe_dsa", indexer_types=SHARED)


@pytest.fixture(scope="module")
def expected_tokens(folder: Path) -> list[tuple[int, ...]]:
    return greedy_answers(load(folder), ROWS, NEW_TOKENS)


@pytest.mark.few(name=("klotski", "cgopipe"))
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_says_what_transformers_says(
    folder: Path,
    expected_tokens: list[tuple[int, ...]],
    tmp_path: Path,
    name: str,
    title: str,
) -> None:
    chosen = replace(WHERE[title], schedule=name)
    outcomes, _ = run(folder, chosen, ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens


def test_what_an_earlier_run_has_left_is_gone_on_with(
    folder: Path, expected_tokens: list[tuple[int, ...]]
) -> None:
    outcomes, _ = run(folder, policy(), begun(ROWS, expected_tokens))
    assert tokens_of(outcomes) == expected_tokens


def test_rows_share_beginnings_that_some_of_them_choose_from(folder: Path) -> None:
    header = [9] * 20 + [7, 8] * 12
    rows = [
        Request(
            index=index,
            custom_id=f"row-{index}",
            prompt_tokens=tuple(header + end),
            sampling=Sampling(temperature=0.0, max_tokens=NEW_TOKENS),
        )
        for index, end in enumerate(([11, 12, 13], [14], [3] * 40, [11, 12, 5]))
    ]
    expected = greedy_answers(load(folder), rows, NEW_TOKENS)
    outcomes, built = run(folder, policy(batch_size=2), rows)
    assert tokens_of(outcomes) == expected
    assert built.engine.statistics.shared_tokens > 0


@pytest.mark.parametrize("cached_in", ["int8", "fp8"])
def test_choices_of_rounded_keys_are_the_same_everywhere(
    folder: Path, tmp_path: Path, cached_in: CacheDtype
) -> None:
    answers = [
        tokens_of(run(folder, each, ROWS, cached_in=cached_in, scratch=tmp_path)[0])
        for each in (policy(), policy(tokens_per_pass=9, batch_size=3), EMULATED["three levels"])
    ]
    assert answers[1:] == 2 * answers[:1]


ONE_BY_ONE = pytest.mark.parametrize("folder", ["all choose", "some share"], indirect=True)


def num_choosing(folder: Path) -> int:
    """Layers with an indexer of their own, as the configuration says."""
    types = open_model(folder, "float32").config.get("indexer_types") or ["full"] * NUM_LAYERS
    return types.count("full")


@ONE_BY_ONE
def test_layers_that_choose_cache_keys_to_choose_by(folder: Path) -> None:
    """Beside a latent of 20 numbers and a rotated key of 8, which all have, one of 12."""
    files = open_model(folder, "float32")
    latents, keys = files.shape.cache_groups(MAX_TOKENS)
    assert (len(latents.layers), len(keys.layers)) == (NUM_LAYERS, num_choosing(folder))
    assert latents.layout.token_bytes(4) == 4 * (20 + 8)
    assert keys.layout.token_bytes(4) == 4 * 12
    short = files.shape.attending_within(30)
    (latents,) = short.cache_groups(MAX_TOKENS)
    assert latents.layout.token_bytes(4) == 4 * (20 + 8)
    assert files.shape.attending_within(31) is files.shape
    unread = {role for role in files.shape.layer_tensors(0) if role.startswith("index")}
    assert len(unread) == 5 and short.layer_tensors(0).keys().isdisjoint(unread)
    for layer in keys.layers:
        assert unread <= files.shape.layer_tensors(layer).keys()


@ONE_BY_ONE
@pytest.mark.parametrize("title", ["usual", "three levels", "cache on the GPU, one slot"])
def test_the_cache_takes_what_was_priced_and_what_the_configuration_says(
    folder: Path, tmp_path: Path, title: str
) -> None:
    chosen = WHERE[title]
    built = built_for(folder, chosen, max_tokens=MAX_TOKENS, scratch=tmp_path)
    built.close()
    assert_cache_is_as_priced(built, folder, chosen)
    if title == "usual":
        numbers = NUM_LAYERS * (20 + 8) + num_choosing(folder) * 12
        assert built.cache.bytes_on("dram") == chosen.num_kv_pages * 16 * 4 * numbers


@pytest.mark.parametrize("folder", ["all choose", "some share", "in pools"], indirect=True)
def test_short_rows_are_answered_without_choosing(folder: Path) -> None:
    short = [replace(row, prompt_tokens=row.prompt_tokens[: 30 - NEW_TOKENS]) for row in ROWS]
    outcomes, built = run(folder, policy(), short, max_tokens=30)
    assert tokens_of(outcomes) == greedy_answers(load(folder), short, NEW_TOKENS)
    assert len(built.cache.groups) == 1


@ONE_BY_ONE
def test_what_sees_no_more_than_is_chosen_needs_no_choice(folder: Path) -> None:
    shape = open_model(folder, "float32").shape
    assert shape.seen_through(SinkWindow(4, 26)).attention.most_chosen is None
    with pytest.raises(ConfigError, match="choose 30 of those that they see, fewer than 4 sinks"):
        shape.seen_through(SinkWindow(4, 27))
