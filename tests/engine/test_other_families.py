"""Families with what none of the other matrices has, such as scaled residuals: the tokens of
transformers, wherever weights and cache lie."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_engine import NEW_TOKENS, requests, tokens_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, run, suits
from tests.model.oracle import greedy_answers, load

ROWS = requests((1, 17, 40, 3, 96, 33))
WHERE = IN_MEMORY | EMULATED
OTHERS = (
    *("granitemoeshared", "ernie4_5_moe", "hunyuan_v1_moe", "exaone_moe"),
    *("gemma4_text", "llama4_text", "dbrx", "phimoe", "afmoe", "mellum", "mistral3"),
    *("flex_olmo", "sarvam_moe", "sarvam_mla", "axk1", "mimo_v2_flash", "longcat_flash"),
    *("step3p7", "glm4v_moe", "granitemoe_swa", "kolibri1", "flint", "laguna", "cohere2_moe"),
    *("qwen3_omni_moe_thinker", "aria_text", "deepseek_v4", "deepseek_v32", "hy_v4", "hy_v4_vl"),
    *("axk2", "mistral_large4", "glm5_next", "ernie4_5_vl_moe"),
    *("minimax_m3_vl", "dots3_note", "beam", "kimi_k25", "internvl", "muse_spark"),
    "nemotron_h_omni",
)
CASES = [
    (title, family) for title, chosen in WHERE.items() for family in OTHERS if suits(family, chosen)
]


@pytest.mark.few(title=tuple(WHERE), family=OTHERS[:3])
@pytest.mark.parametrize(("title", "family"), CASES)
@pytest.mark.parametrize("name", ["klotski", "cgopipe", "flexgen"])
def test_every_place_says_what_transformers_says(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, title: str, name: str, family: str
) -> None:
    folder = tiny_checkpoint(family, num_experts_per_tok=2)
    outcomes, _ = run(folder, replace(WHERE[title], schedule=name), ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == greedy_answers(load(folder), ROWS, NEW_TOKENS)


@pytest.mark.parametrize("family", ["axk2", "mistral_large4", "dots3_note"])
def test_a_cpu_attends_beside_a_gpu_where_all_tokens_are_chosen(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Gates that lie with queries are opened anew there."""
    folder = tiny_checkpoint(family, index_topk=5000)
    outcomes, _ = run(folder, EMULATED["CPU attention"], ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == greedy_answers(load(folder), ROWS, NEW_TOKENS)
