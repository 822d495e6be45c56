"""Mixtral (Mistral AI)."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import everywhere
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import BLOCK_EXPERTS, usual_names


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys),
        router=Router(norm_order=1.0, has_exact_weights=True),
        **mlps(keys, num_layers, width="intermediate_size"),
        sliding_windows=everywhere(keys, num_layers),
    )


MIXTRAL = FamilySpec(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    layers=_layers,
    names=usual_names(
        {"router": ("block_sparse_moe.gate.weight", "mlp.gate.weight")},
        experts=BLOCK_EXPERTS,
    ),
)
