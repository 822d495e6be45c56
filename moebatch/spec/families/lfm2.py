"""LFM2-MoE (Liquid AI): most layers convolve over some tokens, the others attend."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import grouped_attention, mlps, norm_order
from moebatch.spec.families.recurring import conv_width, recurring
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import ShortConvolution
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import separate_experts, stacked_experts, usual_names

_MLP = "feed_forward."
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    num_dense = keys.count_or_zero("num_dense_layers")
    return Layers(
        attention=grouped_attention(keys, qk_norm="head"),
        **recurring(keys, ("conv",) * num_layers, _convolution, recur=("conv",)),
        **mlps(keys, num_layers, range(num_dense, num_layers)),
        router=Router(
            scores="sigmoid",
            has_correction=keys.flag("use_expert_bias"),
            norm_order=norm_order(keys),
            added_to_norm=1e-6,
            scale=keys.positive("routed_scaling_factor"),
        ),
    )


def _convolution(keys: ConfigKeys) -> ShortConvolution:
    has_biases = keys.flag("conv_bias")
    return ShortConvolution(
        width=keys.count("hidden_size"),
        conv_width=conv_width(keys, "conv_L_cache"),
        conv_bias=has_biases,
        bias=has_biases,
    )


_OWN_ROLES = {
    "input_norm": "operator_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "self_attn.q_layernorm.weight",
    "k_norm": "self_attn.k_layernorm.weight",
    "o": "self_attn.out_proj.weight",
    "router": f"{_MLP}gate.weight",
    "router_correction": f"{_MLP}expert_bias",
    **{f"mlp_{role}": f"{_MLP}{name}.weight" for role, name in _MATRICES.items()},
    **{
        f"recurrent_{role}{end}": f"conv.{name}.{kind}"
        for role, name in (("in", "in_proj"), ("conv", "conv"), ("out", "out_proj"))
        for end, kind in (("", "weight"), ("_bias", "bias"))
    },
}
LFM2_MOE = FamilySpec(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    spelling={"rms_norm_eps": "norm_eps"},
    synonyms={"tie_word_embeddings": ("tie_embedding",)},
    layers=_layers,
    names=usual_names(
        _OWN_ROLES,
        others={"final_norm": ("model.embedding_norm.weight",)},
        experts=(
            separate_experts(_MLP + "experts.{expert}", **_MATRICES),
            stacked_experts(_MLP + "experts."),
        ),
        in_gguf={
            "recurrent_in": "shortconv.in_proj.weight",
            "recurrent_conv": "shortconv.conv.weight",
            "recurrent_out": "shortconv.out_proj.weight",
        },
    ),
)
