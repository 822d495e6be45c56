"""Tokens that choose what they attend to: wherever the cache lies, and however prompts are cut,
answers are those of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.build import build_engine
from moebatch.engine.spec import EngineSpec
from moebatch.errors import ConfigError
from moebatch.plan.runnable import not_runnable
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model.cache_layout import CacheDtype, SinkWindow
from moebatch.spec.policy.policy import Policy
from moebatch.spec.request import Begun, Request
from moebatch.spec.sampling import Sampling
from tests.engine.test_engine import NEW_TOKENS, TokenText, policy, requests, tokens_of
from tests.engine.test_memory import MAX_TOKENS, problem_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, emulated, run
from tests.model.oracle import greedy, load

SHARED = ["full", "shared", "full"]
ROWS = requests((1, 17, 40, 3, 96, 33, 29, 30, 31))
"""Some of which are longer than the 30 tokens that are chosen."""
WHERE = IN_MEMORY | {title: each for title, each in EMULATED.items() if each.attention_on_gpu}


@pytest.fixture(scope="module", params=["all choose", "some share"])
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    if request.param == "all choose":
        return tiny_checkpoint("deepseek_v32")
    return tiny_checkpoint("glm_moe_dsa", indexer_types=SHARED)


@pytest.fixture(scope="module")
def expected_tokens(folder: Path) -> list[tuple[int, ...]]:
    model = load(folder)
    return [tuple(greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in ROWS]


def placed(chosen: Policy, scratch: Path) -> dict[str, object]:
    return {"device": emulated(), "scratch": scratch} if chosen.ffn_on_gpu else {}


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
    outcomes, _ = run(folder, chosen, ROWS, **placed(chosen, tmp_path))
    assert tokens_of(outcomes) == expected_tokens


def test_what_an_earlier_run_has_left_is_gone_on_with(
    folder: Path, expected_tokens: list[tuple[int, ...]]
) -> None:
    begun = [
        replace(row, begun=(Begun(tokens=tokens[: 1 + row.index % 4], logprobs=()),))
        for row, tokens in zip(ROWS, expected_tokens, strict=True)
    ]
    outcomes, _ = run(folder, policy(), begun)
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
    model = load(folder)
    expected = [tuple(greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in rows]
    outcomes, built = run(folder, policy(batch_size=2), rows)
    assert tokens_of(outcomes) == expected
    assert built.engine.statistics.shared_tokens > 0


@pytest.mark.parametrize("cached_in", ["int8", "fp8"])
def test_choices_of_rounded_keys_are_the_same_everywhere(
    folder: Path, tmp_path: Path, cached_in: CacheDtype
) -> None:
    answers = [
        tokens_of(run(folder, each, ROWS, cached_in=cached_in, **placed(each, tmp_path))[0])
        for each in (policy(), policy(tokens_per_pass=9, batch_size=3), EMULATED["three levels"])
    ]
    assert answers[1:] == 2 * answers[:1]


def test_the_cache_holds_keys_to_choose_by(folder: Path) -> None:
    """Beside a latent of 20 numbers and a rotated key of 8, one of 12."""
    files = open_model(folder, "float32")
    (group,) = files.shape.cache_groups(MAX_TOKENS)
    assert group.layout.token_bytes(4) == 4 * (20 + 8 + 12)
    short = files.shape.attending_within(30)
    (group,) = short.cache_groups(MAX_TOKENS)
    assert group.layout.token_bytes(4) == 4 * (20 + 8)
    assert files.shape.attending_within(31) is files.shape
    unread = {role for role in files.shape.layer_tensors(0) if role.startswith("index")}
    assert len(unread) == 5 and short.layer_tensors(0).keys().isdisjoint(unread)


def test_short_rows_are_answered_without_choosing(
    folder: Path, expected_tokens: list[tuple[int, ...]]
) -> None:
    files = open_model(folder, "float32")
    files = replace(files, shape=files.shape.attending_within(30))
    short = [replace(row, prompt_tokens=row.prompt_tokens[: 30 - NEW_TOKENS]) for row in ROWS]
    model = load(folder)
    expected = [tuple(greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in short]
    spec = EngineSpec(files=files, policy=policy(), max_tokens=30)
    built = build_engine(spec, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    try:
        with torch.inference_mode():
            found = sorted(built.engine.run(short), key=lambda outcome: outcome.request.index)
    finally:
        built.close()
    assert tokens_of(found) == expected


def test_what_sees_no_more_than_is_chosen_needs_no_choice(folder: Path) -> None:
    shape = open_model(folder, "float32").shape
    assert shape.seen_through(SinkWindow(4, 26)).attention.most_chosen is None
    with pytest.raises(ConfigError, match="choose 30 of those that they see, fewer than 4 sinks"):
        shape.seen_through(SinkWindow(4, 27))


def test_choosing_is_not_left_to_the_cpu(folder: Path) -> None:
    hardware = emulated().hardware
    assert hardware is not None
    problem = problem_of(open_model(folder, "float32"), hardware)
    (fault,) = not_runnable(problem, EMULATED["CPU attention"])
    assert fault == (
        "attention_on_gpu",
        "layers whose tokens choose what they attend to are computed on the GPU; set it to true",
    )
