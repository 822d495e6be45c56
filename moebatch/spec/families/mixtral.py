"""Mixtral (Mistral AI)."""

from moebatch.spec.families.family import FamilySpec, everywhere, grouped_attention, usual_defaults
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import BLOCK_EXPERTS, LAYER, TensorNames, usual_roles


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys),
        router=Router(norm_order=1.0, has_exact_weights=True),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("intermediate_size")),
        sliding_windows=everywhere(keys, num_layers),
    )


MIXTRAL = FamilySpec(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults=usual_defaults(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        num_experts_per_tok=2,
        num_experts=8,
    ),
    layers=_layers,
    names=TensorNames(
        roles=usual_roles()
        | {"router": (LAYER + "block_sparse_moe.gate.weight", LAYER + "mlp.gate.weight")},
        experts=BLOCK_EXPERTS,
    ),
)
