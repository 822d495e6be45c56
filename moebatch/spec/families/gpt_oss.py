"""gpt-oss (OpenAI): can be planned."""

from moebatch.spec.config_keys import ConfigKeys
from moebatch.spec.families.family import (
    FamilySpec,
    by_layer_types,
    grouped_attention,
    usual_defaults,
)
from moebatch.spec.shape import Layers, Mlp, Router


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(
            keys, bias="attention_bias", output_bias="attention_bias", has_sinks=True
        ),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("intermediate_size"), bias=True),
        router=Router(norm_order=1.0, bias=True),
        sliding_windows=by_layer_types(keys, num_layers, lambda layer: layer % 2 == 0),
    )


GPT_OSS = FamilySpec(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    defaults=usual_defaults(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        attention_bias=True,
        sliding_window=128,
        num_experts_per_tok=4,
        num_experts=128,
        torch_dtype="bfloat16",  # which its released files leave out
    ),
    layers=_layers,
)
