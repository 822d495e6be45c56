"""Tokens that choose blocks of others for each head of keys: wherever the cache lies, and however
prompts are cut, answers are those of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import ConfigError
from moebatch.model.native import loader
from moebatch.spec.model.cache_layout import SinkWindow
from tests.engine.test_choosing import ROWS, WHERE
from tests.engine.test_engine import NEW_TOKENS, policy, tokens_of
from tests.engine.test_memory import MAX_TOKENS, assert_cache_is_as_priced
from tests.engine.test_schedules import built_for, run
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


def test_without_compiled_kernels_torch_attends(
    folder: Path, expected_tokens: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    outcomes, _ = run(folder, policy(tokens_per_pass=9, batch_size=3), ROWS)
    assert tokens_of(outcomes) == expected_tokens


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
