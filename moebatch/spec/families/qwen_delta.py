"""Qwen3-Next and Qwen3.5-MoE, whose text models Qwen3.6-MoE has as well (Alibaba): three of four
layers recur."""

from collections.abc import Callable, Collection
from functools import partial

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, LINEAR
from moebatch.spec.families.parts import grouped_attention, mlps, softmax_router
from moebatch.spec.families.qwen import sparse_layers
from moebatch.spec.families.recurring import conv_width, recurring, require_silu
from moebatch.spec.model.blocks import Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import GatedDelta
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import IN_MODEL, OF_MAMBA, behind, usual_names


def _next(keys: ConfigKeys, num_layers: int) -> Layers:
    sparse, grouped = sparse_layers(keys, num_layers), partial(gated_delta, is_grouped=True)
    return _layers(keys, num_layers, sparse, softmax_router(keys), grouped)


def _qwen3_5(keys: ConfigKeys, num_layers: int) -> Layers:
    return _layers(keys, num_layers, range(num_layers), Router(norm_order=1.0), gated_delta)


def _layers(
    keys: ConfigKeys,
    num_layers: int,
    sparse: Collection[int],
    router: Router,
    recurrence: Callable[[ConfigKeys], GatedDelta],
) -> Layers:
    """As ``layer_types`` says, all but every ``full_attention_interval``-th recur."""
    interval = keys.count("full_attention_interval")
    usual = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    return Layers(
        attention=grouped_attention(
            keys, biases="attention_bias", rotates_part=True, qk_norm="head", gate="with queries"
        ),
        norm=Norm(counts_from_one=True),
        **recurring(keys, usual, recurrence),
        **mlps(keys, num_layers, sparse, shared="shared_expert_intermediate_size"),
        shared_expert_gate=True,
        router=router,
    )


def gated_delta(keys: ConfigKeys, *, is_grouped: bool = False) -> GatedDelta:
    """Gated DeltaNet of the sizes that keys with ``linear_`` say."""
    require_silu(keys)
    key_heads, value_heads = (keys.count(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    keys.require_multiple("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    return GatedDelta(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=keys.count("linear_key_head_dim"),
        value_head_dim=keys.count("linear_value_head_dim"),
        conv_width=conv_width(keys, "linear_conv_kernel_dim"),
        is_grouped=is_grouped,
    )


DELTA_NAMES = {
    "gated_q": "self_attn.q_proj.weight",
    "gated_q_bias": "self_attn.q_proj.bias",
    **{
        f"delta_{role}": f"linear_attn.in_proj_{role}.weight"
        for role in ("qkvz", "ba", "qkv", "z", "b", "a")
    },
    **behind("linear_attn.", OF_MAMBA),
}
"""Those of layers that recur by Gated DeltaNet, and of attention with gates beside queries."""
_DEFAULTS = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}

QWEN3_NEXT = FamilySpec(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    defaults=_DEFAULTS,
    layers=_next,
    names=usual_names(DELTA_NAMES),
)
QWEN3_5_MOE_TEXT = FamilySpec(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults=_DEFAULTS,
    layers=_qwen3_5,
    names=usual_names(DELTA_NAMES).also_under(IN_MODEL),
)
QWEN3_5_MOE = QWEN3_5_MOE_TEXT.beside_others("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
