"""Shapes of models with an encoder, against transformers' own."""

from typing import Any

import pytest

from moebatch.spec.model.config_keys import FaultyConfig
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from moebatch.spec.workload import Workload

SIZES = {
    "vocab_size": 50,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 20,
    "num_layers": 5,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "num_experts": 6,
}


def shape_of(**config: Any) -> ModelShape:
    named = {"architectures": ["SwitchTransformersForConditionalGeneration"]}
    return read_shape({**named, **SIZES, **config}, "config.json")


@pytest.mark.parametrize(
    "config",
    [
        {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        {"num_sparse_encoder_layers": 5, "num_sparse_decoder_layers": 0},
        {"encoder_sparse_step": 3, "decoder_sparse_step": 1, "router_bias": True},
        {"num_sparse_encoder_layers": 5, "num_sparse_decoder_layers": 9},
        {"encoder_sparse_step": 1, "decoder_sparse_step": 0},
        {"num_decoder_layers": None},
    ],
)
def test_all_weights_are_counted(config: dict[str, Any]) -> None:
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    model = switch.SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(**{**SIZES, **config})
    )
    shape, blocks = shape_of(**config), [*model.encoder.block, *model.decoder.block]
    assert shape.num_params == sum(weight.numel() for weight in model.parameters())
    assert shape.num_layers == len(blocks)
    sparse = [number for number, block in enumerate(blocks) if block.is_sparse]
    assert list(shape.moe_layers) == sparse


def test_layers_that_decode_cache_a_sequence_and_those_that_encode_do_not() -> None:
    shape = shape_of()
    (group,) = shape.cache_groups(100)
    assert group.layers == (5, 6, 7, 8)
    assert group.is_whole
    assert shape.kv_bytes_per_token(4) == 4 * (2 * 4 * 6 * 4)
    work = shape.cached(Workload.uniform(prompt_tokens=9, new_tokens=3))
    assert work.is_encoded
    assert work.fewest_pass_tokens == 12


def test_names_say_the_stack_of_a_layer() -> None:
    shape = shape_of()
    assert shape.place_of(4) == {"stack": "encoder", "layer": 4, "mlp": 1}
    assert shape.place_of(5) == {"stack": "decoder", "layer": 0, "mlp": 2}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("router_dtype", "bfloat16", "expected float32, got 'bfloat16'"),
        ("tie_word_embeddings", False, "expected true, got false"),
        ("num_decoder_layers", 10**6, "expected a whole number from 1 to 10000, got 1000000"),
    ],
)
def test_what_is_not_computed_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(FaultyConfig, match=f"{key}: {message}"):
        shape_of(**{key: value})
