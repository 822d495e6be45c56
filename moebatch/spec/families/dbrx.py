"""DBRX (Databricks): can be planned."""

from moebatch.spec.config_keys import ConfigKeys
from moebatch.spec.families.family import FamilySpec, grouped_attention, usual_defaults
from moebatch.spec.shape import Layers, Mlp, Router


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys, clips=True),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("intermediate_size")),
        router=Router(norm_order=keys.positive_or_none("moe_normalize_expert_weights")),
        sliding_windows=(None,) * num_layers,
    )


DBRX = FamilySpec(
    architecture="DbrxForCausalLM",
    model_type="dbrx",
    defaults=usual_defaults(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,  # of its layer norms; no key says so
        clip_qkv=None,
        num_experts_per_tok=1,
        num_experts=4,
        moe_normalize_expert_weights=1.0,
    ),
    spelling={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "num_key_value_heads": "attn_config.kv_n_heads",
        "clip_qkv": "attn_config.clip_qkv",
        "intermediate_size": "ffn_config.ffn_hidden_size",
        "num_experts": "ffn_config.moe_num_experts",
        "num_experts_per_tok": "ffn_config.moe_top_k",
        "moe_normalize_expert_weights": "ffn_config.moe_normalize_expert_weights",
        "hidden_act": "ffn_config.ffn_act_fn.name",
    },
    layers=_layers,
)
