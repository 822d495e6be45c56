"""Kimi-Linear (Moonshot AI): three of four layers recur, the others attend to latents without
rotary positions; and the text of Kimi-K2.5, which is built as DeepSeek-V3 is."""

from collections.abc import Sequence
from dataclasses import replace

from moebatch.spec.families.deepseek import DEEPSEEK_V3, latent_attention, latent_layers
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, LINEAR
from moebatch.spec.families.parts import corrected_router
from moebatch.spec.families.recurring import alike_heads, conv_width, recurring, require_silu
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import ChannelDelta
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import (
    AROUND_MODEL,
    BLOCK_EXPERTS,
    IN_MODEL,
    behind,
    usual_names,
)

_INTERVAL = 4


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    attention = latent_attention(keys, rotates_neighbours=False, rotates=False)
    layers = latent_layers(keys, num_layers, attention, corrected_router(keys))
    return replace(layers, **recurring(keys, _usual_types(keys, num_layers), _delta))


def _usual_types(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    """What layers are where ``layer_types`` says nothing: as two lists say that count layers from
    one, or as transformers has it without them."""
    lists = {LINEAR: keys.value("kda_layers"), FULL: keys.value("full_attn_layers")}
    if None in lists.values():
        return [LINEAR if layer % _INTERVAL or not layer else FULL for layer in range(num_layers)]
    listed = [(layer, kind) for kind, layers in lists.items() for layer in _listed(layers)]
    if [layer for layer, _ in sorted(listed)] != list(range(1, num_layers + 1)):
        keys.wrong(
            "kda_layers",
            f"kda_layers and full_attn_layers of linear_attn_config must have each layer from 1 to "
            f"{num_layers} once",
        )
        return [FULL] * num_layers
    return [kind for _, kind in sorted(listed)]


def _listed(layers: object) -> list[int]:
    """Nothing where they are no list of numbers."""
    if isinstance(layers, list) and all(type(layer) is int for layer in layers):
        return layers
    return []


def _delta(keys: ConfigKeys) -> ChannelDelta:
    """Gates and fading go through as many numbers as a head has."""
    require_silu(keys)
    heads, head_dim = keys.count("linear_num_heads"), keys.count("linear_head_dim")
    return ChannelDelta(
        **alike_heads(heads, head_dim),
        conv_width=conv_width(keys, "linear_conv_kernel_dim"),
        rank=head_dim,
    )


_BLOCK = "block_sparse_moe"
OF_DELTA = {
    **{f"delta_{role}": f"{role}_proj.weight" for role in "qkvb"},
    **{f"recurrent_conv_{role}": f"{role}_conv1d.weight" for role in "qkv"},
    "recurrent_decay": "A_log",
    "recurrent_step": "dt_bias",
    "recurrent_norm": "o_norm.weight",
    "recurrent_out": "o_proj.weight",
}
"""Names of the weights of Kimi Delta Attention, behind that of attention, but for those that make
gates and fading."""
OF_MIXERS = {
    **OF_DELTA,
    "delta_z": "g_a_proj.weight",
    "delta_z_wide": "g_b_proj.weight",
    "delta_a": "f_a_proj.weight",
    "delta_a_wide": "f_b_proj.weight",
}
"""The same with those, which go through a few numbers."""
_IN_GGUF = {
    **{f"delta_{role}": f"attn_{role}.weight" for role in "qkv"},
    "delta_z": "ssm_g_a.weight",
    "delta_z_wide": "ssm_g_b.weight",
    "delta_a": "ssm_f_a.weight",
    "delta_a_wide": "ssm_f_b.weight",
    **{f"recurrent_conv_{role}": f"ssm_conv1d_{role}.weight" for role in "qkv"},
    "recurrent_out": "attn_output.weight",
}
_IN_AN_OBJECT = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
KIMI_LINEAR = FamilySpec(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    defaults={"first_k_dense_replace": 1},
    spelling={
        "kda_layers": "linear_attn_config.kda_layers",
        "full_attn_layers": "linear_attn_config.full_attn_layers",
        **{key: f"linear_attn_config.{name}" for key, name in _IN_AN_OBJECT.items()},
    },
    synonyms={key: (key,) for key in _IN_AN_OBJECT},
    layers=_layers,
    names=usual_names(
        {
            **behind("self_attn.", OF_MIXERS),
            "router": f"{_BLOCK}.gate.weight",
            "router_correction": f"{_BLOCK}.gate.e_score_correction_bias",
        },
        mlp=("mlp", _BLOCK),
        shared=(f"{_BLOCK}.shared_experts",),
        ones={"recurrent_decay": (2, 1)},
        experts=BLOCK_EXPERTS,
        in_gguf=_IN_GGUF,
    ),
)
"""As released: sizes of layers that recur in ``linear_attn_config``, or beside everything else as
transformers writes them; which calls the parts of layers without experts as those of the others,
when it writes them."""
WRITTEN_KIMI_K25 = DEEPSEEK_V3.beside_others(
    "Kimi_K25ForConditionalGeneration",
    "kimi_k25",
    other_types=(),
    defaults={"tie_word_embeddings": True},
    names=DEEPSEEK_V3.names.also_under(AROUND_MODEL).also_under(IN_MODEL),
)
KIMI_K25 = replace(WRITTEN_KIMI_K25, architecture="KimiK25ForConditionalGeneration")
"""As transformers writes it, and as it is released. Images and videos are not read."""
