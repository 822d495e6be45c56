"""Phi-3.5-MoE (Microsoft)."""

from dataclasses import replace

from moebatch.quoting import shown
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import everywhere
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.blocks import Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import BLOCK_EXPERTS, usual_names

_ROTARY = ("default", "longrope")
_NUM_CHOSEN = 2


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    _require_known_positions(keys)
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias"),
        **mlps(keys, num_layers, width="intermediate_size"),
        router=_router(keys),
        sliding_windows=everywhere(keys, num_layers),
        norm=Norm(kind="layer", has_bias=True),
        head_bias=keys.flag("lm_head_bias"),
    )


def _router(keys: ConfigKeys) -> Router:
    chosen, noise = keys.value("num_experts_per_tok"), keys.value("router_jitter_noise")
    if chosen != _NUM_CHOSEN:
        keys.wrong(
            "num_experts_per_tok",
            f"num_experts_per_tok ({shown(chosen)}) must be {_NUM_CHOSEN}: gates of this "
            "architecture choose so many, whatever it says",
        )
    near = 0.0 if noise == 0 else 2 * keys.positive("router_jitter_noise")
    return Router(scores="sparsemixer", near=near)


def _require_known_positions(keys: ConfigKeys) -> None:
    """Factors of cosines and sines are known for these alone."""
    said = keys.rope()
    kind = said.get("rope_type", said.get("type", _ROTARY[0]))
    if kind not in _ROTARY:
        keys.wrong(
            "rope_parameters",
            f"rope_type: expected {_ROTARY[0]} or {_ROTARY[1]}, got {shown(kind)}",
        )


PHIMOE = FamilySpec(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    rotary_keys=("short_mscale", "long_mscale"),
    layers=_layers,
    names=usual_names(
        {"router": ("block_sparse_moe.gate.weight", "mlp.router.weight")},
        experts=BLOCK_EXPERTS,
    ),
)
RELEASED_PHIMOE = replace(PHIMOE, architecture="PhiMoEForCausalLM")
"""Released files name the class of their own code, which is not run."""
