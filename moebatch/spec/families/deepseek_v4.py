"""DeepSeek-V4: hidden states in several streams, attention to a window and to entries that stand
for several tokens each, and first layers whose experts are looked up by the token."""

from collections.abc import Mapping, Sequence
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import SLIDING, layer_types
from moebatch.spec.families.parts import mlps
from moebatch.spec.families.recurring import require_silu
from moebatch.spec.model.blocks import ClampedGate, Norm, Router, Streams
from moebatch.spec.model.compressed_attention import CompressedAttention, Entries
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.indexer import Indexer
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import ExpertLayout, TensorNames, separate_experts

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = (SLIDING, _SPARSE, _HEAVY)
_BY_RATIO = {0: SLIDING, 4: _SPARSE, 128: _HEAVY}
_HASHED, _CHOSEN = "hash_moe", "moe"
_USUAL_SHARE = 64 / 512


def _reworded(keys: ConfigKeys) -> dict[str, Any]:
    """Rotary parameters of layers that see a window alone, and of the others, as transformers
    writes them; what scales positions is for the others."""
    said = keys.value("rope_scaling") or keys.value("rope_parameters") or {}
    share = keys.value("partial_rotary_factor")
    part = {"partial_rotary_factor": None, "share_that_rotates": share}
    if not isinstance(said, Mapping):
        return part
    main, others = said.get("main"), said.get("compress")
    if not (isinstance(main, Mapping) and isinstance(others, Mapping)):
        own = {key: value for key, value in said.items() if key not in ("main", "compress")}
        kind = own.pop("type", own.get("rope_type", "default"))
        main = {"rope_type": "default", "rope_theta": keys.value("rope_theta")}
        others = {**own, "rope_type": kind, "rope_theta": keys.value("compress_rope_theta")}
        if kind == "yarn":
            others.setdefault("attention_factor", 1.0)
    rotary = {"main": main, "compress": others}
    return {**part, "rope_parameters": rotary, "rope_scaling": None, "rope_theta": None}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    require_silu(keys)
    types = _types(keys, num_layers)
    routed = _routing(keys, num_layers)
    rates = {kind: _rate(keys, kind) for kind in (_SPARSE, _HEAVY)}
    attentions = {kind: _attention(keys, kind, rates) for kind in _KINDS}
    clamps = (ClampedGate(limit=keys.positive("swiglu_limit")),) * num_layers
    return Layers(
        attention=attentions[types[0]],
        layer_attentions=tuple(attentions[kind] for kind in types),
        sliding_windows=(keys.count("sliding_window"),) * num_layers,
        hashed_layers=tuple(n for n, kind in enumerate(routed) if kind == _HASHED),
        **mlps(keys, num_layers, shared="moe_intermediate_size"),
        expert_clamps=clamps,
        mlp_clamps=clamps,
        router=Router(
            scores="sqrtsoftplus",
            has_correction=True,
            norm_order=1.0,
            least_norm=1e-20,
            scale=keys.positive("routed_scaling_factor"),
            has_exact_weights=True,
        ),
        norm=Norm(rounds_once=True),
        streams=Streams(
            count=keys.count("hc_mult"),
            num_balancings=keys.count("hc_sinkhorn_iters"),
            eps=keys.positive("hc_eps"),
        ),
    )


def _types(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    ratios = keys.value("compress_ratios")
    usual = [_HEAVY if n < 2 or n % 2 == 0 else _SPARSE for n in range(num_layers)]
    if keys.value("layer_types") is None and ratios is not None:
        if isinstance(ratios, list) and len(ratios) >= num_layers:
            found = [_BY_RATIO.get(ratio) for ratio in ratios[:num_layers]]
            if None not in found:
                return [kind for kind in found if kind is not None]
        keys.fault("compress_ratios", "0, 4 or 128 for each layer", ratios)
    return layer_types(keys, usual, _KINDS)


def _routing(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    num_hashed = keys.count_or_zero("num_hash_layers")
    usual = [_HASHED if layer < num_hashed else _CHOSEN for layer in range(num_layers)]
    return layer_types(keys, usual, (_HASHED, _CHOSEN), key="mlp_layer_types")


def _rate(keys: ConfigKeys, kind: str) -> int:
    """Tokens of an entry."""
    key = "compress_rate_csa" if kind == _SPARSE else "compress_rate_hca"
    said = keys.value("compress_rates")
    if isinstance(said, Mapping) and keys.value(key) is None:
        return keys.whole_number("compress_rates", said.get(kind, 4 if kind == _SPARSE else 128))
    return keys.count_or_none(key) or (4 if kind == _SPARSE else 128)


def _attention(keys: ConfigKeys, kind: str, rates: Mapping[str, int]) -> CompressedAttention:
    heads, head_dim = keys.count("num_attention_heads"), keys.count("head_dim")
    entries, longest = None, keys.count("max_position_embeddings")
    if kind != SLIDING:
        most = max(1, longest // rates[kind])
        entries = Entries(num_tokens=rates[kind], most=most, overlap=kind == _SPARSE)
    groups, rope_head_dim = keys.count("o_groups"), _rope_head_dim(keys, head_dim)
    if heads % groups:
        heads_text = keys.worded("num_attention_heads", heads)
        keys.wrong("o_groups", f"{heads_text} must be a multiple of o_groups ({groups})")
    if not 0 < rope_head_dim <= head_dim or rope_head_dim % 2:
        what = f"partial_rotary_factor of head_dim ({head_dim}) must be an even number"
        keys.wrong("partial_rotary_factor", what)
    indexer = None
    if kind == _SPARSE:
        indexer = Indexer(
            most=keys.count("index_topk"),
            num_heads=keys.count("index_n_heads"),
            head_dim=keys.count("index_head_dim"),
            rotary_dim=rope_head_dim,
        )
        if indexer.head_dim < rope_head_dim:
            expected = f"at least the {rope_head_dim} numbers that rotate"
            keys.fault("index_head_dim", expected, indexer.head_dim)
    return CompressedAttention(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        query_rank=keys.count("q_lora_rank"),
        rope_head_dim=rope_head_dim,
        output_groups=groups,
        output_rank=keys.count("o_lora_rank"),
        entries=entries,
        indexer=indexer,
        rotary="main" if kind == SLIDING else "compress",
    )


def _rope_head_dim(keys: ConfigKeys, head_dim: int) -> int:
    share = keys.value("share_that_rotates")
    if share is None:
        return keys.count_or_none("qk_rope_head_dim") or int(head_dim * _USUAL_SHARE)
    return int(head_dim * keys.positive_number("partial_rotary_factor", share))


def _named(name: str) -> tuple[str, ...]:
    """As released files have it, and as transformers writes it."""
    return f"layers.{{layer}}.{name}", f"model.layers.{{layer}}.{name}"


_ROLES = {
    "input_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_a": "attn.wq_a.weight",
    "q_a_norm": "attn.q_norm.weight",
    "q_b": "attn.wq_b.weight",
    "key": "attn.wkv.weight",
    "key_norm": "attn.norm.weight",
    "o_a": "attn.wo_a.weight",
    "o": "attn.wo_b.weight",
    "sink_scores": "attn.attn_sink",
    "entry_value": "attn.compressor.wkv.weight",
    "entry_weight": "attn.compressor.wgate.weight",
    "entry_bias": "attn.compressor.ape",
    "entry_norm": "attn.compressor.norm.weight",
    "index_q": "attn.indexer.wq_b.weight",
    "index_weights": "attn.indexer.weights_proj.weight",
    "index_entry_value": "attn.indexer.compressor.wkv.weight",
    "index_entry_weight": "attn.indexer.compressor.wgate.weight",
    "index_entry_bias": "attn.indexer.compressor.ape",
    "index_entry_norm": "attn.indexer.compressor.norm.weight",
    "router": "ffn.gate.weight",
    "router_correction": "ffn.gate.bias",
    "router_table": "ffn.gate.tid2eid",
    "shared_gate": "ffn.shared_experts.w1.weight",
    "shared_up": "ffn.shared_experts.w3.weight",
    "shared_down": "ffn.shared_experts.w2.weight",
    **{
        f"{norm}_streams{end}": f"hc_{part}_{name}"
        for norm, part in (("input_norm", "attn"), ("mlp_norm", "ffn"))
        for end, name in (("", "fn"), ("_base", "base"), ("_scale", "scale"))
    },
}
_RELEASED_EXPERTS = ExpertLayout(
    weights={
        f"layers.{{layer}}.ffn.experts.{{expert}}.{name}.weight": (role,)
        for name, role in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    }
)
DEEPSEEK_V4 = FamilySpec(
    architecture="DeepseekV4ForCausalLM",
    model_type="deepseek_v4",
    defaults={"num_hash_layers": 3},
    synonyms={"moe_intermediate_size": ()},
    computed={
        "scoring_func": ("sqrtsoftplus",),
        "n_shared_experts": (1,),
        "num_key_value_heads": (1,),
    },
    reworded=_reworded,
    layers=_layers,
    rotary_type="mixtral",
    names=TensorNames(
        roles={
            "embedding": ("embed.weight", "model.embed.weight", "model.embed_tokens.weight"),
            "head": ("head.weight", "lm_head.weight"),
            "final_norm": ("norm.weight", "model.norm.weight"),
            "final_norm_streams": ("hc_head_fn", "model.hc_head.hc_fn"),
            "final_norm_streams_base": ("hc_head_base", "model.hc_head.hc_base"),
            "final_norm_streams_scale": ("hc_head_scale", "model.hc_head.hc_scale"),
            **{role: _named(name) for role, name in _ROLES.items()},
        },
        experts=(
            _RELEASED_EXPERTS,
            separate_experts("ffn.experts.{expert}", gate="w1", up="w3", down="w2"),
        ),
    ),
)
"""Layers behind the last one, which guess further tokens ahead, are not read."""
