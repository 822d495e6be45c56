"""GLM-4.5, 4.6 and 4.7, and the text of GLM-4.5V and 4.6V (Zhipu AI); with the same router and
experts dots.llm1 (rednote), Solar Open (Upstage) and K-EXAONE (LG)."""

from collections.abc import Sequence
from dataclasses import replace

from moebatch.spec.families.deepseek import DEEPSEEK_V3
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import Windows, by_layer_types, by_mlp_types, rotated_by_windows
from moebatch.spec.families.parts import corrected_router, grouped_attention, mlps
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import IN_MODEL


def glm4_layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """Of which the first ones are dense. Released files hold a layer more, which foretells tokens
    and is not computed."""
    qk_norm = "head" if keys.flag("use_qk_norm") else "none"
    attention = grouped_attention(
        keys, qkv_bias="attention_bias", rotates_part=True, qk_norm=qk_norm
    )
    return _layers(keys, attention, (None,) * num_layers, _moe_layers(keys, num_layers))


def _dots1(keys: ConfigKeys, num_layers: int) -> Layers:
    below = keys.count_or_zero("max_window_layers")
    attention = grouped_attention(keys, biases="attention_bias", qk_norm="head")
    windows = by_layer_types(keys, num_layers, lambda layer: layer >= below)
    return _layers(keys, attention, windows, _moe_layers(keys, num_layers))


def _solar(keys: ConfigKeys, num_layers: int) -> Layers:
    attention = grouped_attention(keys, qkv_bias="attention_bias")
    return _layers(keys, attention, (None,) * num_layers, range(num_layers))


def _exaone(keys: ConfigKeys, num_layers: int) -> Layers:
    attention = grouped_attention(keys, qk_norm="head")
    step = 1 if keys.value("layer_types") else keys.count("sliding_window_pattern")
    windows = by_layer_types(keys, num_layers, lambda layer: (layer + 1) % step != 0)
    sparse = by_mlp_types(keys, num_layers, _moe_layers(keys, num_layers))
    layers = _layers(keys, attention, windows, sparse)
    return replace(layers, **rotated_by_windows(keys, attention, windows))


def _moe_layers(keys: ConfigKeys, num_layers: int) -> range:
    return range(keys.count_or_zero("first_k_dense_replace"), num_layers)


def _layers(
    keys: ConfigKeys, attention: GroupedAttention, windows: Windows, sparse: Sequence[int]
) -> Layers:
    """Of which those that are sparse have experts."""
    return Layers(
        attention=attention,
        **mlps(keys, len(windows), sparse, num_shared="n_shared_experts"),
        router=corrected_router(keys),
        sliding_windows=windows,
    )


_NAMES = DEEPSEEK_V3.names
GLM4_MOE = FamilySpec(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults={"partial_rotary_factor": 0.5},
    layers=glm4_layers,
    names=_NAMES,
)
GLM4V_MOE = GLM4_MOE.beside_others(
    "Glm4vMoeForConditionalGeneration",
    "glm4v_moe",
    config_type="glm4v_moe_text",
    defaults=dict(GLM4_MOE.defaults) | {"use_qk_norm": False},
    computed={"use_qk_norm": (False,)},
    names=_NAMES.also_under(IN_MODEL),
)
"""Images and videos are not read: its vision tensors are left alone."""
DOTS1 = FamilySpec(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    layers=_dots1,
    names=_NAMES,
)
SOLAR_OPEN = FamilySpec(
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    layers=_solar,
    names=_NAMES,
)
EXAONE_MOE = FamilySpec(
    architecture="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    spelling={"n_shared_experts": "num_shared_experts"},
    layers=_exaone,
    names=_NAMES.with_names(
        {
            "router_correction": (
                "mlp.e_score_correction_bias",
                "mlp.gate.e_score_correction_bias",
            )
        }
    ),
)
