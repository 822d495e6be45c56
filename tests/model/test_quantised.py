"""Quantised checkpoints answer as transformers does with the weights that they stand for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moebatch.model.native import loader
from tests.formats.test_decoding import ROWS_APART
from tests.model.driver import Driver
from tests.model.oracle import greedy, load, prompts
from tests.quantised import KINDS, decoded_beside, write_quantised

NUM_NEW = 5
PROMPTS = prompts(lengths=(1, 21, 60))
UNTIDY: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 48, "intermediate_size": 40},
    "qwen2_moe": {
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
    },
    "glm4_moe": {"hidden_size": 48, "moe_intermediate_size": 40, "n_shared_experts": 2},
    "minimax_m2": {"hidden_size": 48, "intermediate_size": 40},
    "deepseek_v3": {"hidden_size": 48, "moe_intermediate_size": 40, "intermediate_size": 72},
    "qwen3_next": {
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 72,
    },
    "kimi_linear": {
        "hidden_size": 48,
        "linear_num_heads": 9,  # of less than a word upstream does not unpack zero points
        "moe_intermediate_size": 40,
        "intermediate_size": 72,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minimax": {
        "hidden_size": 48,
        "intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "intermediate_size": 72,
        "layer_types": ["conv", "full_attention"],
    },
    "longcat_flash": {"hidden_size": 48, "expert_ffn_hidden_size": 40, "ffn_hidden_size": 72},
}
"""Sizes that are no multiples of blocks and groups."""
STACKED: dict[str, dict[str, Any]] = {
    "mixtral": UNTIDY["mixtral"] | {"fused": True},
    "granitemoehybrid": {
        "hidden_size": 48,
        "intermediate_size": 40,
        "shared_intermediate_size": 72,
        "layer_types": ["mamba", "attention"],
    },
    "step3p7": {
        "hidden_size": 48,
        "intermediate_size": 72,
        "moe_intermediate_size": 40,
        "num_attention_heads": 10,  # of one word upstream does not unpack zero points
        "num_sliding_attention_heads": 12,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "swiglu_limits": [None, 0.6],
        "swiglu_limits_shared": [0.5, None],
    },
}
"""The same, of experts in stacks, in which gate and up share a tensor or have each its own."""
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3"}
PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DeepSeek-V3, Kimi-K2": ("deepseek_v3", "fp8", _FP8),
    "Kimi-K2-Thinking": (
        "deepseek_v3",
        "int4",
        {
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.gate_p"],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        },
    ),
    "GLM-4.5": ("glm4_moe", "fp8-channel", {"kv_cache_scheme": None, "sparsity_config": {}}),
    "MiniMax-M2": (
        "minimax_m2",
        "fp8",
        _FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    ),
    "Qwen3-Next": (
        "qwen3_next",
        "fp8",
        _FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.linear_attn.in_proj_ba"]},
    ),
}
"""Family, kind, and what ``quantization_config`` says beside it."""


@pytest.fixture
def quantised(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny checkpoint of a family as one of a kind."""

    def write(
        family: str, kind: str, sizes: Mapping[str, Any] | None = None, **options: Any
    ) -> Path:
        plain = tiny_checkpoint(family, num_hidden_layers=2, **(sizes or UNTIDY[family]))
        return write_quantised(plain, kind, tmp_path / kind, **options)

    return write


def answers(folder: Path) -> list[list[int]]:
    seqs = Driver(folder).generate(PROMPTS, NUM_NEW, slice_tokens=16, stagger=1)
    return [seq.answer for seq in seqs]


def expected(folder: Path) -> list[list[int]]:
    model = load(decoded_beside(folder))
    return [greedy(model, prompt, NUM_NEW)[0] for prompt in PROMPTS]


@pytest.mark.few(15)
@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("family", UNTIDY)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_decoded_weights(
    kind: str,
    family: str,
    kernels: str,
    quantised: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(loader.SWITCH, kernels)
    folder = quantised(family, kind, dense=True, shards=kernels == "1")
    driver = Driver(folder)
    assert str(driver.files.experts.format) == KINDS[kind].format
    assert answers(folder) == expected(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_as_they_are_published(name: str, quantised: Callable[..., Path]) -> None:
    """All that is published in few bits is, attention among it, but for what is not read."""
    family, kind, said = PUBLISHED[name]
    folder = quantised(family, kind, dense="ignore" not in said, said=said)
    files = Driver(folder).files
    assert not files.warnings
    assert answers(folder) == expected(folder)


@pytest.mark.few
@pytest.mark.parametrize("family", STACKED)
@pytest.mark.parametrize("kind", ROWS_APART)
def test_stacked_experts(kind: str, family: str, quantised: Callable[..., Path]) -> None:
    """Forty rows each: blocks of sixteen and words of eight are cut through or not."""
    folder = quantised(family, kind, STACKED[family], dense=True)
    assert answers(folder) == expected(folder)


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_gpt_oss_as_it_is_published(
    kernels: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gate and up take turns row by row in codes that lie the other way round than the plain
    numbers that transformers saves. It decodes them itself here."""
    monkeypatch.setenv(loader.SWITCH, kernels)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 4}
    folder = tmp_path / "m"
    write_quantised(tiny_checkpoint("gpt_oss", num_hidden_layers=2, **sizes), "mxfp4", folder)
    files = Driver(folder).files
    assert str(files.experts.format) == "mxfp4, groups of 32"
    assert answers(folder) == expected(folder)
    model = load(folder)
    assert answers(folder) == [greedy(model, prompt, NUM_NEW)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["fp8", "int4-zeros", "packed-nvfp4"])
def test_bfloat16_is_computed_with_the_decoded_weights(
    kind: str, quantised: Callable[..., Path]
) -> None:
    folder = quantised("mixtral", kind)
    logits, decoded = (
        Driver(each, dtype=torch.bfloat16).generate(PROMPTS[:1], 1)[0].logits[0]
        for each in (folder, decoded_beside(folder))
    )
    torch.testing.assert_close(logits.float(), decoded.float(), rtol=0.05, atol=0.1)
