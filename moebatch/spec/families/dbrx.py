"""DBRX (Databricks)."""

from moebatch.quoting import shown
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.blocks import Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import ExpertLayout, TensorNames

_LAYER = "transformer.blocks.{layer}."
_MLP = _LAYER + "ffn.experts.mlp."
_FLAT = ExpertLayout(
    weights={_MLP + "w1": ("gate",), _MLP + "v1": ("up",), _MLP + "w2": ("down",)},
    is_stacked=True,
    is_flat=True,
).across("down")
"""As released: three tensors [E x F, D]."""
_APART = ExpertLayout(
    weights={
        _MLP + "{expert}.w1.weight": ("gate",),
        _MLP + "{expert}.v1.weight": ("up",),
        _MLP + "{expert}.w2.weight": ("down",),
    }
)
"""As `moebatch pack` writes it, under names that others have used: [F, D] twice, and [D, F]."""


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    _require_one_theta(keys)
    return Layers(
        attention=grouped_attention(keys, clip_qkv=keys.positive_or_none("clip_qkv")),
        **mlps(keys, num_layers, width="intermediate_size"),
        router=Router(norm_order=keys.positive_or_none("moe_normalize_expert_weights")),
        norm=Norm(kind="layer"),
    )


def _require_one_theta(keys: ConfigKeys) -> None:
    """transformers 5 does not look into ``attn_config`` and writes what it takes for granted beside
    it."""
    released, written = keys.value("rope_theta"), keys.value("rope_parameters.rope_theta")
    if released is not None and written is not None and released != written:
        keys.wrong(
            "rope_theta",
            f"attn_config.rope_theta ({shown(released)}) and rope_parameters.rope_theta "
            f"({shown(written)}) contradict each other; leave the one that the model was trained "
            "with, released models say it in attn_config",
        )


DBRX = FamilySpec(
    architecture="DbrxForCausalLM",
    model_type="dbrx",
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 3584,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,  # of its layer norms; no key says so
        "num_experts_per_tok": 1,
        "num_experts": 4,
        "moe_normalize_expert_weights": 1.0,
    },
    spelling={
        "num_key_value_heads": "attn_config.kv_n_heads",
        "clip_qkv": "attn_config.clip_qkv",
        "rope_theta": "attn_config.rope_theta",
        "intermediate_size": "ffn_config.ffn_hidden_size",
        "num_experts": "ffn_config.moe_num_experts",
        "num_experts_per_tok": "ffn_config.moe_top_k",
        "moe_normalize_expert_weights": "ffn_config.moe_normalize_expert_weights",
        "hidden_act": "ffn_config.ffn_act_fn.name",
    },
    layers=_layers,
    names=TensorNames(
        roles={
            "embedding": ("transformer.wte.weight",),
            "final_norm": ("transformer.norm_f.weight",),
            "head": ("lm_head.weight",),
            "input_norm": (_LAYER + "norm_attn_norm.norm_1.weight",),
            "mlp_norm": (_LAYER + "norm_attn_norm.norm_2.weight",),
            "qkv": (_LAYER + "norm_attn_norm.attn.Wqkv.weight",),
            "o": (_LAYER + "norm_attn_norm.attn.out_proj.weight",),
            "router": (_LAYER + "ffn.router.layer.weight",),
        },
        experts=(_FLAT, _APART),
        joined={"qkv": ("q", "k", "v")},
        in_gguf={"mlp_norm": "attn_output_norm.weight"},
    ),
)
