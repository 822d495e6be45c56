"""Hy4 (Tencent): latent attention with gates and scores without a value, which an indexer makes
sparse, and hidden states in several streams that are not mixed with each other."""

from dataclasses import replace

from moebatch.spec.families.deepseek import (
    DEEPSEEK_V3,
    choosing,
    indexer_types,
    latent_attention,
)
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_mlp_types, layer_types
from moebatch.spec.families.parts import corrected_router, mlps
from moebatch.spec.families.recurring import require_silu
from moebatch.spec.model.blocks import ClampedGate, Streams
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import IN_MODEL, usual_names

_NORMS = {"input_norm": ("attn", "attn"), "mlp_norm": ("mlp", "ffn")}
"""Of the part of a layer behind each, as released files call it and as transformers does."""
_PARTS = (("", "fn"), ("_base", "base"), ("_scale", "scale"))
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""The second is the older name."""


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    latent = latent_attention(keys, rotates_neighbours=False)
    return _with_latents(keys, num_layers, latent)


def _beside_images(keys: ConfigKeys, num_layers: int) -> Layers:
    """Whose neighbours rotate, and whose latents are normed as all else is."""
    latent = latent_attention(keys, rotates_neighbours=True)
    own = replace(latent, norm_eps=keys.positive("rms_norm_eps"))
    return _with_latents(keys, num_layers, own)


def _with_latents(keys: ConfigKeys, num_layers: int, latent: LatentAttention) -> Layers:
    require_silu(keys)
    layer_types(keys, _INDEXED[:1] * num_layers, _INDEXED)
    sparse = by_mlp_types(keys, num_layers, range(1, num_layers))
    clamp, eps = ClampedGate(limit=keys.positive("swiglu_limit")), keys.positive("hc_eps")
    layers = Layers(
        attention=replace(latent, gate="apart", has_sink_scores=True),
        **mlps(keys, num_layers, sparse, num_shared="n_shared_experts"),
        router=corrected_router(keys),
        expert_clamps=(clamp,) * num_layers,
        streams=Streams(
            count=keys.count("hc_mult"),
            num_balancings=None,
            eps=eps,
            magnitude=keys.positive("hc_magnitude"),
            least_share=eps,
        ),
    )
    return choosing(
        layers,
        keys,
        indexer_types(keys, num_layers),
        rotates_last=True,
        rotates_neighbours=latent.rotates_neighbours,
        eps=keys.positive("rms_norm_eps"),
    )


def _streams_of(norm: str) -> dict[str, tuple[str, ...]]:
    """In a layer, each as released files may have it, which transformers reads with ``hc_pre`` or
    without, and as it holds it itself."""
    part, held = _NORMS[norm]
    return {
        f"{norm}_streams{end}": (
            *_with_or_without_pre("", f"hc_{part}_layer", f"hc_{name}"),
            f"{held}_hc.{name}",
        )
        for end, name in _PARTS
    }


def _last_streams() -> dict[str, tuple[str, ...]]:
    """The same of those behind the last layer."""
    return {
        f"final_norm_streams{end}": (
            *_with_or_without_pre("model.", "hc_head", f"hc_head_{name}"),
            f"model.hc_head.hc_{name}",
        )
        for end, name in _PARTS
    }


def _with_or_without_pre(before: str, module: str, name: str) -> tuple[str, ...]:
    return (
        f"{before}{module}.{name}",
        f"{before}hc_pre.{module}.{name}",
        f"{before}{module}.hc_pre.{name}",
    )


_GATES = {"mlp_gate": "mlp", "shared_gate": "mlp.shared_experts", "output_gate": "self_attn"}
_ENDS = ("linear_gate.weight", "gate_proj.weight")
"""transformers writes the gates of MLPs under the first as well, as released files have those of
attention."""
HY_V4 = FamilySpec(
    architecture="HYV4ForCausalLM",
    model_type="hy_v4",
    defaults={"num_key_value_heads": None, "index_topk_freq": 4, "index_skip_topk_offset": 2},
    layers=_layers,
    names=usual_names(
        {
            **_streams_of("input_norm"),
            **_streams_of("mlp_norm"),
            **{role: [f"{part}.{end}" for end in _ENDS] for role, part in _GATES.items()},
            "sink_scores": ("self_attn.learnable_sink_param", "self_attn.sinks"),
        },
        shared=("mlp.shared_experts",),
        others=_last_streams(),
    ),
)
"""Layers behind the last one, which guess further tokens ahead, are not read."""
HY_V4_VL = HY_V4.beside_others(
    "HYV4VLForConditionalGeneration",
    "hy_v4_vl",
    config_type="hy_v4_vl_text",
    layers=_beside_images,
    names=HY_V4.names.also_under(IN_MODEL),
    rotary_type=DEEPSEEK_V3.model_type,
)
"""Images and videos are not read: its vision tensors are left alone."""
