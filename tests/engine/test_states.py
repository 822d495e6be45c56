"""Layers that keep a state of each sequence: wherever it lives, and however prompts are cut, tokens
are those of a model that computes all of a sequence each time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.passes import layout
from moebatch.engine.spec import EngineSpec
from moebatch.layout.buffers import KV_TERM, KV_WINDOW_TERM
from moebatch.model.decoder import Decoder
from moebatch.plan.runnable import not_runnable
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model import cache_layout
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.request import Begun, Outcome, Request
from tests.engine.test_engine import NEW_TOKENS, TokenText, policy, requests, tokens_of
from tests.engine.test_memory import problem_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, emulated
from tests.model.oracle import greedy, load

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
    recurrent_model("kimi_linear", "linear_attention"),
    recurrent_model("bailing_hybrid", "linear_attention"),
    recurrent_model("minimax", "linear_attention"),
)
STATES = {
    "qwen3_next": 4 * 8 * 12 + 3 * (2 * 2 * 8 + 4 * 12),
    "lfm2_moe": 2 * 32,
    "granitemoehybrid": 4 * 12 * 16 + 3 * (2 * 2 * 12 + 4 * 16),
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
SLICE = 8
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
    return [tuple(greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in ROWS]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_layout, "LARGEST_SLICE", SLICE)
    monkeypatch.setattr(layout, "PROMPT_ROWS", SLICE)


def built_for(
    folder: Path, chosen: Policy, scratch: Path | None = None, **options: Any
) -> BuiltEngine:
    files = open_model(folder, "float32")
    device: dict[str, Device] = {"device": emulated()} if chosen.ffn_on_gpu else {}
    spec = EngineSpec(
        files=files,
        policy=chosen,
        max_tokens=112,
        scratch=scratch,
        **device,
        **options,
    )
    return build_engine(spec, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)


def answered(built: BuiltEngine, rows: Sequence[Request] = ROWS) -> list[Outcome]:
    try:
        with torch.inference_mode():
            outcomes = list(built.engine.run(rows))
        built.check_integrity()
    finally:
        built.close()
    return sorted(outcomes, key=lambda outcome: outcome.request.index)


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
    built = built_for(folder, replace(WHERE[title], schedule=name), tmp_path)
    assert [group.is_state for group in built.cache.groups] == [False, True]
    assert tokens_of(answered(built)) == expected_tokens


@pytest.mark.few(title=tuple(WHERE))
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("has_begun", [False, True])
def test_states_may_lie_beside_what_windows_see(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, title: str, has_begun: bool
) -> None:
    """And beside what layers keep that see everything."""
    folder = tiny_checkpoint("lara_mini")
    model, rows = load(folder), ROWS
    expected = [tuple(greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in rows]
    if has_begun:
        rows = [
            replace(row, begun=(Begun(tokens=tokens[: 1 + row.index % 4], logprobs=()),))
            for row, tokens in zip(rows, expected, strict=True)
        ]
    built = built_for(folder, WHERE[title], tmp_path)
    assert [group.is_state for group in built.cache.groups] == [False, False, True]
    assert tokens_of(answered(built, rows)) == expected


def test_what_an_earlier_run_has_left_is_gone_on_with(
    folder: Path, expected_tokens: list[tuple[int, ...]]
) -> None:
    begun = [
        replace(row, begun=(Begun(tokens=tokens[: 1 + row.index % 4], logprobs=()),))
        for row, tokens in zip(ROWS, expected_tokens, strict=True)
    ]
    assert tokens_of(answered(built_for(folder, policy()), begun)) == expected_tokens


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_pass_that_failed_in_the_middle_is_computed_again(
    folder: Path,
    expected_tokens: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    """States know tokens by then that they must not count twice, in some layers."""
    real, refusals = Decoder.attend, iter([False] * 20 + [True])

    def refusing(self: Decoder, at: int, *arguments: Any) -> None:
        real(self, at, *arguments)
        if at == layer and next(refusals, False):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")

    monkeypatch.setattr(Decoder, "attend", refusing)
    built = built_for(folder, policy(tokens_per_pass=80))
    assert tokens_of(answered(built)) == expected_tokens
    assert built.engine.statistics.num_shrunk == 1


def test_beginnings_are_not_shared(folder: Path, expected_tokens: list[tuple[int, ...]]) -> None:
    """What is known of a beginning has been added to since."""
    twice = [ROWS[4], replace(ROWS[4], index=1, custom_id="again")]
    built = built_for(folder, policy(batch_size=2))
    assert tokens_of(answered(built, twice)) == 2 * expected_tokens[4:5]
    assert built.engine.statistics.shared_tokens == 0


@pytest.mark.parametrize("title", ["streamed", "on disk", "three levels"])
def test_the_cache_takes_what_was_priced_and_what_the_configuration_says(
    folder: Path, tmp_path: Path, title: str
) -> None:
    chosen = WHERE[title]
    built = built_for(folder, chosen, tmp_path)
    in_cache = {level: built.cache.bytes_on(level) for level in ("vram", "dram")}
    groups = built.cache.groups
    built.close()
    files = open_model(folder, "float32")
    hardware = emulated().hardware
    assert hardware is not None
    asked = problem_of(files, hardware if chosen.ffn_on_gpu else hardware.without("vram"))
    for level, footprint in asked.footprints(chosen).items():
        priced = footprint.terms.get(KV_TERM, 0) + footprint.terms.get(KV_WINDOW_TERM, 0)
        assert in_cache.get(level, priced) == priced
    assert groups[1].num_pages(chosen) == chosen.batch_size
    if title == "streamed":
        family = files.config["model_type"]
        token, state = TOKENS.get(family, 2 * 2 * 8) * 4, STATES[family] * 4
        expected = chosen.num_kv_pages * 16 * token + len(RECURRENT) * chosen.batch_size * state
        assert in_cache["dram"] == expected


def test_recurrent_layers_are_not_left_to_the_cpu(tiny_checkpoint: Callable[..., Path]) -> None:
    hardware = emulated().hardware
    assert hardware is not None
    on_cpu = EMULATED["CPU attention"]
    for model, faults in (({}, []), (MODEL, ["attention_on_gpu"])):
        problem = problem_of(open_model(tiny_checkpoint(**model), "float32"), hardware)
        assert [key for key, _ in not_runnable(problem, on_cpu)] == faults
