"""Layers that keep a state of each sequence, or beside a window entries that stand for several
tokens before it: wherever that lives, and however prompts are cut, tokens are those of a model that
computes all of a sequence each time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.plan.runnable import not_runnable
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model.cache_layout import UNLIMITED
from moebatch.spec.policy.policy import Placement, pages_of
from tests.engine.passes import SLICE, begun, fail_in_the_middle
from tests.engine.test_engine import NEW_TOKENS, policy, requests, tokens_of
from tests.engine.test_memory import MAX_TOKENS, assert_cache_is_as_priced, problem_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, built_for, emulated, run
from tests.model.oracle import greedy_answers, load

pytestmark = pytest.mark.usefixtures("small_slices")
RECURRENT = (0, 2, 3)


def recurrent_model(family: str, recurs: str) -> dict[str, Any]:
    kinds = [recurs if layer in RECURRENT else "full_attention" for layer in range(4)]
    return {"family": family, "num_hidden_layers": len(kinds), "layer_types": kinds}


MODEL = recurrent_model("qwen3_next", "linear_attention")
MODELS = (
    MODEL,
    recurrent_model("lfm2_moe", "conv"),
    recurrent_model("granitemoehybrid", "linear_attention"),
    {
        "family": "nemotron_h",
        "moe_latent_size": 18,
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention", "moe"),
            *("linear_attention", "linear_attention", "mlp"),
        ],
    },
    {
        "family": "jamba",
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
    },
    recurrent_model("kimi_linear", "linear_attention"),
    recurrent_model("bailing_hybrid", "linear_attention"),
    recurrent_model("minimax", "linear_attention"),
    {"family": "deepseek_v4"},
)
STATES = {
    "qwen3_next": 4 * 8 * 12 + 3 * (2 * 2 * 8 + 4 * 12),
    "lfm2_moe": 2 * 32,
    "granitemoehybrid": 4 * 12 * 16 + 3 * (2 * 2 * 12 + 4 * 16),
    "jamba": 12 * 64 + 3 * 64,
    "nemotron_h": 6 * 12 * 5 + 3 * (2 * 2 * 12 + 6 * 5),
    "kimi_linear": 3 * 12 * 12 + 3 * 3 * 3 * 12,
    "bailing_hybrid": 3 * 12 * 12 + 3 * 3 * 3 * 12,
    "minimax": 4 * 10 * 10,
}
"""Numbers of a sequence in a layer."""
TOKENS = {
    "qwen3_next": 2 * 2 * 16,
    "nemotron_h": 2 * 2 * 10,
    "kimi_linear": 20 + 8,
    "bailing_hybrid": 20 + 8,
    "minimax": 2 * 2 * 10,
}
"""Numbers of a token in the layer that attends, where they are not those of most."""
ROWS = requests((1, 17, 40, 3, 96, 33, 2))
KEPT = {"deepseek_v4": [(9 + SLICE - 1, 5), (1, 2), (1, 2)]}
"""Rows of a sequence and how many layers keep them, where that is not all of it in one layer and a
state in three."""
WHERE = {
    "streamed": IN_MEMORY["usual"],
    "resident": IN_MEMORY["everything resident"],
    "on disk": replace(policy(num_slots=9), kv_cache=Placement(disk=1.0)),
    "small slices": policy(tokens_per_pass=9, batch_size=3, num_slots=9),
    "all at once": policy(
        num_slots=40, resident=0, batch_size=10, tokens_per_pass=1000, micro_batch_size=100
    ),
    "sent back": policy(num_kv_pages=pages_of(96 + NEW_TOKENS), num_slots=9),
    **{
        name: EMULATED[name]
        for name in ("GPU attention, cache in main memory", "three levels", "everything on the GPU")
    },
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model["family"])
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(**request.param)


@pytest.fixture(scope="module")
def expected_tokens(folder: Path) -> list[tuple[int, ...]]:
    model = load(folder)
    return greedy_answers(model, ROWS, NEW_TOKENS)


def family_of(folder: Path) -> str:
    return open_model(folder, "float32").config["model_type"]


@pytest.mark.few(name=("klotski", "cgopipe"))
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_says_what_the_whole_sequence_says(
    folder: Path,
    expected_tokens: list[tuple[int, ...]],
    tmp_path: Path,
    name: str,
    title: str,
) -> None:
    outcomes, built = run(folder, replace(WHERE[title], schedule=name), ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens
    kept = [(group.most_rows, len(group.layers)) for group in built.cache.groups]
    assert kept == KEPT.get(family_of(folder), [(UNLIMITED, 1), (1, len(RECURRENT))])


@pytest.mark.few(title=tuple(WHERE))
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("has_begun", [False, True])
def test_states_may_lie_beside_what_windows_see(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, title: str, has_begun: bool
) -> None:
    """And beside what layers keep that see everything."""
    folder = tiny_checkpoint("lara_mini")
    model, rows = load(folder), ROWS
    expected = greedy_answers(model, rows, NEW_TOKENS)
    if has_begun:
        rows = begun(rows, expected)
    outcomes, built = run(folder, WHERE[title], rows, scratch=tmp_path)
    assert [group.is_state for group in built.cache.groups] == [False, False, True]
    assert tokens_of(outcomes) == expected


def test_what_an_earlier_run_has_left_is_gone_on_with(
    folder: Path, expected_tokens: list[tuple[int, ...]]
) -> None:
    outcomes, _ = run(folder, policy(), begun(ROWS, expected_tokens))
    assert tokens_of(outcomes) == expected_tokens


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_a_pass_that_failed_in_the_middle_is_computed_again(
    folder: Path,
    expected_tokens: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    """States know tokens by then that they must not count twice, in some layers, and what entries
    are made of has been written over."""
    fail_in_the_middle(monkeypatch, layer, num_before=20)
    outcomes, built = run(folder, policy(tokens_per_pass=80), ROWS)
    assert tokens_of(outcomes) == expected_tokens
    assert built.engine.statistics.num_shrunk == 1


def test_beginnings_are_not_shared(folder: Path, expected_tokens: list[tuple[int, ...]]) -> None:
    """What is known of a beginning has been added to since."""
    twice = [ROWS[4], replace(ROWS[4], index=1, custom_id="again")]
    outcomes, built = run(folder, policy(batch_size=2), twice)
    assert tokens_of(outcomes) == 2 * expected_tokens[4:5]
    assert built.engine.statistics.shared_tokens == 0


@pytest.mark.parametrize("title", ["streamed", "on disk", "three levels"])
def test_the_cache_takes_what_was_priced_and_what_the_configuration_says(
    folder: Path, tmp_path: Path, title: str
) -> None:
    chosen = WHERE[title]
    built = built_for(folder, chosen, max_tokens=MAX_TOKENS, scratch=tmp_path)
    built.close()
    assert_cache_is_as_priced(built, folder, chosen)
    for states in built.cache.groups[1:]:
        assert states.num_pages(chosen) == chosen.batch_size
    family = family_of(folder)
    if title == "streamed" and family in STATES:
        token, state = TOKENS.get(family, 2 * 2 * 8) * 4, STATES[family] * 4
        expected = chosen.num_kv_pages * 16 * token + len(RECURRENT) * chosen.batch_size * state
        assert built.cache.bytes_on("dram") == expected


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ({}, None),
        (MODEL, "recurrent layers"),
        ({"family": "deepseek_v4"}, "layers that keep entries of several tokens"),
        ({"family": "deepseek_v32"}, "layers whose tokens choose what they attend to"),
    ],
)
def test_layers_that_attend_to_more_than_tokens_are_not_left_to_the_cpu(
    tiny_checkpoint: Callable[..., Path], model: dict[str, Any], layers: str | None
) -> None:
    hardware = emulated().hardware
    assert hardware is not None
    problem = problem_of(open_model(tiny_checkpoint(**model), "float32"), hardware)
    message = f"{layers} are computed on the GPU; set it to true"
    faults = [("attention_on_gpu", message)] if layers else []
    assert list(not_runnable(problem, EMULATED["CPU attention"])) == faults
