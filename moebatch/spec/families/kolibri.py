"""Kolibri-1 (Aleph Alpha): four of five layers slide and rotate, the others do neither; what
corrects the choice of experts is added to logits."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_layer_types, rotated_by_windows
from moebatch.spec.families.parts import grouped_attention, mlps, norm_order
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_PERIOD = 5
_OWN_NAMES = {
    "attention_out_norm": ("post_attn_norm.weight", "post_self_attn_layernorm.weight"),
    "mlp_out_norm": ("post_ffn_norm.weight", "post_mlp_layernorm.weight"),
    "router_correction": ("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
}
"""As released, and as transformers holds them in memory."""


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    keys.count("sliding_window")  # without one all layers rotate
    windows = by_layer_types(keys, num_layers, lambda layer: (layer + 1) % _PERIOD != 0)
    return Layers(
        **rotated_by_windows(keys, grouped_attention(keys, qk_norm="head"), windows),
        **mlps(keys, num_layers, shared="shared_expert_intermediate_size"),
        router=Router(
            scores="sigmoid",
            has_correction=True,
            corrects_logits=True,
            norm_order=norm_order(keys),
            has_exact_logits=True,
            has_exact_weights=True,
        ),
        norms=("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    )


KOLIBRI = FamilySpec(
    architecture="Kolibri1ForCausalLM",
    model_type="kolibri1",
    computed={"attention_bias": (False,), "use_sliding_window": (True,)},
    layers=_layers,
    names=usual_names(_OWN_NAMES, shared=("mlp.shared_experts",)),
)
