"""DeepSeek-MoE, DeepSeek-V2 and DeepSeek-V3, of which Kimi-K2 is one; GLM-4.7-Flash (Zhipu AI),
which is built as DeepSeek-V3 is, and A.X-K1 (SK Telecom), which norms what experts have made; and
two with DeepSeek Sparse Attention, DeepSeek-V3.2 and GLM-5."""

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_mlp_types
from moebatch.spec.families.parts import (
    corrected_router,
    expert_groups,
    grouped_attention,
    mlps,
    softmax_router,
)
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.indexer import Indexer
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_INDEXERS = ("full", "shared")
_MOST = 1e9
"""What scales positions is less, and can be squared."""


def _moe(keys: ConfigKeys, num_layers: int) -> Layers:
    attention = grouped_attention(keys, biases="attention_bias")
    return latent_layers(keys, num_layers, attention, softmax_router(keys))


def _v2(keys: ConfigKeys, num_layers: int) -> Layers:
    latent = latent_attention(keys, rotates_neighbours=True)
    return latent_layers(keys, num_layers, latent, _group_limited_router(keys))


def v3_layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """With latents, and experts whose choice is corrected."""
    latent = latent_attention(keys, rotates_neighbours=keys.flag("rope_interleave"))
    return latent_layers(keys, num_layers, latent, corrected_router(keys))


def _axk1(keys: ConfigKeys, num_layers: int) -> Layers:
    return replace(v3_layers(keys, num_layers), moe_norms=("mlp_out_norm",))


def _v32(keys: ConfigKeys, num_layers: int) -> Layers:
    return choosing(v3_layers(keys, num_layers), keys, ["full"] * num_layers)


def _glm_dsa(keys: ConfigKeys, num_layers: int) -> Layers:
    layers, types = v3_layers(keys, num_layers), indexer_types(keys, num_layers)
    return choosing(layers, keys, types, rotates_neighbours=True)


def choosing(
    layers: Layers, keys: ConfigKeys, types: Sequence[str | None], **indexed: Any
) -> Layers:
    """The same with latent attention whose tokens choose what they attend to, by indexers of those
    types, None in layers that have none; `indexed` are fields of an `Indexer` that no key says."""
    attention = layers.attention
    assert isinstance(attention, LatentAttention), "what is chosen is a latent"
    if attention.query_rank is None and "seen_width" not in indexed:
        keys.fault("q_lora_rank", "a number, since indexers take compressed queries", None)
    if (wide := keys.count("index_head_dim")) < attention.rope_head_dim:
        expected = f"at least qk_rope_head_dim, {attention.rope_head_dim}"
        keys.fault("index_head_dim", expected, wide)
    indexer = Indexer(
        most=keys.count("index_topk"),
        num_heads=keys.count("index_n_heads"),
        head_dim=wide,
        rotary_dim=attention.rope_head_dim,
        **indexed,
    )
    of_layers = tuple(
        each if kind is None else _chosen_by(replace(indexer, is_shared=kind == "shared"), each)
        for kind, each in zip(
            types, layers.layer_attentions or [attention] * len(types), strict=True
        )
    )
    differ = of_layers if len({*of_layers}) > 1 else ()
    first = next(each for each in of_layers if each.most_chosen is not None)
    return replace(layers, attention=first, layer_attentions=differ)


def _chosen_by(indexer: Indexer, attention: Attention) -> LatentAttention:
    """Which rotates as much as that attention does."""
    assert isinstance(attention, LatentAttention), "what is chosen is a latent"
    return replace(attention, indexer=replace(indexer, rotary_dim=attention.rope_head_dim))


def indexer_types(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    """``full`` or ``shared`` for each layer, as ``indexer_types`` says, a pattern of their first
    letters, or how many layers take the choice of one."""
    types = keys.value("indexer_types") or keys.value("index_topk_pattern")
    if types is None:
        step = max(1, keys.count_or_zero("index_topk_freq"))
        offset = keys.count_or_zero("index_skip_topk_offset")
        behind = (max(layer - offset + 1, 0) for layer in range(num_layers))
        return ["shared" if number % step else "full" for number in behind]
    if isinstance(types, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    is_known = isinstance(types, list) and all(kind in _INDEXERS for kind in types)
    if is_known and len(types) == num_layers and types[0] == "full":
        return list(map(str, types))
    expected = f"full or shared for each of the {num_layers} layers, full for the first"
    keys.fault("indexer_types", expected, types)
    return ["full"] * num_layers


def latent_attention(
    keys: ConfigKeys, *, rotates_neighbours: bool, rotates: bool = True, is_positioned: bool = True
) -> LatentAttention:
    """With latents as DeepSeek-V2 has them; positions that are not rotated have no scaling, and no
    part of a head of their own unless it `is_positioned`."""
    if is_positioned:
        # Only the part of a head that has positions is bound by the rules of head sizes.
        heads, kv_heads, rope_head_dim = keys.heads(size="qk_rope_head_dim")
    else:
        heads, kv_heads, rope_head_dim = *(2 * [keys.count("num_attention_heads")]), 0
    bias = keys.flag("attention_bias")
    head_dim = rope_head_dim + keys.count("qk_nope_head_dim")
    factor = _score_factor(keys) if rotates else 1.0
    return LatentAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        output_bias=bias,
        kv_rank=keys.count("kv_lora_rank"),
        query_rank=keys.count_or_none("q_lora_rank"),
        rope_head_dim=rope_head_dim,
        value_head_dim=keys.count("v_head_dim"),
        rotates=rotates,
        rotates_neighbours=rotates_neighbours,
        score_scale=None if factor == 1 else factor * head_dim**-0.5,
    )


def _score_factor(keys: ConfigKeys) -> float:
    """The square of YaRN's ``mscale_all_dim`` (DeepSeek-V2, section 3.1.4), as transformers has it:
    of any scaling that names one."""
    scaling = keys.rope()
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    strength, factor = scaling.get("mscale_all_dim") or 0.0, scaling.get("factor", 1.0)
    if not all(isinstance(each, int | float) and abs(each) < _MOST for each in (strength, factor)):
        expected = f"numbers below {_MOST:.0e} as factor and mscale_all_dim"
        keys.fault("rope_scaling", expected, scaling)
        return 1.0
    if kind == "default" or factor <= 1:
        return 1.0
    return float((0.1 * strength * log(factor) + 1) ** 2)


def _group_limited_router(keys: ConfigKeys) -> Router:
    """As transformers reads it, weights are not made to sum to one, whatever ``norm_topk_prob``
    says; released files have it false."""
    if keys.flag("mlp_bias"):
        keys.fault("mlp_bias", "false, since biases of experts and MLPs are not read", True)
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


def latent_layers(
    keys: ConfigKeys, num_layers: int, attention: Attention, router: Router
) -> Layers:
    """Dense ones, and then such with experts, of which all tokens share some."""
    first, step = keys.count_or_zero("first_k_dense_replace"), keys.count_or_none("moe_layer_freq")
    usual = [layer for layer in range(first, num_layers) if layer % (step or 1) == 0]
    sparse = by_mlp_types(keys, num_layers, usual)
    return Layers(
        attention=attention,
        **mlps(keys, num_layers, sparse, num_shared="n_shared_experts"),
        router=router,
    )


_NAMES = usual_names(shared=("mlp.shared_experts",))
"""Layers behind the last one, which guess further tokens ahead, are not read."""

_INDEXER_IN_GGUF = {
    "index_q": "indexer.attn_q_b.weight",
    "index_k": "indexer.attn_k.weight",
    "index_k_norm": "indexer.k_norm.weight",
    "index_k_norm_bias": "indexer.k_norm.bias",
    "index_weights": "indexer.proj.weight",
}

DEEPSEEK_MOE = FamilySpec(
    architecture="DeepseekForCausalLM",
    model_type="deepseek",
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 1407,
        "norm_topk_prob": False,
    },
    spelling={"num_experts": "n_routed_experts"},
    layers=_moe,
    names=_NAMES,
    rotary_type="llama",
)
DEEPSEEK_V2 = FamilySpec(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    layers=_v2,
    names=_NAMES,
)
DEEPSEEK_V3 = FamilySpec(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    other_types=("kimi_k2",),
    layers=v3_layers,
    names=_NAMES,
)
GLM4_MOE_LITE = FamilySpec(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    defaults={"first_k_dense_replace": 1},
    layers=v3_layers,
    names=_NAMES,
)
AXK1 = FamilySpec(
    architecture="AXK1ForCausalLM",
    model_type="axk1",
    defaults={"first_k_dense_replace": 1},
    layers=_axk1,
    names=_NAMES.with_names(
        {"mlp_out_norm": ("post_mlp_layernorm.weight", "mlp.post_mlp_layernorm.weight")},
        may_lack_correction=True,
    ),
)
"""Released files hold such norms of dense layers as well, which are not computed."""
DEEPSEEK_V32 = FamilySpec(
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    defaults={"rope_interleave": True},
    layers=_v32,
    names=_NAMES,
    rotary_type="deepseek_v3",
)
GLM_MOE_DSA = FamilySpec(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    defaults={"rope_interleave": True, "index_topk_freq": 1, "index_skip_topk_offset": 2},
    synonyms={"qk_rope_head_dim": ("head_dim",)},
    layers=_glm_dsa,
    names=replace(_NAMES, in_gguf=_INDEXER_IN_GGUF),
    rotary_type="deepseek_v3",
)
