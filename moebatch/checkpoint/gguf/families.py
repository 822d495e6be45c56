"""Families that llama.cpp knows, by the names that it gives their architectures."""

from dataclasses import replace
from typing import Any

from moebatch.checkpoint.gguf.family import Arranged, GgufFamily, GgufMetadata
from moebatch.formats.ggml_rearranged import (
    ByKeyHead,
    ByTurns,
    CountedFromZero,
    Interleaved,
    LatentHalves,
)
from moebatch.quoting import shown


def _interleaved(said: GgufMetadata) -> Arranged:
    heads = said.count("attention.head_count")
    key_heads = said.count("attention.head_count_kv", heads)
    return {
        f"attn_{role}.{kind}": ((f"attn_{role}.{kind}",), Interleaved(count))
        for role, count in (("q", heads), ("k", key_heads))
        for kind in ("weight", "bias")
    }


def _latent(said: GgufMetadata) -> dict[str, Any]:
    """Heads of latent attention; older files have the sizes that newer ones give as ``_mla``."""
    rotated = said.count("rope.dimension_count")
    heads = said.count("attention.head_count")
    key, value = (
        said.count(f"attention.{kind}_length_mla", said.count(f"attention.{kind}_length"))
        for kind in ("key", "value")
    )
    if said.get("attention.temperature_scale"):
        raise said.fault("queries have a temperature, which is not read of this architecture")
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "kv_lora_rank": said.count("attention.kv_lora_rank"),
        "q_lora_rank": said.get("attention.q_lora_rank"),
        "norm_topk_prob": said.get("expert_weights_norm") is True,
        **_groups(said),
    }


def _groups(said: GgufMetadata) -> dict[str, Any]:
    """Groups of experts, which files older than October 2025 leave out: only two released models of
    the architecture have any, DeepSeek-V3 (256 experts) and V2 (160)."""
    released = {256: (8, 4), 160: (8, 3)}
    usual, usual_kept = released.get(said.count("expert_count"), (1, 1))
    count = said.count("expert_group_count", usual)
    kept = said.count("expert_group_used_count", usual_kept if count == usual else count)
    return {
        "n_group": count,
        "topk_group": kept,
        "topk_method": "group_limited_greedy" if count > 1 else "greedy",
    }


def _latent_halves(said: GgufMetadata) -> Arranged:
    sizes = _latent(said)
    halves = LatentHalves(sizes["num_key_value_heads"], sizes["qk_nope_head_dim"])
    return {"attn_kv_b.weight": (("attn_k_b.weight", "attn_v_b.weight"), halves)}


_RECURRENT_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}


def _recurrent(said: GgufMetadata) -> dict[str, Any]:
    """Heads of values, and which layers recur where a file lists them."""
    keys: dict[str, Any] = {
        "linear_value_head_dim": said.count("ssm.inner_size") // said.count("ssm.time_step_rank")
    }
    recurs, count = said.get("attention.recurrent_layers"), said.num_layers
    if isinstance(recurs, list) and type(count) is int:
        kinds = ("full_attention", "linear_attention")
        keys["layer_types"] = [kinds[bool(each)] for each in recurs[:count]]
    return keys


def _from_zero(said: GgufMetadata) -> Arranged:
    """Norms count from one, but that behind a recurrence."""
    norms = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
    return {f"{norm}.weight": ((f"{norm}.weight",), CountedFromZero()) for norm in norms}


def _recurrence(said: GgufMetadata, *, by_turns: bool) -> Arranged:
    """Of a recurrent layer; heads of values are in turns, or in the model's order."""
    key_heads, value_heads = said.count("ssm.group_count"), said.count("ssm.time_step_rank")
    key_head_dim = said.count("ssm.state_size")
    shared = value_heads // key_heads if by_turns else 1
    num_heads = key_heads if by_turns else value_heads
    before = 2 * key_heads * key_head_dim

    def turns(**others: Any) -> ByTurns:
        return ByTurns(num_key_heads=num_heads, num_shared=shared, **others)

    arrangements = {
        "attn_qkv.weight": turns(num_rows_before=before),
        "attn_gate.weight": turns(),
        "ssm_alpha.weight": turns(),
        "ssm_beta.weight": turns(),
        "ssm_conv1d.weight": turns(num_rows_before=before),
        "ssm_a": turns(is_decay=True),
        "ssm_dt.bias": turns(),
        "ssm_out.weight": turns(has_columns=True),
    }
    return {name: ((name,), each) for name, each in arrangements.items()}


def _qwen3_next(said: GgufMetadata) -> Arranged:
    """Older files have ``ssm_in`` as the model has it."""
    by_key_head = ByKeyHead(said.count("ssm.group_count"), said.count("ssm.state_size"))
    projections = {"ssm_in.weight": (("attn_qkv.weight", "attn_gate.weight"), by_key_head)}
    return {**_from_zero(said), **_recurrence(said, by_turns=False), **projections}


def _qwen3_5(said: GgufMetadata) -> Arranged:
    return {**_from_zero(said), **_recurrence(said, by_turns=True)}


def _gemma(said: GgufMetadata) -> dict[str, Any]:
    """Layers that slide and layers that do not have heads of their own. The share of a head that
    rotates in the latter is not in files; it is that of all released models."""
    slides = said.get("attention.sliding_window_pattern")
    heads = said.get("attention.head_count_kv")
    if not isinstance(slides, list):
        raise said.fault(f"{said.architecture}.attention.sliding_window_pattern is missing")
    by_layer = heads if isinstance(heads, list) else [heads] * len(slides)
    of_kind = {bool(kind): count for kind, count in zip(slides, by_layer, strict=False)}
    full, sliding = ("full_attention", "sliding_attention")
    return {
        "layer_types": [sliding if each else full for each in slides],
        "num_key_value_heads": of_kind.get(True),
        "num_global_key_value_heads": of_kind.get(False),
        "attention_k_eq_v": said.num_with("attn_v.weight") < said.num_with("attn_k.weight"),
        "global_head_dim": said.get("attention.key_length"),
        "head_dim": said.get("attention.key_length_swa"),
        "hidden_size_per_layer_input": said.get("embedding_length_per_layer_input") or 0,
        "num_kv_shared_layers": said.get("attention.shared_kv_layers") or 0,
        "rope_parameters": {
            sliding: {"rope_type": "default", "rope_theta": said.get("rope.freq_base_swa") or 1e4},
            full: {
                "rope_type": "proportional",
                "rope_theta": said.get("rope.freq_base") or 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
    }


_SHARED_SIZES = {
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
}
_GROUP_SIZES = {
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_QWEN3 = GgufFamily(
    architecture="Qwen3MoeForCausalLM",
    entries={"norm_topk_prob": True},
)
FAMILIES = {
    "llama": GgufFamily(
        architecture="MixtralForCausalLM",
        width="intermediate_size",
        entries={"sliding_window": None},
        arranged=_interleaved,
    ),
    "qwen2moe": GgufFamily(
        architecture="Qwen2MoeForCausalLM",
        entries={"norm_topk_prob": False, "qkv_bias": True},
    ),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": _QWEN3,  # of text alone, whose positions are those of one axis
    "olmoe": GgufFamily(
        architecture="OlmoeForCausalLM",
        width="intermediate_size",
        entries={"norm_topk_prob": False},
    ),
    "glm4moe": GgufFamily(
        architecture="Glm4MoeForCausalLM",
        sizes=_SHARED_SIZES | _GROUP_SIZES,
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "minimax-m2": GgufFamily(
        architecture="MiniMaxM2ForCausalLM",
        width="intermediate_size",
    ),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        width="intermediate_size",
        sizes={"sliding_window": "attention.sliding_window"},
        positions={"truncate": False},
        flags={"attention_bias": "attn_q.bias"},
    ),
    "deepseek": GgufFamily(
        architecture="DeepseekForCausalLM",
        sizes=_SHARED_SIZES,
        entries={"norm_topk_prob": False},
        arranged=_interleaved,
    ),
    "deepseek2": GgufFamily(
        architecture="DeepseekV2ForCausalLM",
        sizes=_SHARED_SIZES,
        keys=_latent,
        arranged=_latent_halves,
    ),
    "dots1": GgufFamily(
        architecture="Dots1ForCausalLM",
        sizes=_SHARED_SIZES | _GROUP_SIZES,
        entries={"sliding_window": None},
    ),
    "ernie4_5-moe": GgufFamily(
        architecture="Ernie4_5_MoeForCausalLM",
        sizes={
            "num_shared": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "granitemoe": GgufFamily(
        architecture="GraniteMoeSharedForCausalLM",
        width="intermediate_size",
        sizes={
            "shared_intermediate_size": "expert_shared_feed_forward_length",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
        arranged=_interleaved,
    ),
    "hunyuan-moe": GgufFamily(
        architecture="HunYuanMoEV1ForCausalLM",
        width="intermediate_size",
    ),
    "gemma4": GgufFamily(
        architecture="Gemma4ForCausalLM",
        sizes={
            "sliding_window": "attention.sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        entries={"hidden_act": "gelu_pytorch_tanh", "enable_moe_block": True},
        keys=_gemma,
        knows_factors=True,
    ),
    "qwen3next": GgufFamily(
        architecture="Qwen3NextForCausalLM",
        sizes=_RECURRENT_SIZES,
        entries={"norm_topk_prob": True},
        keys=_recurrent,
        arranged=_qwen3_next,
    ),
    "qwen35moe": GgufFamily(
        architecture="Qwen3_5MoeForCausalLM",
        sizes=_RECURRENT_SIZES,
        keys=_recurrent,
        arranged=_qwen3_5,
    ),
}
"""By the architecture's name in GGUF."""
_WITH_SIGMOIDS = {"deepseek2": replace(FAMILIES["deepseek2"], architecture="DeepseekV3ForCausalLM")}
"""Those that share a name with another family. Kimi-K2 and GLM-4.7-Flash are as DeepSeek-V3."""


def family_of(said: GgufMetadata) -> GgufFamily:
    """By the architecture; where two share a name, by how gates score. Raises CheckpointError for
    one that is not known."""
    found = said.architecture
    if not isinstance(found, str) or found not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise said.fault(
            f"architecture {shown(found)} of GGUF is not supported; supported are {known}, with "
            "experts"
        )
    with_sigmoids = _WITH_SIGMOIDS.get(found) if said.has_sigmoids else None
    return with_sigmoids or FAMILIES[found]
