"""DeepSeek-MoE, DeepSeek-V2 and DeepSeek-V3, of which Kimi-K2 is one: can be planned."""

from moebatch.spec.attention import Attention, LatentAttention
from moebatch.spec.config_keys import ConfigKeys
from moebatch.spec.families.family import (
    FamilySpec,
    corrected_router,
    expert_groups,
    grouped_attention,
    softmax_router,
    usual_defaults,
)
from moebatch.spec.shape import Layers, Mlp, Router


def _moe(keys: ConfigKeys, num_layers: int) -> Layers:
    bias = "attention_bias"
    attention = grouped_attention(keys, bias=bias, output_bias=bias)
    return _layers(keys, num_layers, attention, softmax_router(keys))


def _v2(keys: ConfigKeys, num_layers: int) -> Layers:
    return _layers(keys, num_layers, _latent(keys), _group_limited_router(keys))


def _v3(keys: ConfigKeys, num_layers: int) -> Layers:
    return _layers(keys, num_layers, _latent(keys), corrected_router(keys))


def _latent(keys: ConfigKeys) -> LatentAttention:
    heads, kv_heads, rope_head_dim = keys.heads()
    bias = keys.flag("attention_bias")
    return LatentAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=rope_head_dim + keys.count("qk_nope_head_dim"),
        qkv_bias=bias,
        output_bias=bias,
        kv_rank=keys.count("kv_lora_rank"),
        query_rank=keys.count_or_none("q_lora_rank"),
        rope_head_dim=rope_head_dim,
        value_head_dim=keys.count("v_head_dim"),
    )


def _group_limited_router(keys: ConfigKeys) -> Router:
    """As transformers reads it, weights are not made to sum to one, whatever ``norm_topk_prob``
    says; released files have it false."""
    methods = ("greedy", "group_limited_greedy")
    method = keys.value("topk_method")
    if method not in methods:
        keys.fault("topk_method", " or ".join(methods), method)
    return Router(
        groups=expert_groups(keys, num_scored=1) if method == methods[1] else None,
        scale=keys.positive("routed_scaling_factor"),
        has_exact_logits=True,
        has_exact_weights=True,
    )


def _layers(keys: ConfigKeys, num_layers: int, attention: Attention, router: Router) -> Layers:
    first, step = keys.count_or_zero("first_k_dense_replace"), keys.count("moe_layer_freq")
    width, num_shared = keys.count("moe_intermediate_size"), keys.count_or_zero("n_shared_experts")
    return Layers(
        attention=attention,
        moe_layers=tuple(layer for layer in range(first, num_layers) if layer % step == 0),
        expert=Mlp(width=width),
        dense=Mlp(width=keys.count("intermediate_size")),
        shared_expert=Mlp(width=num_shared * width) if num_shared else None,
        shared_expert_gate=False,
        router=router,
        sliding_windows=(None,) * num_layers,
    )


_DEFAULTS = usual_defaults(
    vocab_size=102400,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    attention_bias=False,
    moe_intermediate_size=1407,
    num_experts_per_tok=None,
    norm_topk_prob=False,
    first_k_dense_replace=0,
    moe_layer_freq=1,
)

DEEPSEEK_MOE = FamilySpec(
    architecture="DeepseekForCausalLM",
    model_type="deepseek",
    defaults=_DEFAULTS | {"num_hidden_layers": 30, "n_shared_experts": None, "num_experts": None},
    spelling={"num_experts": "n_routed_experts"},
    layers=_moe,
)
DEEPSEEK_V2 = FamilySpec(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    defaults=_DEFAULTS
    | {
        "num_hidden_layers": 32,
        "n_shared_experts": 2,
        "num_experts": 64,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "head_dim": 64,
        "v_head_dim": 128,
    },
    # Only the part of a head that has rotary positions is bound by the rules of head sizes.
    spelling={"num_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    layers=_v2,
)
DEEPSEEK_V3 = FamilySpec(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    other_types=("kimi_k2",),
    defaults=dict(DEEPSEEK_V2.defaults)
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    spelling=DEEPSEEK_V2.spelling,
    layers=_v3,
)
