"""dots3-note (Dots Studio), text alone: latent attention in layers that slide, with sizes of their
own, and in others, whose tokens choose by DeepSeek's indexers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebatch.spec.families.deepseek import DEEPSEEK_V3, choosing, latent_attention
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, SLIDING, by_mlp_types, layer_types, windows_of
from moebatch.spec.families.parts import corrected_router, mlps
from moebatch.spec.model.blocks import Mlp
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import IN_MODEL

_INDEXED = "indexed_attention"
_KINDS = (_INDEXED, FULL, SLIDING)
_BY_LAYER = "per_layer_config"
_OWN = "swa_"
"""How released files begin sizes of layers that slide."""
_OF_SLIDING = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Those that files leave out."""
_SIZES = (*_OF_SLIDING, "qk_rope_head_dim")
_BASES = {"rope_theta": 80e6, f"{_OWN}rope_theta": 50e3}


def _reworded(keys: ConfigKeys) -> dict[str, Any]:
    """Sizes of layers that slide as released files say them, all else as transformers does."""
    types = _types(keys)
    words: dict[str, Any] = {
        "layer_types": types,
        "rope_parameters": _rotary(keys),
        "rope_scaling": None,
        "rope_theta": None,
    }
    frequency = keys.value("moe_layer_freq")
    if isinstance(frequency, list) and keys.value("mlp_layer_types") is None:
        kinds = ("dense", "sparse")
        first = keys.count_or_zero("first_k_dense_replace")
        words["mlp_layer_types"] = [
            kinds[layer >= first and bool(has)] for layer, has in enumerate(frequency)
        ]
    return words | _sizes(keys, types)


def _types(keys: ConfigKeys) -> Sequence[str]:
    """Those without a window have indexers wherever a file says nothing else; an older name of
    these is that of layers without."""
    num_layers, said = keys.count("num_hidden_layers"), keys.value("use_dsa")
    if said is None and keys.value(_BY_LAYER) is None:
        said = True
    whole = FULL if said is False else _INDEXED
    slides = keys.value("use_sliding_window") is not False
    usual = [
        SLIDING if slides and layer > 1 and layer % 4 != 1 else whole for layer in range(num_layers)
    ]
    types = layer_types(keys, usual, _KINDS)
    return types if said is None else [kind if kind == SLIDING else whole for kind in types]


def _rotary(keys: ConfigKeys) -> Any:
    """By kind of layers; all have those that are said once."""
    said, base = (
        keys.value("rope_parameters") or keys.value("rope_scaling"),
        keys.value("rope_theta"),
    )
    if said is None:
        of_sliding = keys.value(f"{_OWN}rope_theta")
        return {
            kind: {"rope_type": "default", "rope_theta": of_sliding if kind == SLIDING else base}
            for kind in _KINDS
        }
    if not isinstance(said, Mapping):
        keys.fault("rope_parameters", "an object", said)
        return None
    by_kind = said if {*_KINDS} & said.keys() else dict.fromkeys(_KINDS, said)
    return {
        kind: {"rope_theta": base, **each} if isinstance(each, Mapping) else each
        for kind, each in by_kind.items()
    }


def _sizes(keys: ConfigKeys, types: Sequence[str]) -> dict[str, Any]:
    """Those of both kinds, where a file says them layer by layer."""
    said = keys.value(_BY_LAYER)
    if said is None:
        return {}
    if not isinstance(said, Mapping) or not all(
        isinstance(own, Mapping) and own.keys() <= {*_SIZES} for own in said.values()
    ):
        keys.fault(_BY_LAYER, f"an object with sizes of attention ({', '.join(_SIZES)})", said)
        return {}
    by_layer = {str(layer).lstrip("0") or "0": own for layer, own in said.items()}
    usual = {name: keys.value(name) for name in _SIZES}
    words: dict[str, Any] = {}
    for slides, beginning in ((False, ""), (True, _OWN)):
        of_layers = [
            {**usual, **by_layer.get(str(layer), {})}
            for layer, kind in enumerate(types)
            if (kind == SLIDING) == slides
        ]
        if any(own != of_layers[0] for own in of_layers):
            keys.fault(_BY_LAYER, "the same sizes for all layers that slide, or do not", said)
        for name, size in (of_layers or [usual])[0].items():
            words[beginning + name] = size
    return words


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    types = layer_types(keys, (_INDEXED,) * num_layers, _KINDS)
    whole = _whole(keys)
    kinds = {kind: replace(whole, rotary=kind) for kind in (_INDEXED, FULL)}
    if SLIDING in types:
        kinds[SLIDING] = _sliding(keys, whole)
    first = next((kind for kind in _KINDS if kind in types), FULL)
    layers = Layers(
        attention=kinds[first],
        layer_attentions=tuple(kinds[kind] for kind in types),
        sliding_windows=windows_of(keys, types),
        **_mlps(keys, num_layers),
        router=corrected_router(keys),
    )
    if first != _INDEXED:
        return layers
    indexers = ["full" if kind == _INDEXED else None for kind in types]
    return choosing(layers, keys, indexers, rotates_neighbours=True)


def _mlps(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    """What `Layers` says of them; all shared experts are one."""
    first, step = keys.count_or_zero("first_k_dense_replace"), keys.value("moe_layer_freq")
    step = 1 if isinstance(step, list) else keys.count("moe_layer_freq")
    usual = [layer for layer in range(first, num_layers) if layer % step == 0]
    width = keys.count("n_shared_experts") * keys.count("shared_experts_intermediate_size")
    found = mlps(keys, num_layers, by_mlp_types(keys, num_layers, usual))
    return found | {"shared_expert": Mlp(width=width)}


def _whole(keys: ConfigKeys) -> LatentAttention:
    """That of layers without a window."""
    _require_own_keys(keys, "")
    latent = latent_attention(keys, rotates_neighbours=True)
    usual = replace(
        latent,
        gate="of heads",
        norms_positioned=True,
        norm_eps=keys.positive("rms_norm_eps"),
    )
    return _scaled(keys, usual, keys.count("q_lora_rank"))


def _sliding(keys: ConfigKeys, whole: LatentAttention) -> LatentAttention:
    """The same with the sizes of layers that slide."""
    _require_own_keys(keys, _OWN)
    size, plain = keys.count(f"{_OWN}head_dim"), keys.count(f"{_OWN}qk_nope_head_dim")
    rotated = keys.value(f"{_OWN}qk_rope_head_dim")
    if (size - plain) % 2 or size <= plain or rotated not in (None, size - plain):
        message = f"an even number that is {_OWN}head_dim ({size}) less the part without positions"
        keys.fault(f"{_OWN}qk_rope_head_dim", message, size - plain if rotated is None else rotated)
        size = plain + 2
    heads = keys.count(f"{_OWN}num_attention_heads")
    sliding = replace(
        whole,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size,
        rope_head_dim=size - plain,
        kv_rank=keys.count(f"{_OWN}kv_lora_rank"),
        value_head_dim=keys.count(f"{_OWN}v_head_dim"),
        rotary=SLIDING,
    )
    return _scaled(keys, sliding, keys.count(f"{_OWN}q_lora_rank"))


def _scaled(keys: ConfigKeys, latent: LatentAttention, query_rank: int) -> LatentAttention:
    """Latents, and queries with scores, multiplied by what makes up for their width."""
    hidden = keys.count("hidden_size")
    return replace(
        latent,
        query_rank=query_rank,
        score_scale=(hidden / query_rank / latent.head_dim) ** 0.5,
        latent_scale=(hidden / latent.kv_rank) ** 0.5,
    )


def _require_own_keys(keys: ConfigKeys, beginning: str) -> None:
    """Notes a fault where heads share keys, which no latents do."""
    heads = keys.count(f"{beginning}num_attention_heads")
    key = f"{beginning}num_key_value_heads"
    if keys.value(key) not in (None, heads):
        expected = f"{heads}, as many as {beginning}num_attention_heads"
        keys.fault(key, expected, keys.value(key))


DOTS3_NOTE_TEXT = FamilySpec(
    architecture="Dots3NoteForCausalLM",
    model_type="dots3_note_text",
    defaults={
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "sliding_window": 512,
        **{_OWN + name: size for name, size in _OF_SLIDING.items()},
        **_BASES,
    },
    synonyms={
        "sliding_window": ("sliding_window_size",),
        "shared_experts_intermediate_size": ("moe_shared_expert_intermediate_size",),
    },
    computed={"mlp_bias": (False,)},
    reworded=_reworded,
    layers=_layers,
    names=DEEPSEEK_V3.names.with_names(
        {
            "k_rope_norm": "self_attn.k_rope_only_layernorm.weight",
            "output_gate": "self_attn.g_proj.weight",
        }
    ),
    rotary_type="mixtral",
)
DOTS3_NOTE = DOTS3_NOTE_TEXT.beside_others(
    "Dots3NoteForConditionalGeneration",
    "dots3_note",
    else_within="",
    names=DOTS3_NOTE_TEXT.names.also_under(IN_MODEL),
)
"""As released files have it, beside everything else, or in an object as transformers writes it.
Images, videos and sounds are not read: tensors of what sees and hears are left alone, as are layers
that foretell tokens."""
