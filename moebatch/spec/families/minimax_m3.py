"""MiniMax-M3 (MiniMax), text alone: an indexer chooses blocks of tokens for each head of keys."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebatch.quoting import shown
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, by_mlp_types, layer_types
from moebatch.spec.families.parts import grouped_attention, mlps, sigmoid_router
from moebatch.spec.model.blocks import ClampedGate, Norm
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.indexer import BlockIndexer
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import (
    AROUND_MODEL,
    BLOCK_EXPERTS,
    IN_MODEL,
    usual_names,
)

_SPARSE = "minimax_m3_sparse"
_INDEXED = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""As transformers writes them, and as released files do in ``sparse_attention_config``, which come
first."""
_COMPUTED: Mapping[str, Sequence[object]] = {
    "n_shared_experts": (1,),
    "qk_norm_type": ("per_head",),
    "scoring_func": ("sigmoid",),
    "swiglu_beta": (1.0,),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
_COMPUTED_OF_INDEXERS: Mapping[str, Sequence[object]] = {
    "sparse_init_block": (0,),
    "sparse_score_type": ("max",),
    "use_sparse_attention": (True,),
}
"""What is computed of keys that released files have and transformers passes over."""
_OF_INDEXER = {"q": "q_proj", "k": "k_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
_BLOCKS = ("block_sparse_moe.", "mlp.")
"""Of released files, and of those that transformers holds in memory."""


def _reworded(keys: ConfigKeys) -> dict[str, Any]:
    """Kinds of layers, and sizes of indexers, as transformers writes them. Whatever activation
    files name, that of clamped gates is computed."""
    said = _said_of_indexers(keys)
    words = {key: said[released] for key, released in _INDEXED.items() if released in said}
    kinds = {
        "layer_types": (said.get("sparse_attention_freq"), (FULL, _SPARSE)),
        "mlp_layer_types": (keys.value("moe_layer_freq"), ("dense", "sparse")),
    }
    for key, (numbers, names) in kinds.items():
        if keys.value(key) is None and isinstance(numbers, list):
            words[key] = [names[bool(number)] for number in numbers]
    return {**words, "hidden_act": "silu"}


def _said_of_indexers(keys: ConfigKeys) -> Mapping[str, Any]:
    """As released files say it."""
    name = "sparse_attention_config"
    said = keys.value(name)
    if not isinstance(said, Mapping):
        return {}
    for key, computed in _COMPUTED_OF_INDEXERS.items():
        if key in said and said[key] not in computed:
            keys.fault(name, f"{shown(computed[0])} as {key}", said[key])
    return said


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    types = layer_types(keys, (FULL,) * num_layers, (FULL, _SPARSE))
    attention = grouped_attention(keys, qk_norm="head", rotates_part=True)
    _require_one_share(keys, attention.rotary_dim)
    clamp = ClampedGate(
        limit=keys.positive("swiglu_limit"), alpha=keys.positive("swiglu_alpha"), added=1.0
    )
    kinds = {FULL: attention}
    if _SPARSE in types:
        kinds[_SPARSE] = replace(attention, indexer=_indexer(keys, attention))
    return Layers(
        attention=kinds.get(_SPARSE, attention),
        layer_attentions=tuple(kinds[kind] for kind in types),
        **mlps(
            keys,
            num_layers,
            by_mlp_types(keys, num_layers, range(num_layers)),
            width="intermediate_size",
            dense="dense_intermediate_size",
            shared="shared_intermediate_size",
        ),
        expert_clamps=(clamp,) * num_layers,
        mlp_clamps=(clamp,) * num_layers,
        router=sigmoid_router(scale=keys.positive("routed_scaling_factor")),
        norm=Norm(counts_from_one=True),
    )


def _indexer(keys: ConfigKeys, attention: GroupedAttention) -> BlockIndexer:
    num_heads, head_dim = keys.count("index_n_heads"), keys.count("index_head_dim")
    if num_heads != attention.num_kv_heads:
        expected = f"{attention.num_kv_heads}, one for each head of keys"
        keys.fault("index_n_heads", expected, num_heads)
    if head_dim < attention.rotary_dim:
        expected = f"at least the {attention.rotary_dim} numbers that rotate"
        keys.fault("index_head_dim", expected, head_dim)
    num_blocks = keys.count("index_topk_blocks")
    return BlockIndexer(
        num_blocks=num_blocks,
        block_tokens=keys.count("index_block_size"),
        num_last=keys.count("index_local_blocks", num_blocks),
        num_heads=num_heads,
        head_dim=head_dim,
    )


def _require_one_share(keys: ConfigKeys, num_rotated: int) -> None:
    """transformers looks at ``partial_rotary_factor`` alone, and rotates all without."""
    said = keys.count_or_none("rotary_dim")
    if said not in (None, num_rotated):
        expected = f"{num_rotated}, as many as partial_rotary_factor has rotate"
        keys.fault("rotary_dim", expected, said)


MINIMAX_M3_TEXT = FamilySpec(
    architecture="MiniMaxM3VLForCausalLM",
    model_type="minimax_m3_vl_text",
    defaults={"rotary_dim": None},
    computed=_COMPUTED,
    reworded=_reworded,
    layers=_layers,
    rotary_type="minimax_m2",
    names=usual_names(
        {
            "router": [block + "gate.weight" for block in _BLOCKS],
            "router_correction": [
                "block_sparse_moe.e_score_correction_bias",
                "mlp.gate.e_score_correction_bias",
            ],
            **{
                f"index_{role}": [
                    f"self_attn.index_{name}.weight",
                    f"self_attn.indexer.{name}.weight",
                ]
                for role, name in _OF_INDEXER.items()
            },
            "mlp_gate_up": "mlp.gate_up_proj.weight",
            "shared_gate_up": "mlp.shared_experts.gate_up_proj.weight",
        },
        shared=[block + "shared_experts" for block in _BLOCKS],
        experts=BLOCK_EXPERTS,
        joined={f"{mlp}_gate_up": (f"{mlp}_gate", f"{mlp}_up") for mlp in ("mlp", "shared")},
    ),
)
MINIMAX_M3 = MINIMAX_M3_TEXT.beside_others(
    "MiniMaxM3SparseForConditionalGeneration",
    "minimax_m3_vl",
    names=MINIMAX_M3_TEXT.names.also_under(IN_MODEL).also_under(AROUND_MODEL),
)
"""Images and videos are not read: its vision tensors are left alone."""
