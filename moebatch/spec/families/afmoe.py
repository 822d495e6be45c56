"""AFMoE (Arcee): Trinity Nano, Mini and Large."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_layer_types, rotated_by_windows
from moebatch.spec.families.parts import grouped_attention, mlps, sigmoid_router
from moebatch.spec.model.blocks import Norm
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_OWN_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    attention = grouped_attention(keys, biases="attention_bias", qk_norm="head", gate="apart")
    step = 1 if keys.value("layer_types") else keys.count("global_attn_every_n_layers")
    windows = by_layer_types(keys, num_layers, lambda layer: (layer + 1) % step != 0)
    num_dense = keys.count_or_zero("num_dense_layers")
    return Layers(
        **rotated_by_windows(keys, attention, windows),
        **mlps(keys, num_layers, range(num_dense, num_layers), num_shared="num_shared_experts"),
        router=sigmoid_router(least_norm=1e-20, scale=keys.positive("route_scale")),
        norm=Norm(rounds_once=True),
        norms=("input_norm", *_OWN_NORMS),
        embedding_scale=keys.count("hidden_size") ** 0.5 if keys.flag("mup_enabled") else 1.0,
    )


AFMOE = FamilySpec(
    architecture="AfmoeForCausalLM",
    model_type="afmoe",
    layers=_layers,
    rotary_type="llama",
    names=usual_names(
        {
            **{role: f"{name}.weight" for role, name in _OWN_NORMS.items()},
            "output_gate": "self_attn.gate_proj.weight",
            "router": "mlp.router.gate.weight",
            "router_correction": "mlp.expert_bias",
        },
        shared=("mlp.shared_experts",),
        in_gguf={
            "attention_out_norm": "post_attention_norm.weight",
            "mlp_out_norm": "post_ffw_norm.weight",
            "output_gate": "attn_gate.weight",
        },
    ),
)
