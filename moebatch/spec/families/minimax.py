"""MiniMax-M2 (MiniMax)."""

from moebatch.spec.families.family import FamilySpec, grouped_attention, usual_defaults
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import BLOCK_EXPERTS, LAYER, TensorNames, usual_roles

_BLOCKS = (LAYER + "block_sparse_moe.", LAYER + "mlp.")
"""Of released files, and of those that transformers holds in memory."""


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys, qk_norm="full", rotates_part=True),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("intermediate_size")),
        router=Router(
            scores="sigmoid", has_correction=True, norm_order=1.0, has_exact_weights=True
        ),
    )


MINIMAX_M2 = FamilySpec(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    defaults=usual_defaults(
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196608,
        rms_norm_eps=1e-6,
        num_experts_per_tok=8,
        num_experts=256,
    ),
    layers=_layers,
    names=TensorNames(
        roles=usual_roles()
        | {
            "router": tuple(block + "gate.weight" for block in _BLOCKS),
            "router_correction": tuple(block + "e_score_correction_bias" for block in _BLOCKS),
        },
        experts=BLOCK_EXPERTS,
    ),
)
