"""Tiny real checkpoints, written by transformers: all families, all options, under a second each.

The weights are random but large, so that greedy texts do not collapse into one token, routing is
uneven and the two best logits rarely lie close together.
"""

import json
import warnings
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUPED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "minimax_m2", "gpt_oss")
"""Those in which every layer caches keys and values of heads."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
RECURRENT = ("qwen3_next", "qwen3_5_moe_text")
ON_GPU_ALONE = (
    *RECURRENT,
    *("deepseek_v4", "deepseek_v32", "hy_v4", "hy_v4_vl", "minimax_m3_vl"),
    *("axk2", "mistral_large4", "glm5_next", "dots3_note", "nemotron_h_omni"),
)
"""Some of those that some policies do not suit: a CPU beside a GPU does not attend in their layers,
which recur, make entries of tokens or choose among these."""
FAMILIES = (*GROUPED, *LATENT, *RECURRENT)
CACHED_APART = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next")
"""One of each kind: keys and values of all tokens, of a window, latents, and states."""
ENCODERS = ("switch_transformers",)

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_INDEXED = {
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "index_n_heads": 8,
    "index_topk": 30,
    "index_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "intermediate_size": 56,
    "num_key_value_heads": 4,
    "n_routed_experts": 12,
    "first_k_dense_replace": 1,
    "q_lora_rank": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_HY4 = (
    _LATENT
    | _INDEXED
    | {
        "num_hidden_layers": 4,
        "v_head_dim": 18,
        "hc_mult": 3,
        "hc_magnitude": 1.3,
        "hc_eps": 0.03,
        "swiglu_limit": 0.8,
        "routed_scaling_factor": 1.7,
    }
)
_SHARED = {"intermediate_size": 56, "moe_intermediate_size": 20, "head_dim": 10}
_GRANITE = {
    "intermediate_size": 28,
    "num_local_experts": 7,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.3,
}
_BY_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 6},
    "qwen2_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
    },
    "qwen3_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "head_dim": 16,
    },
    "olmoe": {"intermediate_size": 24, "num_experts": 8},
    "flex_olmo": {"intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 5},
    "glm4_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.5,
    },
    "glm4v_moe_text": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 2, 1],
        },
    },
    "minimax_m2": {
        "intermediate_size": 24,
        "num_local_experts": 8,
        "head_dim": 12,
        "rotary_dim": 6,
    },
    "minimax_m3_vl_text": {
        "intermediate_size": 20,
        "dense_intermediate_size": 44,
        "shared_intermediate_size": 28,
        "num_hidden_layers": 4,
        "num_local_experts": 7,
        "head_dim": 10,
        "rotary_dim": 6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.6,
        },
        "routed_scaling_factor": 1.7,
        "swiglu_limit": 1.5,
        "swiglu_alpha": 1.3,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "index_n_heads": 2,
        "index_head_dim": 12,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_local_experts": 6,
        "head_dim": 16,
        "sliding_window": 9,
        "swiglu_limit": 1.5,
        "swiglu_alpha": 1.3,
    },
    "gemma4_text": {
        "hidden_size": 40,
        "intermediate_size": 44,
        "moe_intermediate_size": 20,
        "num_experts": 7,
        "top_k_experts": 3,
        "enable_moe_block": True,
        "head_dim": 12,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 6.0,
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "intermediate_size_mlp": 44,
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "head_dim": 12,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "floor_scale": 8,
    },
    "dbrx": {
        "d_model": 32,  # which experts alone look at
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 5000.0},
        "ffn_config": {"ffn_hidden_size": 23, "moe_num_experts": 6, "moe_top_k": 2},
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    },
    "phimoe": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.05,
    },
    "qwen3_next": _DELTA | {"intermediate_size": 56},
    "qwen3_5_moe_text": _DELTA,
    "deepseek_v2": _LATENT
    | {"n_shared_experts": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 3},
    "deepseek_v3": _LATENT
    | {"n_shared_experts": 1, "moe_intermediate_size": 24, "n_group": 3, "topk_group": 2},
    "axk1": _LATENT
    | {
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "n_group": 3,
        "topk_group": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "deepseek_v32": _LATENT | _INDEXED,
    "glm_moe_dsa": _LATENT | _INDEXED,
    "mistral_large4_text": {key: _LATENT[key] for key in _LATENT if key != "q_lora_rank"}
    | _INDEXED
    | {
        "num_hidden_layers": 4,
        "index_topk": 33,
        "v_head_dim": 14,
        "routed_scaling_factor": 1.4,
        "final_logit_softcapping": 6.0,
        "no_rope_layers": [1, 0, 1, 0],
    },
    "dots3_note_text": _LATENT
    | _INDEXED
    | {
        "num_hidden_layers": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "shared_experts_intermediate_size": 28,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "sliding_window": 9,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "rope_theta": 700.0,
        "swa_rope_theta": 20.0,
        "head_dim": 18,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 6,
        "swa_q_lora_rank": 14,
        "swa_kv_lora_rank": 26,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 4,
        "swa_v_head_dim": 7,
    },
    "axk2": _LATENT
    | _INDEXED
    | {
        "index_topk": 37,
        "v_head_dim": 14,
        "gated_norm_rank": 7,
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": 1.7,
    },
    "ernie4_5_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 20,
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_norm_min": 0.6,
        "tie_word_embeddings": False,
    },
    "dots1": _SHARED | {"n_routed_experts": 7, "n_shared_experts": 2, "norm_topk_prob": True},
    "qwen3_omni_moe_text": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts": 7,
        "mlp_only_layers": [0],
        "rope_parameters": {"rope_theta": 5000.0, "mrope_section": [2, 1, 1]},
    },
    "qwen3_vl_moe_text": _SHARED
    | {
        "num_experts": 7,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_theta": 5000.0, "mrope_section": [2, 2, 1]},
    },
    "afmoe": _SHARED
    | {
        "num_experts": 7,
        "num_shared_experts": 2,
        "route_scale": 1.4,
        "sliding_window": 9,
        "global_attn_every_n_layers": 3,
        "mup_enabled": True,
    },
    "beam": _SHARED
    | {
        "num_hidden_layers": 4,
        "num_experts": 12,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 0.01,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "final_logit_softcapping": 6.0,
    },
    "mellum": _SHARED
    | {
        "num_experts": 7,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "mistral4": _LATENT
    | {
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.9,
        },
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 56,
        "moe_intermediate_size": 20,
        "n_routed_experts": 7,
        "head_dim": 14,
        "v_head_dim": 9,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.6,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 20.0,
                "partial_rotary_factor": 0.3,
            },
        },
    },
    "exaone_moe": _SHARED | {"num_experts": 7, "sliding_window": 9, "sliding_window_pattern": 2},
    "sarvam_moe": _SHARED
    | {
        "n_routed_experts": 7,
        "n_shared_experts": 2,
        "attention_bias": True,
        "rope_parameters": {"rope_theta": 700.0},
    },
    "longcat_flash": {
        **{key: _LATENT[key] for key in _LATENT if key != "intermediate_size"},
        "num_hidden_layers": 4,
        "ffn_hidden_size": 56,
        "expert_ffn_hidden_size": 20,
        "n_routed_experts": 7,
        "zero_expert_num": 4,
        "num_experts_per_tok": 3,
        "head_dim": 8,
        "routed_scaling_factor": 1.7,
        "rope_parameters": {"rope_theta": 700.0},
    },
    "sarvam_mla": _LATENT
    | {
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "q_lora_rank": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "solar_open": {
        "moe_intermediate_size": 20,
        "n_routed_experts": 7,
        "head_dim": 10,
        "routed_scaling_factor": 1.5,
    },
    "hy_v3": _SHARED | {"num_experts": 7, "num_shared_experts": 2},
    "hunyuan_v1_moe": {"intermediate_size": 28, "num_experts": 7, "moe_topk": 3, "head_dim": 10},
    "lfm2_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts": 7,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.4,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "kimi_linear": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "linear_num_heads": 3,
        "linear_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "bailing_hybrid": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "head_dim": 12,
        "linear_num_heads": 3,
        "kda_lower_bound": -3.5,
        "rope_theta": 500.0,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "minimax": {
        "intermediate_size": 28,
        "num_local_experts": 7,
        "head_dim": 10,
        "block_size": 7,
        "full_attn_alpha_factor": 1.7,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 0.6,
        "linear_attn_beta_factor": 1.4,
        "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 0.9,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granitemoehybrid": _GRANITE
    | {
        "shared_intermediate_size": 20,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
    },
    "jamba": {
        "intermediate_size": 28,
        "num_experts": 7,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 12,
        "mamba_dt_rank": 5,
    },
    "nemotron_h": {
        "layers_block_type": [
            *("linear_attention", "moe"),
            "linear_attention",
            *("full_attention", "moe"),
        ],
        "head_dim": 10,
        "mamba_num_heads": 6,
        "mamba_head_dim": 5,
        "n_groups": 2,
        "ssm_state_size": 12,
        # transformers stretches steps of prompts to it, but not those of answers.
        "time_step_min": 1e-30,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 28,
        "moe_shared_expert_intermediate_size": 44,
        "intermediate_size": 36,
        "routed_scaling_factor": 1.4,
    },
    "step3p5": {
        "num_hidden_layers": 4,
        "num_sliding_attention_heads": 6,
        "intermediate_size": 56,
        "moe_intermediate_size": 20,
        "share_expert_dim": 28,
        "n_routed_experts": 7,
        "head_dim": 10,
        "query_pre_attn_scalar": 7,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swiglu_limits": [0.0, None, 0.6, 0.9],
        "swiglu_limits_shared": [0.5, 0.8, None, 0.4],
        "moe_router_scaling_factor": 1.7,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "deepseek_v4": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 20,
        "n_routed_experts": 7,
        "head_dim": 20,
        "partial_rotary_factor": 0.4,
        "q_lora_rank": 18,
        "o_groups": 2,
        "o_lora_rank": 14,
        "index_n_heads": 8,
        "index_head_dim": 12,
        "index_topk": 9,
        "sliding_window": 9,
        "compress_rates": {
            "compressed_sparse_attention": 3,
            "heavily_compressed_attention": 7,
        },
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe", "moe"],
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "swiglu_limit": 0.8,
        "rope_theta": 20.0,
        "compress_rope_theta": 300.0,
    },
    "ernie4_5_vl_moe_text": {
        "intermediate_size": 56,
        "moe_num_experts": 7,
        "moe_k": 2,
        "moe_intermediate_size": [20, 12],
        "moe_num_shared_experts": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "hy_v4": _HY4,
    "glm5_next_text": {key: _LATENT[key] for key in _LATENT if not key.startswith(("first", "qk"))}
    | _INDEXED
    | {
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 0,
        "index_kpool": 6,
        "linear_num_heads": 3,
        "linear_head_dim": 7,
        "linear_conv_kernel_dim": 3,
        "linear_lower_bound": -0.7,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "swiglu_limit": 0.8,
        "routed_scaling_factor": 1.7,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    },
    "hy_v4_vl_text": _HY4
    | {
        "rms_norm_eps": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "mrope_section": [2, 1, 1],
        },
    },
    "laguna": {
        "num_hidden_layers": 4,
        "num_attention_heads_per_layer": [4, 6, 4, 6],
        "intermediate_size": 56,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 7,
        "head_dim": 10,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "moe_routed_scaling_factor": 1.7,
        "moe_router_logit_softcapping": 0.9,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "cohere2_moe": {
        "num_hidden_layers": 4,
        "intermediate_size": 20,
        "prefix_dense_intermediate_size": 44,
        "num_experts": 7,
        "num_shared_experts": 2,
        "head_dim": 10,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "first_k_dense_replace": 1,
        "logit_scale": 0.7,
    },
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE | {"shared_intermediate_size": 20},
    "lara_mini": _DELTA
    | {
        "sliding_window": 9,
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "layer_types": [
            *("linear_attention", "sliding_attention", "full_attention", "linear_attention"),
        ],
    },
    "aria_text": {
        "intermediate_size": 20,
        "moe_num_experts": 7,
        "moe_topk": 3,
        "moe_num_shared_experts": 2,
    },
    "kolibri1": {
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 7,
        "head_dim": 10,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "flint": {
        "intermediate_size": 56,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 7,
        "head_dim": 10,
        "sliding_window": 9,
        "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "granitemoe_swa": _GRANITE
    | {
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [0, 50.0, 50.0],
    },
    "muse_spark_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 44,
        "moe_intermediate_size": 20,
        "moe_hidden_size": 24,
        "num_local_experts": 7,
        "head_dim": 10,
        "sliding_window": 9,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "qk_scale_factor": 1.7,
        "output_multiplier": 0.7,
        "routed_scaling_factor": 1.4,
        "post_norm_eps": 1e-3,
        "final_logit_softcapping": 8.0,
    },
    "switch_transformers": {
        "vocab_size": 320,
        "d_model": 30,
        "d_kv": 7,
        "d_ff": 26,
        "num_layers": 5,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "num_experts": 6,
        "expert_capacity": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "decoder_start_token_id": 3,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 20,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "glm4_moe_lite": _LATENT | {"n_shared_experts": 1, "moe_intermediate_size": 24},
}
_TEXT_OF = {
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "glm4v_moe": "glm4v_moe_text",
    "hy_v4_vl": "hy_v4_vl_text",
    "glm5_next": "glm5_next_text",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral4",
    "kimi_k25": "deepseek_v3",
    "internvl": "qwen3_moe",
    "mistral_large4": "mistral_large4_text",
    "dots3_note": "dots3_note_text",
    "step3p7": "step3p5",
    "nemotron_h_omni": "nemotron_h",
    "muse_spark": "muse_spark_text",
}
"""Families that see images beside text, and those of their text models."""
_MINIMAX = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PIXTRAL = {"model_type": "pixtral", **_MINIMAX}
_PERCEPTION = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": _COMMON["hidden_size"],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_HEARING = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "d_model": 16,
    "output_dim": _COMMON["hidden_size"],
    "downsample_hidden_size": 8,
}
_HUNYUAN = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "max_image_size": 28,
    "out_hidden_size": _COMMON["hidden_size"],
}
_DOTS = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "adapter_out_dim": _COMMON["hidden_size"],
}
_KIMI = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_MUSE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "max_position_embeddings": 16,
}
_VISIONS = {
    "muse_spark": _MUSE,
    "dots3_note": _DOTS | {"adapter_in_dim": 16, "mlp_layer_types": ["dense"]},
    "mistral3": _PIXTRAL,
    "kimi_k25": _KIMI,
    "internvl": _MINIMAX | {"image_size": (28, 28), "patch_size": (14, 14)},
    "mistral_large4": _PIXTRAL,
    "step3p7": _PERCEPTION,
    "nemotron_h_omni": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 14,
        "max_img_size": 28,
        "num_cls_tokens": 2,
        "num_registers": 1,
        "video_temporal_patch_size": 2,
    },
    "hy_v4_vl": _HUNYUAN,
    "glm5_next": _VISION | {"projection_intermediate_size": 24},
    "minimax_m3_vl": _MINIMAX,
}
_HEARINGS = {
    "muse_spark": {
        "patch_sizes": [4],
        "hidden_sizes": [8],
        "depths": [1],
        "num_hidden_layers": 1,
        "out_hidden_size": _COMMON["hidden_size"],
    },
    "qwen3_omni_moe_thinker": _HEARING,
    "dots3_note": _DOTS | {"adapter_input_size": 16, "downsample_hidden_size": 8},
}
_STRONG = (
    *(".gate.weight", ".wg.weight", ".router.weight", ".router.proj.weight"),
    *("router.layer.weight", "lm_head.weight", "embed_tokens.weight", "wte.weight"),
    *(".embeddings.weight", "router.classifier.weight"),
)
"""Ends of the names of weights whose products are to lie far apart."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_checkpoint(
    folder: Path,
    family: str = "mixtral",
    *,
    dtype: str = "float32",
    fused: bool = False,
    max_shard_size: str = "5GB",
    seed: int = 0,
    eos: int | list[int] | None = None,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Writes a model folder and returns it.

    `fused` stacks the experts of a layer in two tensors; `eos` are the ids of end tokens in
    generation_config.json; `config` overrides entries of the family's config.
    """
    model = random_model(family, seed=seed, **config).to(getattr(torch, dtype))
    if eos is not None:
        model.generation_config.eos_token_id = eos
    with quiet():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    if fused:
        _rewrite_fused(folder, model)
    elif family == "kimi_k25":
        _rename_blocks(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def random_model(family: str = "mixtral", *, seed: int = 0, **config: Any) -> Any:
    """A float32 model in evaluation mode with deterministic, lively weights."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    sees, encodes = family in _TEXT_OF, family in ENCODERS
    settings = {} if encodes else _COMMON
    settings = {**settings, **_BY_FAMILY[_TEXT_OF.get(family, family)], **config}
    if sees:
        settings = {
            "text_config": {"model_type": _TEXT_OF[family], **settings},
            "vision_config": _VISIONS.get(family, _VISION),
        }
    if family in _HEARINGS:
        settings["audio_config"] = _HEARINGS[family]
    usual = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    with quiet():
        made = AutoConfig.for_model(family, **settings)
        auto = AutoModelForImageTextToText if sees else usual
        model = auto.from_config(made, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        learnt = ("correction", "layer_scalar", "expert_bias")
        buffers = (each for each in model.named_buffers() if any(n in each[0] for n in learnt))
        for name, weight in chain(model.named_parameters(), buffers):
            noise = torch.randn(weight.shape, generator=generator)
            usual = weight.mean() if _is_norm(name) else 0.0  # zero where norms count from one
            weight.copy_(noise * _std(name, weight) + usual)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                num_experts = model.config.n_routed_experts
                order = torch.rand(len(table), num_experts, generator=generator).argsort(dim=1)
                table.copy_(order[:, : table.shape[1]])
    return model


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with <pad>, <s> and </s> as 0, 1 and 2, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_COMMON["vocab_size"],
        special_tokens=["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_lines(), trainer)
    with quiet():
        PreTrainedTokenizerFast(
            tokenizer_object=raw,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            chat_template=_CHAT_TEMPLATE,
        ).save_pretrained(folder)


def edit_config(folder: Path, **entries: Any) -> None:
    """Changes entries of a written config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _is_norm(name: str) -> bool:
    owner = name.rpartition(".")[0].rpartition(".")[2]
    return "norm" in owner or name.endswith(("scale", "scalar"))


def _std(name: str, weight: torch.Tensor) -> float:
    if _is_norm(name):
        return 0.1
    if name.endswith(("bias", ".sinks")):
        return 0.3
    if name.endswith(_STRONG):
        return 0.6
    if name.endswith(("shared.weight", "relative_attention_bias.weight")):
        return 1.0
    return float(1.5 / weight.shape[-1] ** 0.5)


def _rewrite_fused(folder: Path, model: Any) -> None:
    """Replaces the weights by what transformers holds in memory, which is the stacked layout."""
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", False):
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _rename_blocks(folder: Path) -> None:
    """Layers of the text, which transformers 5.24 writes as those of the model that sees."""
    path = folder / "model.safetensors"
    tensors = {
        name.replace("model.blocks.", "model.layers."): each
        for name, each in load_file(path).items()
    }
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def _lines() -> list[str]:
    nouns = ("river", "lamp", "number", "city", "answer", "garden", "engine", "letter")
    verbs = ("finds", "takes", "counts", "writes", "opens", "moves")
    return [
        f"The {noun} {verb} {i} of the {other}s."
        for i, (noun, verb, other) in enumerate(
            (noun, verb, other) for noun in nouns for verb in verbs for other in nouns
        )
    ]


class quiet:
    """No progress bars, no advice and no warnings from transformers."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exception: object) -> None:
        from transformers.utils import logging

        self._warnings.__exit__(*exception)
        logging.set_verbosity(self._verbosity)
        logging.enable_progress_bar()
