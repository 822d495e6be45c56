"""Flint (RecursiveSI): most layers slide and rotate, the others do neither; all have scores for
sinks."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_layer_types, rotated_by_windows
from moebatch.spec.families.parts import grouped_attention, mlps, norm_order
from moebatch.spec.families.qwen import sparse_layers
from moebatch.spec.model.blocks import Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    attention = grouped_attention(
        keys, biases="attention_bias", qk_norm="head", has_sink_scores=True
    )
    others = {0, 1, num_layers - 1}
    windows = by_layer_types(keys, num_layers, lambda layer: layer not in others and layer % 4 != 1)
    return Layers(
        **rotated_by_windows(keys, attention, windows),
        **mlps(
            keys,
            num_layers,
            sparse_layers(keys, num_layers),
            shared="shared_expert_intermediate_size",
        ),
        router=Router(
            scores="sigmoid",
            norm_order=norm_order(keys),
            has_exact_logits=True,
            has_exact_weights=True,
        ),
        norm=Norm(rounds_once=True),
    )


FLINT = FamilySpec(
    architecture="FlintForCausalLM",
    model_type="flint",
    defaults={"mlp_only_layers": (0, 1)},
    layers=_layers,
    names=usual_names({"sink_scores": ("self_attn.softmax_offset", "self_attn.sinks")}),
)
