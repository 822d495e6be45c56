"""MiniMax-Text-01 and MiniMax-M1, most of whose layers have lightning attention; and MiniMax-M2
(MiniMax)."""

from collections.abc import Sequence
from dataclasses import replace

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, LINEAR, everywhere
from moebatch.spec.families.parts import grouped_attention, mlps, sigmoid_router
from moebatch.spec.families.recurring import alike_heads, recurring
from moebatch.spec.model.blocks import Residual, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import LightningAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import BLOCK_EXPERTS, behind, usual_names

_BLOCKS = ("block_sparse_moe.", "mlp.")
"""Of released files, and of those that transformers holds in memory."""

_TYPES = (LINEAR, FULL)
_PARTS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}
"""Of a layer, as transformers and released files begin the names of factors."""


def _hybrid(keys: ConfigKeys, num_layers: int) -> Layers:
    of_attention, of_recurrence, of_mlp = (_residual(keys, part) for part in _PARTS)
    return Layers(
        attention=grouped_attention(keys, rotates_part=True),
        attention_residual=of_attention,
        **recurring(keys, _usual_types(keys, num_layers), _lightning),
        recurrent_residual=of_recurrence,
        router=Router(norm_order=1.0, has_exact_weights=True),
        **mlps(keys, num_layers, width="intermediate_size"),
        mlp_residual=of_mlp,
        sliding_windows=everywhere(keys, num_layers),
    )


def _usual_types(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    """What layers are where ``layer_types`` says nothing: as released files say it by numbers, or
    by turns as transformers has it without these."""
    numbers = keys.value("attn_type_list")
    if numbers is None:
        return [_TYPES[layer % 2 == 0] for layer in range(num_layers)]
    if not isinstance(numbers, list) or any(number not in (0, 1) for number in numbers):
        keys.fault("attn_type_list", "a list of 0 and 1", numbers)
    elif len(numbers) != num_layers:
        message = f"attn_type_list has {len(numbers)} entries for {num_layers} layers"
        keys.wrong("attn_type_list", message)
    else:
        return [_TYPES[number] for number in numbers]
    return [FULL] * num_layers


def _lightning(keys: ConfigKeys) -> LightningAttention:
    heads, _, head_dim = keys.heads()
    return LightningAttention(
        **alike_heads(heads, head_dim), num_layers=keys.count("num_hidden_layers")
    )


def _residual(keys: ConfigKeys, part: str) -> Residual:
    kept, added = (keys.positive(f"{part}_{factor}_factor") for factor in ("alpha", "beta"))
    return Residual(kept=kept, added=added, keeps_normed=True)


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys, qk_norm="full", rotates_part=True),
        **mlps(keys, num_layers, width="intermediate_size"),
        router=sigmoid_router(),
    )


MINIMAX_M2 = FamilySpec(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    layers=_layers,
    names=usual_names(
        {
            "router": [block + "gate.weight" for block in _BLOCKS],
            "router_correction": [block + "e_score_correction_bias" for block in _BLOCKS],
        },
        experts=BLOCK_EXPERTS,
    ),
)

_OF_LIGHTNING = {
    "lightning_qkv": "qkv_proj.weight",
    "lightning_gate": "output_gate.weight",
    "recurrent_norm": "norm.weight",
    "recurrent_out": "out_proj.weight",
}
MINIMAX = FamilySpec(
    architecture="MiniMaxForCausalLM",
    model_type="minimax",
    defaults={"rope_theta": 1e6, "postnorm": True, "shared_intermediate_size": 0},
    computed={"postnorm": (True,), "shared_intermediate_size": (0, [0])},
    synonyms={
        f"{part}_{factor}_factor": (f"{released}_{factor}",)
        for part, released in _PARTS.items()
        for factor in ("alpha", "beta")
    },
    # That of transformers has no heads of which a part rotates.
    rotary_type="minimax_m2",
    layers=_hybrid,
    names=usual_names(
        {
            "router": [block + "gate.weight" for block in _BLOCKS],
            **behind("self_attn.", _OF_LIGHTNING),
        },
        experts=BLOCK_EXPERTS,
    ),
)
MINIMAX_TEXT_01 = replace(
    MINIMAX,
    architecture="MiniMaxText01ForCausalLM",
    model_type="minimax_text_01",
    config_type=MINIMAX.model_type,
    defaults={**MINIMAX.defaults, "postnorm": False},
)
"""Released files name classes of their own code, which is not run."""
MINIMAX_M1 = replace(MINIMAX_TEXT_01, architecture="MiniMaxM1ForCausalLM", model_type="minimax_m1")
