"""Families that llama.cpp knows, by the names that it gives their architectures."""

from dataclasses import replace

from moebatch.checkpoint.gguf import arrangements, keys
from moebatch.checkpoint.gguf.family import DIVIDES, GgufFamily, GgufMetadata
from moebatch.quoting import shown

_INDEXER_SIZES = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_RECURRENT_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
_GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_MAMBA_SIZES = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
_QWEN3 = GgufFamily(architecture="Qwen3MoeForCausalLM", entries={"norm_topk_prob": True})
FAMILIES = {
    "llama": GgufFamily(
        architecture="MixtralForCausalLM", arranged=arrangements.interleaved, divides=True
    ),
    "llama4": GgufFamily(
        architecture="Llama4ForCausalLM",
        sizes={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        keys=keys.llama4,
        divides=True,
    ),
    "qwen2moe": GgufFamily(architecture="Qwen2MoeForCausalLM"),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": _QWEN3,  # of text alone, whose positions are those of one axis
    "olmoe": GgufFamily(architecture="OlmoeForCausalLM"),
    "glm4moe": GgufFamily(
        architecture="Glm4MoeForCausalLM",
        keys=keys.dense_first,
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "minimax-m2": GgufFamily(architecture="MiniMaxM2ForCausalLM"),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        sizes=_WINDOW,
        positions={"truncate": False},
        flags={"attention_bias": "attn_q.bias"},
    ),
    "deepseek": GgufFamily(architecture="DeepseekForCausalLM", arranged=arrangements.interleaved),
    "deepseek2": GgufFamily(
        architecture="DeepseekV2ForCausalLM",
        keys=keys.deepseek,
        arranged=arrangements.latent_halves,
    ),
    "mistral4": GgufFamily(
        architecture="Mistral4ForCausalLM",
        keys=keys.mistral4,
        arranged=arrangements.latent_halves,
        positions={"llama_4_scaling_beta": 0.1},
    ),
    "bailingmoe": GgufFamily(
        architecture="BailingMoeForCausalLM", arranged=arrangements.interleaved
    ),
    "bailingmoe2": GgufFamily(
        architecture="BailingMoeV2ForCausalLM",
        flags={"use_qk_norm": "attn_q_norm.weight"},
    ),
    "exaone-moe": GgufFamily(
        architecture="ExaoneMoeForCausalLM",
        sizes=_WINDOW,
        keys=keys.by_window,
    ),
    "afmoe": GgufFamily(
        architecture="AfmoeForCausalLM",
        sizes=_WINDOW
        | {
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
        },
        entries={"mup_enabled": True},
    ),
    "mimo2": GgufFamily(
        architecture="MiMoV2FlashForCausalLM",
        sizes={
            "v_head_dim": "attention.value_length",
            "attention_value_scale": "attention.value_scale",
        },
        keys=keys.mimo,
    ),
    "phimoe": GgufFamily(
        architecture="PhimoeForCausalLM",
        keys=keys.phimoe,
        flags={"attention_bias": "attn_q.bias", "lm_head_bias": "output.bias"},
        scaling_tensors=keys.BY_LENGTH,
    ),
    "step35": GgufFamily(
        architecture="Step3p5ForCausalLM",
        sizes=_WINDOW
        | {
            "share_expert_dim": "expert_shared_feed_forward_length",
            "moe_router_scaling_factor": "expert_weights_scale",
        },
        keys=keys.step,
        arranged=arrangements.from_zero,
        scaling_tensors=DIVIDES,
    ),
    "dbrx": GgufFamily(
        architecture="DbrxForCausalLM",
        sizes={"rms_norm_eps": "attention.layer_norm_epsilon"},
    ),
    "glm-dsa": GgufFamily(
        architecture="GlmMoeDsaForCausalLM",
        sizes=_INDEXER_SIZES,
        keys=keys.choosing,
        arranged=arrangements.latent_halves,
    ),
    "dots1": GgufFamily(architecture="Dots1ForCausalLM", entries={"sliding_window": None}),
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
        sizes=_GRANITE_SCALES | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        arranged=arrangements.interleaved,
    ),
    "granitehybrid": GgufFamily(
        architecture="GraniteMoeHybridForCausalLM",
        sizes=_GRANITE_SCALES | _MAMBA_SIZES,
        keys=keys.granite_hybrid,
        arranged=arrangements.state_space,
    ),
    "jamba": GgufFamily(
        architecture="JambaForCausalLM",
        sizes={
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        keys=keys.jamba,
        arranged=arrangements.scan,
    ),
    "nemotron_h_moe": GgufFamily(
        architecture="NemotronHForCausalLM",
        sizes=_MAMBA_SIZES
        | {
            "rms_norm_eps": "attention.layer_norm_epsilon",
            "moe_latent_size": "moe_latent_size",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        keys=keys.nemotron,
        arranged=arrangements.state_space,
    ),
    "lfm2moe": GgufFamily(
        architecture="Lfm2MoeForCausalLM",
        sizes={"conv_L_cache": "shortconv.l_cache"},
        keys=keys.lfm2,
        arranged=arrangements.short_convolution,
    ),
    "kimi-linear": GgufFamily(
        architecture="KimiLinearForCausalLM",
        sizes={"linear_head_dim": "kda.head_dim", "linear_conv_kernel_dim": "ssm.conv_kernel"},
        keys=keys.kimi,
        arranged=arrangements.channel_delta,
    ),
    "hunyuan-moe": GgufFamily(architecture="HunYuanMoEV1ForCausalLM"),
    "gemma4": GgufFamily(
        architecture="Gemma4ForCausalLM",
        sizes=_WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        entries={"enable_moe_block": True},
        keys=keys.gemma,
        scaling_tensors=DIVIDES,
    ),
    "qwen3next": GgufFamily(
        architecture="Qwen3NextForCausalLM",
        sizes=_RECURRENT_SIZES,
        keys=keys.recurrent,
        arranged=arrangements.qwen3_next,
    ),
    "qwen35moe": GgufFamily(
        architecture="Qwen3_5MoeForCausalLM",
        sizes=_RECURRENT_SIZES,
        keys=keys.recurrent,
        arranged=arrangements.qwen3_5,
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
