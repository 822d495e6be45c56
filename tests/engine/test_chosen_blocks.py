"""Tokens that choose blocks of others for each head of keys: wherever the cache lies, and however
prompts are cut, answers are those of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import ConfigError
from moebatch.model.native import loader
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model.cache_layout import CacheDtype, SinkWindow
from tests.engine.passes import begun
from tests.engine.test_choosing import ROWS, WHERE
from tests.engine.test_engine import NEW_TOKENS, policy, tokens_of
from tests.engine.test_memory import MAX_TOKENS, assert_cache_is_as_priced
from tests.engine.test_schedules import EMULATED, built_for, run
from tests.model.oracle import greedy_answers, load

NUM_LAYERS, NUM_CHOOSING = 4, 3
MOST = 12
"""Tokens of the three blocks that are chosen."""


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("minimax_m3_vl")


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


def test_without_compiled_kernels_torch_attends(
    folder: Path, expected_tokens: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    outcomes, _ = run(folder, policy(tokens_per_pass=9, batch_size=3), ROWS)
    assert tokens_of(outcomes) == expected_tokens


def test_what_an_earlier_run_has_left_is_gone_on_with(
    folder: Path, expected_tokens: list[tuple[int, ...]]
) -> None:
    outcomes, _ = run(folder, policy(), begun(ROWS, expected_tokens))
    assert tokens_of(outcomes) == expected_tokens


def test_rows_share_beginnings_that_some_of_them_choose_from(folder: Path) -> None:
    header = (9,) * 20 + (7, 8) * 12
    ends = ((11, 12, 13), (14,), (3,) * 40, (11, 12, 5))
    rows = [replace(row, prompt_tokens=header + end) for row, end in zip(ROWS, ends, strict=False)]
    outcomes, built = run(folder, policy(batch_size=2), rows)
    assert tokens_of(outcomes) == greedy_answers(load(folder), rows, NEW_TOKENS)
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


@pytest.mark.parametrize("title", ["usual", "three levels", "cache on the GPU, one slot"])
def test_the_cache_takes_what_was_priced_and_what_the_configuration_says(
    folder: Path, tmp_path: Path, title: str
) -> None:
    """Two heads of keys and values of 10 numbers, and keys to choose by of 12."""
    chosen = WHERE[title]
    built = built_for(folder, chosen, max_tokens=MAX_TOKENS, scratch=tmp_path)
    built.close()
    assert_cache_is_as_priced(built, folder, chosen)
    if title == "usual":
        numbers = NUM_LAYERS * 2 * 2 * 10 + NUM_CHOOSING * 12
        assert built.cache.bytes_on("dram") == chosen.num_kv_pages * 16 * 4 * numbers


def test_short_rows_are_answered_without_choosing(folder: Path) -> None:
    short = [replace(row, prompt_tokens=row.prompt_tokens[: MOST - NEW_TOKENS]) for row in ROWS]
    outcomes, built = run(folder, policy(), short, max_tokens=MOST)
    assert tokens_of(outcomes) == greedy_answers(load(folder), short, NEW_TOKENS)
    assert len(built.cache.groups) == 1


def test_what_sees_no_more_than_is_chosen_needs_no_choice(folder: Path) -> None:
    shape = open_model(folder, "float32").shape
    assert shape.seen_through(SinkWindow(4, MOST - 4)).attention.most_chosen is None
    with pytest.raises(ConfigError, match="choose 12 of those that they see, fewer than 4 sinks"):
        shape.seen_through(SinkWindow(4, MOST - 3))
