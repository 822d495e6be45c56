"""ERNIE-4.5 MoE (Baidu), and the text of ERNIE-4.5-VL, which has experts of its own beside those of
images."""

from dataclasses import replace
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_mlp_types
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import USUAL_EXPERTS, usual_names

_CORRECTION = "moe_statics.e_score_correction_bias"
_USUAL_WIDTHS = [1536, 512]


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """Released files hold a layer more, which foretells tokens and is not computed."""
    return _with_experts(keys, num_layers, _moe_layers(keys, num_layers))


def _beside_images(keys: ConfigKeys, num_layers: int) -> Layers:
    """transformers knows no other rotary positions of these, and no bias of the head."""
    kind = keys.rope().get("rope_type", "default")
    if kind != "default":
        keys.fault("rope_parameters", "rope_type default", kind)
    sparse = by_mlp_types(keys, num_layers, range(1, num_layers))
    return replace(_with_experts(keys, num_layers, sparse), head_bias=False)


def _of_text(keys: ConfigKeys) -> dict[str, Any]:
    """Experts of text and those of images may differ in width."""
    widths = keys.value("moe_intermediate_size") or _USUAL_WIDTHS
    return {"moe_intermediate_size": widths[0] if isinstance(widths, list) else widths}


def _with_experts(keys: ConfigKeys, num_layers: int, sparse: tuple[int, ...]) -> Layers:
    return Layers(
        attention=grouped_attention(keys, biases="use_bias", rotates_neighbours=True),
        **mlps(
            keys,
            num_layers,
            sparse,
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
ERNIE_4_5_VL_MOE = FamilySpec(
    architecture="Ernie4_5_VLMoeForConditionalGeneration",
    model_type="ernie4_5_vl_moe",
    config_type="ernie4_5_vl_moe_text",
    within="text_config.",
    spelling=ERNIE_4_5_MOE.spelling,
    reworded=_of_text,
    layers=_beside_images,
    names=usual_names(
        {"router_correction": f"mlp.{_CORRECTION}"},
        shared=("mlp.shared_experts",),
        experts=USUAL_EXPERTS[:1],
        turned=("router",),
        first_rows={"router_correction": 2},
    ),
)
"""Images and videos are not read, nor what is for them alone: the second half of the experts of a
layer, their gate, and what corrects it."""
