"""Switch Transformers (Google), the models of Pre-gated MoE."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import RelativeAttention
from moebatch.spec.model.shape import Encoder, Layers
from moebatch.spec.model.tensor_names import ExpertLayout, TensorNames

_ROLES = ("up", "down")
_BLOCK = "{stack}.block.{layer}."
_MLP = _BLOCK + "layer.{mlp}."
_SELF = _BLOCK + "layer.0.SelfAttention."
_CROSS = _BLOCK + "layer.1.EncDecAttention."


def _layers(keys: ConfigKeys, num_encoding: int) -> Layers:
    num_decoding = keys.count_or_none("num_decoder_layers") or num_encoding
    encoding = _sparse(keys, "encoder", num_encoding)
    decoding = _sparse(keys, "decoder", num_decoding)
    heads, head_dim = keys.count("num_attention_heads"), keys.count("head_dim")
    mlp = Mlp(width=keys.count("intermediate_size"), roles=_ROLES)
    num_buckets = keys.count("relative_attention_num_buckets", least=4)
    return Layers(
        attention=RelativeAttention(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            num_buckets=num_buckets,
            max_distance=keys.count("relative_attention_max_distance", least=num_buckets // 2 + 1),
        ),
        sliding_windows=(None,) * (num_encoding + num_decoding),
        moe_layers=(*encoding, *(num_encoding + layer for layer in decoding)),
        router=Router(
            bias=keys.flag("router_bias"),
            has_exact_logits=True,
            capacity=keys.count("expert_capacity"),
        ),
        expert=mlp,
        dense=mlp,
        encoder=Encoder(
            num_layers=num_encoding, start_token=keys.count("decoder_start_token_id", least=0)
        ),
        logit_scale=keys.count("hidden_size") ** -0.5,
    )


def _sparse(keys: ConfigKeys, stack: str, num_layers: int) -> list[int]:
    """Layers of a stack that have experts: every so many, from the second one on; none by a step of
    0. transformers takes the step out of the number of such layers where the file has none."""
    name = f"{stack}_sparse_step"
    step = keys.count_or_zero(name)
    if keys.value(name) is None:
        num_sparse = keys.count_or_zero(f"num_sparse_{stack}_layers")
        step = num_layers // num_sparse if num_sparse else num_layers
    if not step:
        return []
    return [layer for layer in range(num_layers) if layer % step == 1 or step == 1]


SWITCH_TRANSFORMERS = FamilySpec(
    architecture="SwitchTransformersForConditionalGeneration",
    model_type="switch_transformers",
    defaults={
        "num_experts_per_tok": 1,
        "decoder_start_token_id": 0,
        # Positions are relative, so there is no limit: as long as those that it was trained on.
        "max_position_embeddings": 1024,
    },
    spelling={
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "dense_act_fn",
    },
    computed={
        "router_dtype": ("float32",),
        "tie_word_embeddings": (True,),  # else each stack would have an embedding of its own
    },
    layers=_layers,
    names=TensorNames(
        roles={
            "embedding": ("shared.weight",),
            "head": ("lm_head.weight",),
            "final_norm": ("decoder.final_layer_norm.weight",),
            "encoder_norm": ("encoder.final_layer_norm.weight",),
            **{
                f"{stack}_bias": (
                    f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                )
                for stack in ("encoder", "decoder")
            },
            "input_norm": (_BLOCK + "layer.0.layer_norm.weight",),
            "mlp_norm": (_MLP + "layer_norm.weight",),
            **{role: (f"{_SELF}{role}.weight",) for role in "qkvo"},
            "cross_norm": (_BLOCK + "layer.1.layer_norm.weight",),
            **{f"cross_{role}": (f"{_CROSS}{role}.weight",) for role in "qkvo"},
            "router": (_MLP + "mlp.router.classifier.weight",),
            "router_bias": (_MLP + "mlp.router.classifier.bias",),
            "mlp_up": (_MLP + "mlp.wi.weight",),
            "mlp_down": (_MLP + "mlp.wo.weight",),
        },
        experts=(
            ExpertLayout(
                weights={
                    _MLP + "mlp.experts.expert_{expert}.wi.weight": ("up",),
                    _MLP + "mlp.experts.expert_{expert}.wo.weight": ("down",),
                }
            ),
        ),
    ),
)
