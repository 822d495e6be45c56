"""Families with what none of the other matrices has, such as scaled residuals: the tokens of
transformers, wherever weights and cache lie."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.spec.policy.policy import Policy
from tests.engine.test_engine import NEW_TOKENS, requests, tokens_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, emulated, run
from tests.model import oracle

ROWS = requests((1, 17, 40, 3, 96, 33))
WHERE = IN_MEMORY | EMULATED
OTHERS = (
    *("granitemoeshared", "ernie4_5_moe", "hunyuan_v1_moe", "exaone_moe"),
    *("gemma4_text", "llama4_text", "dbrx", "phimoe", "afmoe", "mellum", "mistral3"),
    *("flex_olmo", "sarvam_moe", "sarvam_mla", "axk1", "mimo_v2_flash", "longcat_flash"),
    *("step3p7", "glm4v_moe", "granitemoe_swa", "kolibri1", "flint", "laguna", "cohere2_moe"),
    *("qwen3_omni_moe_thinker", "aria_text", "deepseek_v4", "deepseek_v32", "hy_v4", "hy_v4_vl"),
)
ON_GPU_ALONE = ("deepseek_v4", "deepseek_v32", "hy_v4", "hy_v4_vl")


@pytest.mark.few(title=tuple(WHERE), family=OTHERS[:3])
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("name", ["klotski", "cgopipe", "flexgen"])
@pytest.mark.parametrize("title", WHERE)
def test_every_place_says_what_transformers_says(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, title: str, name: str, family: str
) -> None:
    chosen: Policy = replace(WHERE[title], schedule=name)
    if family in ON_GPU_ALONE and chosen.ffn_on_gpu and not chosen.attention_on_gpu:
        pytest.skip("attention takes more than what it caches")
    on_gpu = {"device": emulated(), "scratch": tmp_path} if chosen.ffn_on_gpu else {}
    folder = tiny_checkpoint(family, num_experts_per_tok=2)
    outcomes, _ = run(folder, chosen, ROWS, **on_gpu)
    model = oracle.load(folder)
    wanted = [tuple(oracle.greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in ROWS]
    assert tokens_of(outcomes) == wanted
