"""Layers whose weights outside experts come up for each pass: in every schedule, tokens are those
of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.layout.buffers import DENSE_TERM
from moebatch.schedule.registry import SCHEDULES
from moebatch.schedule.task import Kind
from tests.engine.passes import fail_in_the_middle
from tests.engine.test_engine import NEW_TOKENS, policy, requests, tokens_of
from tests.engine.test_memory import MAX_TOKENS, problem_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, built_for, emulated, run
from tests.model.oracle import greedy_answers, load
from tests.tiny import FAMILIES, RECURRENT

LAYERS = 7
"""More than twice as many as there are places."""
COUNTS = (1, 3, 4, 6, 7)
WHERE = {
    "in memory": IN_MEMORY["usual"],
    "experts resident": IN_MEMORY["everything resident"],
    "batches of one": policy(micro_batch_size=1, num_slots=9),
    **{
        name: EMULATED[name]
        for name in ("GPU attention, cache in main memory", "CPU attention", "three levels")
    },
}
_FEW_ROWS = requests((1, 17, 40, 3, 33))
Deep = Callable[[str], Path]


@pytest.fixture(scope="module")
def deep(tiny_checkpoint: Callable[..., Path]) -> Deep:
    """A tiny model of a family with as many layers, or one more where they come in pairs; those
    that recur do so as usual."""

    def of(family: str) -> Path:
        kinds: dict[str, Any] = {}
        if family in (*RECURRENT, "minimax", "bailing_hybrid"):
            kinds = {"layer_types": (["linear_attention", "full_attention"] * LAYERS)[:LAYERS]}
        elif family in ("axk1", "muse_spark"):
            kinds = {"mlp_layer_types": None}
        elif family == "mistral_large4":
            kinds = {"no_rope_layers": None}
        elif family == "lara_mini":
            kinds = {"layer_types": None}
        elif family in ("gpt_oss", "mimo_v2_flash", "kolibri1", "laguna", "cohere2_moe"):
            kinds = {"layer_types": (["sliding_attention", "full_attention"] * LAYERS)[:LAYERS]}
            kinds |= {"num_attention_heads_per_layer": None} if family == "laguna" else {}
        elif family == "beam":
            kinds = {"layer_types": None, "mlp_layer_types": None}
        elif family == "dots3_note":
            kinds = {"layer_types": None}
        elif family in ("deepseek_v4", "glm5_next"):
            kinds = {"layer_types": None, "mlp_layer_types": None}
        elif family == "minimax_m3_vl":
            kinds = {"layer_types": (["minimax_m3_sparse", "full_attention"] * LAYERS)[:LAYERS]}
            kinds |= {"mlp_layer_types": None}
        elif family == "step3p7":
            lists: dict[str, list[Any]] = {
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "swiglu_limits": [None, 0.6, None],
                "swiglu_limits_shared": [0.5, None, 0.4],
            }
            kinds = {key: (each * LAYERS)[:LAYERS] for key, each in lists.items()}
        elif family in ("nemotron_h", "nemotron_h_omni"):
            layers = ("full_attention", "linear_attention moe", "linear_attention mlp")
            kinds = {"layers_block_type": " ".join((layers * LAYERS)[:LAYERS]).split()}
        num_layers = LAYERS + (family == "longcat_flash")
        return tiny_checkpoint(family, num_hidden_layers=num_layers, **kinds)

    return of


@pytest.fixture(scope="module")
def expected_tokens(deep: Deep) -> Callable[[str], list[tuple[int, ...]]]:
    known: dict[str, list[tuple[int, ...]]] = {}

    def tokens(family: str) -> list[tuple[int, ...]]:
        if family not in known:
            model = load(deep(family))
            known[family] = greedy_answers(model, _FEW_ROWS, NEW_TOKENS)
        return known[family]

    return tokens


@pytest.mark.few(name=("klotski", "cgopipe", "simple", "flexgen"))
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_transformers_however_many_layers_come_up(
    deep: Deep,
    expected_tokens: Callable[[str], list[tuple[int, ...]]],
    tmp_path: Path,
    name: str,
    title: str,
    count: int,
) -> None:
    chosen = replace(WHERE[title], schedule=name, streamed_layers=count)
    outcomes, built = run(deep("mixtral"), chosen, _FEW_ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens("mixtral")
    assert built.recorder is not None
    moved = {
        span.task.step % LAYERS
        for span in built.recorder.timeline.spans
        if span.task.kind is Kind.LAYER_UP
    }
    assert len(moved) == count


@pytest.mark.few
@pytest.mark.parametrize("title", ["in memory", "GPU attention, cache in main memory"])
@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *("nemotron_h", "minimax", "dbrx", "sarvam_moe", "axk1", "mimo_v2_flash", "longcat_flash"),
        *("bailing_hybrid", "lara_mini", "kolibri1", "step3p7", "laguna", "cohere2_moe"),
        *("deepseek_v4", "hy_v4", "jamba", "axk2", "mistral_large4", "glm5_next"),
        *("minimax_m3_vl", "dots3_note", "beam", "kimi_k25", "internvl", "muse_spark"),
        "nemotron_h_omni",
    ],
)
def test_all_families_compute_with_what_has_come_up(
    deep: Deep,
    expected_tokens: Callable[[str], list[tuple[int, ...]]],
    tmp_path: Path,
    family: str,
    title: str,
) -> None:
    chosen = replace(WHERE[title], streamed_layers=LAYERS)
    outcomes, _ = run(deep(family), chosen, _FEW_ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens(family)


def test_the_plain_driver_brings_them_too(
    deep: Deep, expected_tokens: Callable[[str], list[tuple[int, ...]]], tmp_path: Path
) -> None:
    chosen = replace(policy(), streamed_layers=4)
    outcomes, _ = run(deep("mixtral"), chosen, _FEW_ROWS, scratch=tmp_path, is_plain=True)
    assert tokens_of(outcomes) == expected_tokens("mixtral")


@pytest.mark.parametrize("title", ["in memory", "GPU attention, cache in main memory"])
@pytest.mark.parametrize("layer", [0, 3, 6])
def test_a_pass_that_failed_in_the_middle_begins_with_what_its_first_layers_need(
    deep: Deep,
    expected_tokens: Callable[[str], list[tuple[int, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
    title: str,
) -> None:
    """Its layers are in all places by then."""
    fail_in_the_middle(monkeypatch, layer, num_before=3)
    chosen = replace(WHERE[title], streamed_layers=6)
    outcomes, built = run(deep("mixtral"), chosen, _FEW_ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == expected_tokens("mixtral")
    assert built.engine.statistics.num_shrunk == 1


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen3_next", "minimax"])
@pytest.mark.parametrize("count", [0, *COUNTS])
def test_memory_is_what_the_plan_says(deep: Deep, tmp_path: Path, family: str, count: int) -> None:
    chosen = replace(WHERE["GPU attention, cache in main memory"], streamed_layers=count)
    files = open_model(deep(family), "float32")
    built = built_for(deep(family), chosen, max_tokens=MAX_TOKENS, scratch=tmp_path)
    hardware = emulated().hardware
    assert hardware is not None
    try:
        planned = {
            buffer.name: buffer
            for buffer in problem_of(files, hardware).memory.buffers(chosen)
            if buffer.term == DENSE_TERM
        }
        on_gpu = sum(each.num_bytes for each in planned.values() if each.level == "vram")
        taken = built.memory.taken_bytes[DENSE_TERM]
        assert taken <= on_gpu <= taken + 2**12 * LAYERS
        assert ("weights of layers below" in planned) == bool(count)
    finally:
        built.close()
