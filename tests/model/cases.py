"""Every option that the configurations of families can express."""

from typing import Any

Case = tuple[str, dict[str, Any]]

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
    "longrope-attention": {
        "rope_type": "longrope",
        "attention_factor": 1.3,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.0, 1.5, 2.0],
        "long_factor": [2.0, 2.0, 3.0, 5.0],
    },
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
}


def _rope_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"):
        for name, parameters in ROPES.items():
            config = {
                # Prompts of the tests lie on both sides of this length.
                "max_position_embeddings": 32 if name == "dynamic" else 128,
                "head_dim": 8,
                "rope_parameters": {"rope_theta": 5000.0, **parameters},
            }
            cases[f"{family}-{name}"] = (family, config)
    return cases


def _latent_yarn(mscale: float, all_dim: float) -> dict[str, Any]:
    of_all = {"rope_theta": 5000.0, **ROPES["yarn"]}
    return of_all | {"mscale": mscale, "mscale_all_dim": all_dim}


def _ffn(**entries: Any) -> dict[str, Any]:
    """Of DBRX."""
    return {"ffn_hidden_size": 23, "moe_num_experts": 6, "moe_top_k": 2, **entries}


def _attention(**entries: Any) -> dict[str, Any]:
    """Of DBRX."""
    return {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 5000.0, **entries}


CASES: dict[str, Case] = {
    "mixtral": ("mixtral", {}),
    "mixtral-fused": ("mixtral", {"fused": True}),
    "mixtral-shards": ("mixtral", {"max_shard_size": "60KB"}),
    "mixtral-window": ("mixtral", {"sliding_window": 16}),
    "mixtral-window-2": ("mixtral", {"sliding_window": 2}),
    "mixtral-head-dim": ("mixtral", {"head_dim": 12}),
    "mixtral-tied": ("mixtral", {"tie_word_embeddings": True}),
    "mixtral-tied-fused": ("mixtral", {"tie_word_embeddings": True, "fused": True}),
    "mixtral-mha": ("mixtral", {"num_key_value_heads": 4}),
    "mixtral-mqa": ("mixtral", {"num_key_value_heads": 1}),
    "mixtral-top-1": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral-all-experts": ("mixtral", {"num_experts_per_tok": 6}),
    "mixtral-gelu": ("mixtral", {"hidden_act": "gelu"}),
    "mixtral-relu2": ("mixtral", {"hidden_act": "relu2"}),
    "qwen2": ("qwen2_moe", {}),
    "qwen2-fused": ("qwen2_moe", {"fused": True}),
    "qwen2-no-bias": ("qwen2_moe", {"qkv_bias": False}),
    "qwen2-norm-topk": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2-sparse-step": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen2-mlp-only": ("qwen2_moe", {"mlp_only_layers": [0, 2], "fused": True}),
    "qwen2-window": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 3,
            "num_hidden_layers": 4,
        },
    ),
    "qwen2-window-types": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen2-window-off": ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen2-head-dim": ("qwen2_moe", {"head_dim": 10}),
    "qwen2-tied": ("qwen2_moe", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3_moe", {}),
    "qwen3-fused": ("qwen3_moe", {"fused": True}),
    "qwen3-shards": ("qwen3_moe", {"max_shard_size": "60KB", "norm_topk_prob": True}),
    "qwen3-bias": ("qwen3_moe", {"attention_bias": True}),
    "qwen3-norm-topk": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-sparse-step": ("qwen3_moe", {"decoder_sparse_step": 3}),
    "qwen3-mlp-only": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
    "qwen3-window-off": ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen3-tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "olmoe": ("olmoe", {}),
    "olmoe-fused": ("olmoe", {"fused": True}),
    "olmoe-clip": ("olmoe", {"clip_qkv": 0.7}),
    "olmoe-bias": ("olmoe", {"attention_bias": True}),
    "olmoe-norm-topk": ("olmoe", {"norm_topk_prob": True}),
    "olmoe-mha": ("olmoe", {"num_key_value_heads": None}),
    "olmoe-tied": ("olmoe", {"tie_word_embeddings": True}),
    "flex": ("flex_olmo", {}),
    "flex-fused": ("flex_olmo", {"fused": True, "norm_topk_prob": True}),
    "flex-bias": ("flex_olmo", {"attention_bias": True, "num_key_value_heads": None}),
    "flex-head-dim": ("flex_olmo", {"head_dim": 10, "num_experts_per_tok": 1}),
    "glm4": ("glm4_moe", {}),
    "glm4-fused": ("glm4_moe", {"fused": True}),
    "glm4-dense": ("glm4_moe", {"first_k_dense_replace": 2}),
    "glm4-plain": (
        "glm4_moe",
        {"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False},
    ),
    "glm4-groups": ("glm4_moe", {"n_group": 4, "topk_group": 2}),
    "glm4-top-1": ("glm4_moe", {"num_experts_per_tok": 1, "n_group": 2}),
    "glm4-shared": ("glm4_moe", {"n_shared_experts": 3, "head_dim": 20}),
    "glm4-rotary-all": (
        "glm4_moe",
        {"rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 1.0}},
    ),
    "glm4-rotary-quarter": ("glm4_moe", {"partial_rotary_factor": 0.25}),
    "glm4-tied": ("glm4_moe", {"tie_word_embeddings": True}),
    "glm4v": ("glm4v_moe", {}),
    "glm4v-fused": ("glm4v_moe", {"fused": True, "attention_bias": False}),
    "glm4v-groups": (
        "glm4v_moe",
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "glm4v-rotary-all": (
        "glm4v_moe",
        {
            "first_k_dense_replace": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 1.0,
                "mrope_section": [3, 3, 2],
            },
        },
    ),
    "glm4v-tied": ("glm4v_moe", {"tie_word_embeddings": True}),
    "minimax": ("minimax_m2", {}),
    "minimax-fused": ("minimax_m2", {"fused": True}),
    "minimax-rotary-all": ("minimax_m2", {"rotary_dim": None}),
    "minimax-rotary-share": (
        "minimax_m2",
        {"rotary_dim": None, "rope_parameters": {"partial_rotary_factor": 0.7}},
    ),
    "minimax-top-1": ("minimax_m2", {"num_experts_per_tok": 1}),
    "minimax-mha": ("minimax_m2", {"num_key_value_heads": 4}),
    "minimax-tied": ("minimax_m2", {"tie_word_embeddings": True}),
    "minimax-yarn": (
        "minimax_m2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "m3": ("minimax_m3_vl", {}),
    "m3-fused": ("minimax_m3_vl", {"fused": True, "mlp_layer_types": ["sparse", "dense"] * 2}),
    "m3-text": ("minimax_m3_vl_text", {"tie_word_embeddings": True, "num_experts_per_tok": 5}),
    "m3-rotary-all": (
        "minimax_m3_vl",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
            "rotary_dim": 10,
            "layer_types": None,
            "swiglu_limit": 0.5,
        },
    ),
    "m3-own-alone": ("minimax_m3_vl", {"index_topk_blocks": 1, "index_block_size": 7}),
    "m3-last": ("minimax_m3_vl", {"index_topk_blocks": 4, "index_local_blocks": 3}),
    "m3-tokens": ("minimax_m3_vl", {"index_topk_blocks": 9, "index_block_size": 1}),
    "m3-mha": (
        "minimax_m3_vl",
        {
            "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
            "num_key_value_heads": 4,
            "index_n_heads": 4,
            "index_head_dim": 6,
            "index_block_size": 5,
            "index_topk_blocks": 2,
        },
    ),
    "m3-one-head": (
        "minimax_m3_vl",
        {
            "layer_types": ["minimax_m3_sparse"] * 4,
            "num_key_value_heads": 1,
            "index_n_heads": 1,
            "index_topk_blocks": 5,
        },
    ),
    "m3-all": ("minimax_m3_vl", {"index_topk_blocks": 27}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-top-1": ("gpt_oss", {"num_experts_per_tok": 1}),
    "gpt-oss-top-4": ("gpt_oss", {"num_experts_per_tok": 4, "swiglu_limit": 0.5}),
    "gpt-oss-odd": ("gpt_oss", {"intermediate_size": 23, "hidden_size": 30, "head_dim": 6}),
    "gpt-oss-window-2": ("gpt_oss", {"sliding_window": 2, "num_key_value_heads": 1}),
    "gpt-oss-types": (
        "gpt_oss",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt-oss-no-bias": ("gpt_oss", {"attention_bias": False, "num_key_value_heads": 4}),
    "gpt-oss-tied": ("gpt_oss", {"tie_word_embeddings": True}),
    "dbrx": ("dbrx", {}),
    "dbrx-shards": ("dbrx", {"max_shard_size": "30KB"}),
    "dbrx-top-1": ("dbrx", {"ffn_config": _ffn(moe_top_k=1)}),
    "dbrx-top-3": ("dbrx", {"ffn_config": _ffn(moe_top_k=3)}),
    "dbrx-norm-2": ("dbrx", {"ffn_config": _ffn(moe_normalize_expert_weights=2.0)}),
    "dbrx-not-normed": ("dbrx", {"ffn_config": _ffn(moe_normalize_expert_weights=None)}),
    "dbrx-gelu": ("dbrx", {"ffn_config": _ffn(ffn_act_fn={"name": "gelu"})}),
    "dbrx-odd": (
        "dbrx",
        {
            "d_model": 30,
            "hidden_size": 30,
            "num_attention_heads": 5,
            "attn_config": _attention(kv_n_heads=5),
        },
    ),
    "dbrx-mqa": ("dbrx", {"attn_config": _attention(kv_n_heads=1, clip_qkv=2)}),
    "phimoe": ("phimoe", {}),
    "phimoe-fused": ("phimoe", {"fused": True}),
    "phimoe-no-bias": ("phimoe", {"attention_bias": False, "lm_head_bias": False}),
    "phimoe-far": ("phimoe", {"router_jitter_noise": 0.3}),
    "phimoe-nearest": ("phimoe", {"router_jitter_noise": 0.0}),
    "phimoe-window": ("phimoe", {"sliding_window": 16}),
    "phimoe-head-dim": ("phimoe", {"head_dim": 10, "num_key_value_heads": 4}),
    "phimoe-tied": ("phimoe", {"tie_word_embeddings": True}),
    "phimoe-longrope": (
        "phimoe",
        {
            "rope_parameters": {
                **ROPES["longrope"],
                "rope_theta": 5000.0,
                # transformers 5 takes the short ones at every length.
                "long_factor": ROPES["longrope"]["short_factor"],
                "short_mscale": 1.1,
                "long_mscale": 1.4,
            },
        },
    ),
    "next": ("qwen3_next", {}),
    "next-fused": ("qwen3_next", {"fused": True}),
    "next-heads-alike": ("qwen3_next", {"linear_num_value_heads": 2}),
    "next-heads-tripled": ("qwen3_next", {"linear_num_value_heads": 6, "attention_bias": True}),
    "next-short-convolution": ("qwen3_next", {"linear_conv_kernel_dim": 2}),
    "next-odd": (
        "qwen3_next",
        {"linear_conv_kernel_dim": 3, "linear_key_head_dim": 7, "linear_value_head_dim": 33},
    ),
    "next-mlp-only": ("qwen3_next", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "lfm2": ("lfm2_moe", {}),
    "lfm2-fused": ("lfm2_moe", {"fused": True, "tie_word_embeddings": False}),
    "lfm2-bias": ("lfm2_moe", {"conv_bias": True, "conv_L_cache": 5, "use_expert_bias": False}),
    "lfm2-not-normed": ("lfm2_moe", {"norm_topk_prob": False, "num_dense_layers": 0}),
    "lfm2-attends": ("lfm2_moe", {"layer_types": ["full_attention"] * 3}),
    "kimi-linear": ("kimi_linear", {}),
    "kimi-linear-queries": ("kimi_linear", {"q_lora_rank": 18, "attention_bias": True}),
    "kimi-linear-groups": (
        "kimi_linear",
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "kimi-linear-odd": (
        "kimi_linear",
        {"linear_conv_kernel_dim": 3, "linear_head_dim": 33, "linear_num_heads": 2},
    ),
    "kimi-linear-types": (
        "kimi_linear",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "linear_conv_kernel_dim": 2},
    ),
    "kimi-linear-attends": ("kimi_linear", {"layer_types": ["full_attention"] * 3}),
    "ling": ("bailing_hybrid", {}),
    "ling-queries": ("bailing_hybrid", {"q_lora_rank": 18, "attention_bias": True}),
    "ling-without-an-end": ("bailing_hybrid", {"kda_safe_gate": False, "n_shared_experts": 2}),
    "ling-odd": (
        "bailing_hybrid",
        {
            "short_conv_kernel_size": 3,
            "head_dim": 33,
            "linear_num_heads": 2,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "ling-yarn": (
        "bailing_hybrid",
        {"rope_parameters": ROPES["yarn"] | {"rope_theta": 500.0, "mscale_all_dim": 0.7}},
    ),
    "ling-attends": ("bailing_hybrid", {"layer_types": ["full_attention"] * 3}),
    "lightning": ("minimax", {}),
    "lightning-fused": ("minimax", {"fused": True, "rms_norm_eps": 1e-3}),
    "lightning-odd": (
        "minimax",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 34},
    ),
    # Behind another first layer transformers forgets the window with what it caches.
    "lightning-window": (
        "minimax",
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "sliding_window": 9,
            "num_experts_per_tok": 3,
        },
    ),
    "lightning-gelu": ("minimax", {"hidden_act": "gelu", "tie_word_embeddings": True}),
    "lightning-factors": (
        "minimax",
        {
            "full_attn_alpha_factor": 1,
            "linear_attn_beta_factor": 1,
            "mlp_alpha_factor": 1,
            "mlp_beta_factor": 1.0,
        },
    ),
    "lightning-turns": ("minimax", {"layer_types": None, "num_hidden_layers": 4}),
    "lightning-attends": ("minimax", {"layer_types": ["full_attention"] * 3}),
    "granite-hybrid": ("granitemoehybrid", {}),
    "granite-hybrid-fused": ("granitemoehybrid", {"fused": True, "mamba_n_groups": 1}),
    "granite-hybrid-bias": (
        "granitemoehybrid",
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
    ),
    "granite-hybrid-rotates": (
        "granitemoehybrid",
        {"position_embedding_type": "rope", "mamba_d_conv": 2, "mamba_n_heads": 8},
    ),
    "granite-hybrid-attends": ("granitemoehybrid", {"layer_types": ["attention"] * 3}),
    "jamba": ("jamba", {}),
    "jamba-fused": ("jamba", {"fused": True, "tie_word_embeddings": True}),
    "jamba-untidy": (
        "jamba",
        {"hidden_size": 40, "mamba_d_state": 7, "mamba_d_conv": 3, "mamba_dt_rank": "auto"},
    ),
    "jamba-bias": (
        "jamba",
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 3},
    ),
    "jamba-all-experts": ("jamba", {"expert_layer_period": 1, "num_key_value_heads": 4}),
    "jamba-attends": ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
    "nemotron": ("nemotron_h", {}),
    "nemotron-fused": ("nemotron_h", {"fused": True, "n_group": 1, "topk_group": 1}),
    "nemotron-mlps": (
        "nemotron_h",
        {
            "layers_block_type": [
                *("full_attention", "mlp", "full_attention", "linear_attention", "moe"),
                *("linear_attention", "mlp", "linear_attention"),
            ],
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
        },
    ),
    "nemotron-attends": (
        "nemotron_h",
        {"layers_block_type": ["full_attention", "moe"] * 2, "norm_topk_prob": False},
    ),
    "nemotron-one-group": ("nemotron_h", {"n_groups": 1, "conv_kernel": 2, "mamba_head_dim": 7}),
    "nemotron-latents": ("nemotron_h", {"moe_latent_size": 18}),
    "nemotron-wide-latents": (
        "nemotron_h",
        {"moe_latent_size": 44, "mlp_bias": True, "fused": True, "num_experts_per_tok": 4},
    ),
    "nemotron-silu": ("nemotron_h", {"mlp_hidden_act": "silu", "n_groups": 6}),
    "nemotron-omni": ("nemotron_h_omni", {}),
    "nemotron-omni-fused": ("nemotron_h_omni", {"fused": True, "n_group": 1, "topk_group": 1}),
    "nemotron-omni-tied": (
        "nemotron_h_omni",
        {"tie_word_embeddings": True, "moe_latent_size": 18, "mlp_bias": True},
    ),
    "qwen35": ("qwen3_5_moe_text", {}),
    "qwen35-fused": ("qwen3_5_moe_text", {"fused": True}),
    "qwen35-heads-tripled": ("qwen3_5_moe_text", {"linear_num_value_heads": 6}),
    "qwen35-tied": ("qwen3_5_moe_text", {"tie_word_embeddings": True}),
    "v2": ("deepseek_v2", {}),
    "v2-plain-queries": ("deepseek_v2", {"q_lora_rank": None}),
    "v2-fused": ("deepseek_v2", {"fused": True}),
    "v2-bias": ("deepseek_v2", {"attention_bias": True}),
    "v2-groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "v2-scaled": ("deepseek_v2", {"routed_scaling_factor": 2.5, "rms_norm_eps": 0.1}),
    "v2-yarn": ("deepseek_v2", {"rope_parameters": _latent_yarn(0.707, 0.707)}),
    "v3": ("deepseek_v3", {}),
    "v3-fused": ("deepseek_v3", {"fused": True}),
    "v3-plain-queries": ("deepseek_v3", {"q_lora_rank": None}),
    "v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "v3-not-normed": ("deepseek_v3", {"norm_topk_prob": False}),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3-bias": ("deepseek_v3", {"attention_bias": True, "rms_norm_eps": 0.1}),
    "v3-all-dense-but-one": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "v3-wide-values": ("deepseek_v3", {"v_head_dim": 18, "kv_lora_rank": 24}),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": _latent_yarn(1.0, 1.0)}),
    "v3-yarn-mscale": ("deepseek_v3", {"rope_parameters": _latent_yarn(0.8, 0.5)}),
    "v3-yarn-no-mscale": ("deepseek_v3", {"rope_parameters": _latent_yarn(1.0, 0.0)}),
    "axk1": ("axk1", {}),
    "axk1-fused": ("axk1", {"fused": True, "rope_interleave": False}),
    "axk1-all-sparse": ("axk1", {"mlp_layer_types": ["sparse"] * 3, "attention_bias": True}),
    "axk1-yarn": ("axk1", {"rope_parameters": _latent_yarn(1.0, 0.7), "topk_group": 1}),
    "axk2": ("axk2", {}),
    "axk2-fused": ("axk2", {"fused": True, "n_group": 3, "topk_group": 2, "attention_bias": True}),
    "axk2-few-in-groups": (
        "axk2",  # corrections below zero lose against experts of other groups
        {"num_local_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 4},
    ),
    "axk2-types": (
        "axk2",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "gated_norm_rank": 40,
            "rms_norm_eps": 0.1,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "hidden_size": 36,
        },
    ),
    "axk2-wide": (
        "axk2",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "v_head_dim": 6,
            "index_topk": 3,
        },
    ),
    "axk2-yarn": ("axk2", {"rope_parameters": _latent_yarn(1.0, 0.7), "index_topk": 300}),
    "longcat": ("longcat_flash", {}),
    "longcat-none-given-back": ("longcat_flash", {"zero_expert_num": 0, "num_hidden_layers": 2}),
    "longcat-most-given-back": ("longcat_flash", {"zero_expert_num": 20, "num_experts_per_tok": 2}),
    "longcat-bias": ("longcat_flash", {"attention_bias": True, "rms_norm_eps": 0.1}),
    "longcat-yarn": ("longcat_flash", {"rope_parameters": _latent_yarn(1.0, 0.7)}),
    "longcat-odd": (
        "longcat_flash",
        {"hidden_size": 44, "kv_lora_rank": 24, "v_head_dim": 18, "num_hidden_layers": 6},
    ),
    "v32": ("deepseek_v32", {}),
    "v32-groups": ("deepseek_v32", {"n_group": 3, "topk_group": 2, "fused": True}),
    "v32-yarn": ("deepseek_v32", {"rope_parameters": _latent_yarn(1.0, 1.0)}),
    "v32-limit": ("deepseek_v32", {"index_topk": 108, "attention_bias": True}),
    "glm-dsa": ("glm_moe_dsa", {}),
    "glm-dsa-shared": (
        "glm_moe_dsa",
        {
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "v32-all": ("deepseek_v32", {"index_topk": 300}),
    "v32-few": (
        "deepseek_v32",
        {"index_topk": 3, "index_head_dim": 8, "rms_norm_eps": 0.1},
    ),
    "v32-wide": (
        "deepseek_v32",
        {"num_attention_heads": 48, "num_key_value_heads": 48, "index_topk": 26},
    ),
    "v32-yarn-wide": (
        "deepseek_v32",
        {"index_topk": 40, "rope_parameters": _latent_yarn(1.0, 0.7)},
    ),
    "glm-dsa-once": (
        "glm_moe_dsa",
        {"index_topk": 31, "indexer_types": ["full", "shared", "full"]},
    ),
    "glm-lite": ("glm4_moe_lite", {}),
    "glm-lite-types": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "routed_scaling_factor": 1.8},
    ),
    "ernie": ("ernie4_5_moe", {}),
    "ernie-fused": ("ernie4_5_moe", {"fused": True}),
    "ernie-bias": ("ernie4_5_moe", {"use_bias": True, "moe_norm_min": 1e-12}),
    "ernie-no-shared": ("ernie4_5_moe", {"moe_num_shared_experts": 0, "head_dim": 10}),
    "ernie-layers": (
        "ernie4_5_moe",
        {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 3},
    ),
    "ernie-tied": ("ernie4_5_moe", {"tie_word_embeddings": True}),
    "hunyuan": ("hunyuan_v1_moe", {}),
    "hunyuan-fused": ("hunyuan_v1_moe", {"fused": True}),
    "hunyuan-bias": ("hunyuan_v1_moe", {"attention_bias": True, "num_key_value_heads": None}),
    "hunyuan-by-layer": ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2]}),
    "hunyuan-alpha": (
        "hunyuan_v1_moe",
        {
            "rope_parameters": {
                "rope_theta": 5000.0,
                "rope_type": "dynamic",
                "factor": 1.0,
                "alpha": 30.0,
            }
        },
    ),
    "hunyuan-dynamic": (
        "hunyuan_v1_moe",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_theta": 5000.0, "rope_type": "dynamic", "factor": 3.0},
        },
    ),
    "hunyuan-tied": ("hunyuan_v1_moe", {"tie_word_embeddings": True}),
    "hy3": ("hy_v3", {}),
    "hy3-fused": ("hy_v3", {"fused": True}),
    "hy3-bias": ("hy_v3", {"attention_bias": True, "mlp_bias": True}),
    "hy3-types": ("hy_v3", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "dots": ("dots1", {}),
    "dots-fused": ("dots1", {"fused": True, "n_group": 1, "topk_group": 1}),
    "dots-dense": ("dots1", {"first_k_dense_replace": 1, "attention_bias": True}),
    "dots-window": (
        "dots1",
        {"sliding_window": 9, "max_window_layers": 1, "routed_scaling_factor": 2.5},
    ),
    "solar": ("solar_open", {}),
    "solar-fused": ("solar_open", {"fused": True, "attention_bias": True}),
    "solar-groups": ("solar_open", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "sarvam-moe": ("sarvam_moe", {}),
    "sarvam-moe-fused": ("sarvam_moe", {"fused": True, "first_k_dense_replace": 2}),
    "sarvam-moe-plain": (
        "sarvam_moe",
        {"attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 0.4},
    ),
    "sarvam-mla": ("sarvam_mla", {}),
    "sarvam-mla-fused": ("sarvam_mla", {"fused": True, "n_group": 3, "topk_group": 2}),
    "sarvam-mla-plain": (
        "sarvam_mla",
        {"q_lora_rank": 18, "attention_bias": True, "rope_parameters": {"rope_theta": 700.0}},
    ),
    "gemma": ("gemma4_text", {}),
    "gemma-shards": ("gemma4_text", {"max_shard_size": "40KB"}),
    "gemma-bias": ("gemma4_text", {"attention_bias": True, "final_logit_softcapping": None}),
    "gemma-keys-apart": (
        "gemma4_text",
        {"attention_k_eq_v": False, "num_global_key_value_heads": None, "global_head_dim": 8},
    ),
    "gemma-all-global": ("gemma4_text", {"layer_types": ["full_attention"] * 3}),
    "gemma-usual-types": ("gemma4_text", {"layer_types": None, "num_hidden_layers": 7}),
    "gemma-own-head": ("gemma4_text", {"tie_word_embeddings": False, "top_k_experts": 1}),
    "gemma-rope": (
        "gemma4_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 700.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 5000.0,
                },
            }
        },
    ),
    "llama4": ("llama4_text", {}),
    "llama4-all-moe": ("llama4_text", {"interleave_moe_layer_step": 1, "use_qk_norm": False}),
    "llama4-layers": (
        "llama4_text",
        {"moe_layers": [0, 3], "no_rope_layers": [0, 1, 1, 0], "attention_bias": True},
    ),
    "llama4-types": (
        "llama4_text",
        {"layer_types": ["full_attention", "chunked_attention"] * 2, "attention_chunk_size": 5},
    ),
    "llama4-even-temperature": ("llama4_text", {"attn_temperature_tuning": False}),
    "llama4-top-3": ("llama4_text", {"num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "llama4-llama3": ("llama4_text", {"rope_parameters": {"rope_theta": 5e3, **ROPES["llama3"]}}),
    "afmoe": ("afmoe", {}),
    "afmoe-heads": ("afmoe", {"hidden_size": 44, "num_attention_heads": 6}),
    "afmoe-bias": ("afmoe", {"attention_bias": True}),
    "afmoe-fused": ("afmoe", {"fused": True, "num_dense_layers": 0, "mup_enabled": False}),
    "afmoe-slides": ("afmoe", {"layer_types": ["sliding_attention"] * 3, "num_dense_layers": 2}),
    "mellum": ("mellum", {}),
    "mellum-fused": ("mellum", {"fused": True, "norm_topk_prob": False, "attention_bias": True}),
    "mellum-full": (
        "mellum",
        {"layer_types": None, "mlp_layer_types": ["sparse", "dense"] * 2, "num_hidden_layers": 4},
    ),
    "mellum-slides": (
        "mellum",
        {
            "layer_types": ["sliding_attention"] * 3,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 5000.0, **ROPES["linear"]},
                "full_attention": {"rope_theta": 5000.0, **ROPES["yarn"]},
            },
        },
    ),
    "mimo": ("mimo_v2_flash", {}),
    "mimo-fused": ("mimo_v2_flash", {"fused": True, "attention_value_scale": None}),
    "mimo-slides": ("mimo_v2_flash", {"layer_types": ["sliding_attention"] * 4, "v_head_dim": 20}),
    "mimo-full": (
        "mimo_v2_flash",
        {
            "layer_types": ["full_attention"] * 4,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "mimo-usual": ("mimo_v2_flash", {"layer_types": None, "num_hidden_layers": 7}),
    "step": ("step3p7", {}),
    "step-fused": ("step3p7", {"fused": True}),
    "step-bias": ("step3p7", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "step-slides": (
        "step3p7",
        {
            "layer_types": ["sliding_attention"] * 4,
        },
    ),
    "step-full": (
        "step3p7",
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "moe_layers_enum": "0, 2,3",
            "num_sliding_attention_heads": None,
            "rope_parameters": None,
            "query_pre_attn_scalar": None,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
        },
    ),
    "step-llama3": (
        "step3p7",
        {
            "partial_rotary_factors": [0.6, 1.0] * 2,
            "rope_parameters": None,
            "rope_scaling": ROPES["llama3"],
            "rope_theta": [300.0, 20.0] * 2,
        },
    ),
    "v4": ("deepseek_v4", {}),
    "v4-usual": (
        "deepseek_v4",
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "num_hidden_layers": 6,
            "compress_rates": None,
            "hc_sinkhorn_iters": 1,
            "tie_word_embeddings": True,
        },
    ),
    "v4-slides": (
        "deepseek_v4",
        {
            "layer_types": ["sliding_attention"] * 5,
            "mlp_layer_types": ["moe"] * 5,
            "hc_mult": 1,
            "o_groups": 4,
            "num_experts_per_tok": 3,
        },
    ),
    "v4-all": ("deepseek_v4", {"index_topk": 60}),
    "v4-few": ("deepseek_v4", {"index_topk": 2, "index_head_dim": 8, "rms_norm_eps": 0.1}),
    "v4-limit": (
        "deepseek_v4",
        {
            "index_topk": 21,
            "compress_rates": {
                "compressed_sparse_attention": 5,
                "heavily_compressed_attention": 16,
            },
            "sliding_window": 4,
            "hidden_size": 30,
        },
    ),
    "v4-heavy": (
        "deepseek_v4",
        {
            "layer_types": ["heavily_compressed_attention"] * 5,
            "rope_parameters": {
                **ROPES["yarn"],
                "rope_theta": 300.0,
            },
            "mlp_layer_types": ["hash_moe"] * 4 + ["moe"],
        },
    ),
    "hy4": ("hy_v4", {}),
    "hy4-fused": ("hy_v4", {"fused": True, "attention_bias": True, "n_shared_experts": 2}),
    "hy4-groups": (
        "hy_v4",
        {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "hy4-all-sparse": (
        "hy_v4",
        {"mlp_layer_types": ["sparse"] * 4, "indexer_types": ["full"] * 4, "hc_mult": 1},
    ),
    "hy4-dense": (
        "hy_v4",
        {
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "rms_norm_eps": 0.1,
            "swiglu_limit": 0.1,
            "v_head_dim": 8,
            "hidden_size": 30,
        },
    ),
    "hy4-yarn": ("hy_v4", {"rope_parameters": _latent_yarn(1.0, 0.7)}),
    "hy4-vl": ("hy_v4_vl", {}),
    "hy4-vl-fused": (
        "hy_v4_vl",
        {
            "fused": True,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "index_topk": 31,  # of 30 the last two have scores of zero somewhere
        },
    ),
    "hy4-limit": ("hy_v4", {"index_topk": 108, "hc_mult": 4, "num_experts_per_tok": 5}),
    "ernie-vl": ("ernie4_5_vl_moe", {}),
    "ernie-vl-bias": (
        "ernie4_5_vl_moe",
        {
            "moe_num_shared_experts": 0,
            "use_bias": True,
            "tie_word_embeddings": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "moe_norm_min": 0.4,
            "num_key_value_heads": 1,
        },
    ),
    "glm5-next": ("glm5_next", {}),
    "glm5-next-groups": (
        "glm5_next",
        {
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "n_shared_experts": 2,
            "index_topk": 32,
            "index_kpool": 2,
        },
    ),
    "glm5-next-shared": (
        "glm5_next",
        {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "full", "full", "shared"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "layer_types": ["indexed_attention", "linear_attention", *2 * ["indexed_attention"]],
            "rms_norm_eps": 0.1,
            "linear_lower_bound": None,
            "index_topk": 28,
            "index_kpool": 14,
            "v_head_dim": 9,
        },
    ),
    "glm5-next-limit": ("glm5_next", {"index_topk": 96, "index_kpool": 32, "hc_mult": 2}),
    "glm5-next-attends": (
        "glm5_next",
        {"layer_types": ["full_attention"] * 3, "num_experts_per_tok": 5},
    ),
    "laguna": ("laguna", {}),
    "laguna-fused": ("laguna", {"fused": True, "moe_router_logit_softcapping": 0.0}),
    "laguna-elements": ("laguna", {"gating": "per-element", "attention_bias": True}),
    "laguna-slides": (
        "laguna",
        {
            "layer_types": ["sliding_attention"] * 4,
            "num_attention_heads_per_layer": [6] * 4,
            "gating": "per-head",
            "num_key_value_heads": 1,
        },
    ),
    "laguna-full": (
        "laguna",
        {
            "layer_types": None,
            "num_attention_heads_per_layer": None,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "rope_parameters": {
                "full_attention": {
                    **ROPES["yarn"],
                    "rope_theta": 300.0,
                    "partial_rotary_factor": 0.6,
                    "attention_factor": 1.2,
                }
            },
        },
    ),
    "cohere": ("cohere2_moe", {}),
    "cohere-heads": ("cohere2_moe", {"hidden_size": 44, "num_attention_heads": 6}),
    "cohere-fused": (
        "cohere2_moe",
        {"fused": True, "rms_norm_eps": 1e-3, "shared_expert_combination_strategy": "sum"},
    ),
    "cohere-sigmoid": (
        "cohere2_moe",
        {
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 0,
            "attention_bias": True,
            "num_key_value_heads": None,
            "tie_word_embeddings": False,
        },
    ),
    "cohere-not-normed": (
        "cohere2_moe",
        {
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "prefix_dense_intermediate_size": None,
        },
    ),
    "cohere-usual": (
        "cohere2_moe",
        {
            "layer_types": None,
            "num_hidden_layers": 7,
            "first_k_dense_replace": 3,
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window_pattern": 3,
            "rope_parameters": {"rope_theta": 300.0, **ROPES["linear"]},
        },
    ),
    "cohere-slides": (
        "cohere2_moe",
        {"layer_types": ["sliding_attention"] * 4, "first_k_dense_replace": 0},
    ),
    "mistral4": ("mistral3", {}),
    "mistral4-fused": ("mistral3", {"fused": True, "rope_interleave": False, "q_lora_rank": None}),
    "mistral4-groups": (
        "mistral3",
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "num_experts_per_tok": 3},
    ),
    "mistral4-biases": ("mistral3", {"attention_bias": True, "first_k_dense_replace": 0}),
    "mistral-large4": ("mistral_large4", {}),
    "mistral-large4-fused": ("mistral_large4", {"fused": True, "attention_bias": True}),
    "mistral-large4-shared": (
        "mistral_large4",
        {
            "indexer_types": ["full", "shared", "shared", "full"],
            "no_rope_layers": [1, 0, 0, 1],  # equal tokens are equal keys to a first one without
            "n_group": 3,
            "topk_group": 2,
            "index_topk": 29,
        },
    ),
    "mistral-large4-rotates": (
        "mistral_large4",
        {
            "no_rope_layers": [1] * 4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "n_shared_experts": 2,
            "rope_parameters": _latent_yarn(1.0, 0.7),
        },
    ),
    "mistral-large4-all": (
        "mistral_large4",
        {
            "no_rope_layers": None,
            "num_hidden_layers": 5,
            "index_topk": 300,
            "rms_norm_eps": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-large4-few": (
        "mistral_large4",
        {"index_topk": 3, "index_head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "dots3": ("dots3_note", {}),
    "dots3-fused": ("dots3_note", {"fused": True, "attention_bias": True}),
    "dots3-text": ("dots3_note_text", {"tie_word_embeddings": True}),
    "dots3-text-fused": ("dots3_note_text", {"fused": True, "moe_layer_freq": [1, 0, 1, 1]}),
    "dots3-ungrouped": (
        "dots3_note_text",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "index_topk": 3},
    ),
    "dots3-slides-most": (
        "dots3_note",
        {
            "num_hidden_layers": 6,
            "layer_types": None,
            "sliding_window": 2,
            "first_k_dense_replace": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        },
    ),
    "dots3-slides": ("dots3_note_text", {"layer_types": ["sliding_attention"] * 4}),
    "dots3-whole": ("dots3_note_text", {"use_dsa": False, "rms_norm_eps": 0.1}),
    "dots3-chooses": (
        "dots3_note_text",
        {"use_sliding_window": False, "layer_types": None, "n_shared_experts": 1},
    ),
    "kimi-k2.5": ("kimi_k25", {}),
    "kimi-k2.5-fused": ("kimi_k25", {"fused": True, "rope_interleave": False}),
    "kimi-k2.5-ungrouped": ("kimi_k25", {"n_group": 1, "topk_group": 1}),
    "internvl": ("internvl", {}),
    "internvl-fused": ("internvl", {"fused": True, "attention_bias": True, "mlp_only_layers": [1]}),
    "internvl-slides": (
        "internvl",
        {"use_sliding_window": True, "sliding_window": 9, "norm_topk_prob": True},
    ),
    "dots3-yarn": ("dots3_note_text", {"rope_scaling": _latent_yarn(1.0, 0.7)}),
    "muse-spark": ("muse_spark", {}),
    "muse-spark-fused": ("muse_spark", {"fused": True, "attention_bias": True}),
    "muse-spark-sparse": (
        "muse_spark",
        {
            "mlp_layer_types": None,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "layer_rope_theta": [300.0, 0, 0, 300.0],
            "hidden_act": "gelu",
        },
    ),
    "muse-spark-wide": (
        "muse_spark",
        {
            "moe_hidden_size": 46,  # more than hidden states have
            "num_experts_per_tok": 5,
            "num_attention_heads": 8,
            "residual_gate_temperature": 0.1,  # some shares are nearly one
            "rms_norm_eps": 0.1,
        },
    ),
    "muse-spark-yarn": ("muse_spark", {"rope_parameters": {"rope_theta": 300.0, **ROPES["yarn"]}}),
    "beam": ("beam", {}),
    "beam-fused": ("beam", {"fused": True, "attention_bias": True}),
    "beam-ungrouped": (
        "beam",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "mlp_layer_types": None},
    ),
    "beam-whole": (
        "beam",
        {
            "layer_types": ["full_attention"] * 4,
            "final_logit_softcapping": None,
            "rms_norm_eps": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "beam-rotates": (
        "beam",
        {
            "num_hidden_layers": 7,
            "layer_types": None,
            "mlp_layer_types": None,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "full_attention": {"rope_theta": 700.0, **ROPES["yarn"]},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
    ),
    "beam-slides-without-positions": (
        "beam",
        {
            "sliding_window": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 20.0},
                "sliding_attention": None,
            },
        },
    ),
    "exaone": ("exaone_moe", {}),
    "exaone-fused": ("exaone_moe", {"fused": True, "first_k_dense_replace": 0}),
    "exaone-shared": ("exaone_moe", {"num_shared_experts": 2, "num_experts": 8, "n_group": 4}),
    "exaone-types": (
        "exaone_moe",
        {
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "granite": ("granitemoe", {}),
    "granite-bias": ("granitemoe", {"attention_bias": True, "num_key_value_heads": None}),
    "granite-top-5": ("granitemoe", {"num_experts_per_tok": 5, "head_dim": 10}),
    "granite-tied": ("granitemoe", {"tie_word_embeddings": True}),
    "granite-shared": ("granitemoeshared", {}),
    "granite-shared-fused": ("granitemoeshared", {"fused": True}),
    "kolibri": ("kolibri1", {}),
    "kolibri-fused": ("kolibri1", {"fused": True, "norm_topk_prob": True}),
    "kolibri-slides": ("kolibri1", {"layer_types": ["sliding_attention"] * 3}),
    "flint": ("flint", {}),
    "flint-fused": ("flint", {"fused": True, "attention_bias": True}),
    "flint-not-normed": ("flint", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "lara": ("lara_mini", {}),
    "lara-heads": ("lara_mini", {"hidden_size": 44, "num_attention_heads": 6}),
    "lara-fused": ("lara_mini", {"fused": True, "attention_bias": True}),
    "lara-tied": ("lara_mini", {"tie_word_embeddings": True, "norm_topk_prob": False}),
    "lara-slides": (
        "lara_mini",
        {"layer_types": ["linear_attention", *["sliding_attention"] * 3]},
    ),
    "aria": ("aria_text", {}),
    "aria-fused": ("aria_text", {"fused": True, "attention_bias": True, "mlp_bias": True}),
    "omni": ("qwen3_omni_moe_thinker", {}),
    "omni-fused": ("qwen3_omni_moe_thinker", {"fused": True, "attention_bias": True}),
    "omni-not-normed": ("qwen3_omni_moe_thinker", {"norm_topk_prob": False, "head_dim": 10}),
    "granite-swash": ("granitemoe_swa", {}),
    "granite-swash-fused": ("granitemoe_swa", {"fused": True, "attention_bias": True}),
    "granite-swash-bases": (
        "granitemoe_swa",
        {"layer_rope_theta": [300.0, 20, 20], "shared_intermediate_size": 20, "head_dim": 10},
    ),
    "granite-swash-one-base": (
        "granitemoe_swa",
        {"layer_rope_theta": None, "rope_parameters": ROPES["yarn"] | {"rope_theta": 700.0}},
    ),
    "granite-swash-without": ("granitemoe_swa", {"layer_rope_theta": [0.0] * 3}),
    "granite-swash-slides": (
        "granitemoe_swa",
        {"layer_types": ["sliding_attention"] * 3, "layer_rope_theta": [50] * 3},
    ),
    "granite-shared-none": ("granitemoeshared", {"shared_intermediate_size": 0}),
    "granite-yarn": (
        "granitemoe",
        {"head_dim": 8, "rope_parameters": {"rope_theta": 5000.0, **ROPES["yarn"]}},
    ),
    **_rope_cases(),
}
PLAIN = {family: case for case, (family, _) in reversed(CASES.items())}.values()
"""Of each family, the case without options."""
