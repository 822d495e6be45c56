"""ERNIE-4.5 MoE (Baidu), text alone."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_CORRECTION = "moe_statics.e_score_correction_bias"


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """Released files hold a layer more, which foretells tokens and is not computed."""
    return Layers(
        attention=grouped_attention(keys, biases="use_bias", rotates_neighbours=True),
        **mlps(
            keys,
            num_layers,
            _moe_layers(keys, num_layers),
            num_shared="num_shared",
            biases="use_bias",
        ),
        router=Router(
            has_correction=True,
            norm_order=1.0,
            least_norm=keys.positive("moe_norm_min"),
            has_exact_logits=True,
        ),
        head_bias=keys.flag("use_bias"),
    )


def _moe_layers(keys: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """Every ``moe_layer_interval``-th from ``moe_layer_start_index`` to ``moe_layer_end_index``, of
    which -1 is the last layer."""
    first, step = keys.count_or_zero("moe_layer_start_index"), keys.count("moe_layer_interval")
    is_open = keys.value("moe_layer_end_index") == -1
    last = num_layers - 1 if is_open else keys.count_or_zero("moe_layer_end_index")
    candidates = range(step - 1, num_layers, step)
    return tuple(layer for layer in candidates if first <= layer <= last)


ERNIE_4_5_MOE = FamilySpec(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    spelling={"num_shared": "moe_num_shared_experts"},
    layers=_layers,
    names=usual_names(
        {"router_correction": (f"mlp.{_CORRECTION}", f"mlp.gate.{_CORRECTION}")},
        shared=("mlp.shared_experts",),
        ones={"router_correction": (1, 0)},
    ),
)
