"""Gemma 4 and Llama 4, whose layers attend in two ways, as their configurations describe them."""

from typing import Any

import pytest

from moebatch.errors import ConfigError
from moebatch.plan.pricing.dense import DenseParams
from moebatch.spec.model.attention import Attention, Temperature
from moebatch.spec.model.cache_layout import SinkWindow
from moebatch.spec.model.config_keys import FaultyConfig
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.models import load_model
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from tests import tiny

GEMMA: dict[str, Any] = {
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}


def gemma(**entries: Any) -> ModelShape:
    config = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    return read_shape(config | GEMMA | entries, "config.json")


def llama(**entries: Any) -> ModelShape:
    config = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    return read_shape(config | entries, "config.json")


def attentions(shape: ModelShape) -> tuple[GroupedAttention, GroupedAttention]:
    usual, other = shape.attentions
    assert isinstance(usual, GroupedAttention) and isinstance(other, GroupedAttention)
    return usual, other


def layers_of(shape: ModelShape, attention: Attention) -> tuple[int, ...]:
    return tuple(n for n in range(shape.num_layers) if shape.attention_of(n) == attention)


@pytest.mark.parametrize("family", ["gemma4_text", "llama4_text"])
@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "num_hidden_layers": 2}])
def test_numbers_are_those_of_the_model_that_transformers_makes(
    family: str, options: dict[str, Any]
) -> None:
    changes = {"layer_types": None} if family == "gemma4_text" and options else {}
    model = tiny.random_model(family, **options, **changes)
    shape = read_shape(model.config.to_dict(), "config.json")
    numbers = {weight.data_ptr(): weight.numel() for weight in model.parameters()}
    scalars = shape.num_layers * shape.scales_layers
    assert shape.num_params == sum(numbers.values()) + scalars
    assert shape.max_positions == 512


def test_global_layers_of_gemma_have_heads_of_their_own() -> None:
    shape = load_model("gemma-4-26b-a4b").shape
    sliding, whole = attentions(shape)
    assert layers_of(shape, whole) == (5, 11, 17, 23, 29)
    assert [shape.sliding_windows[n] for n in (0, 4, 5, 29)] == [1024, 1024, None, None]
    assert (sliding.num_kv_heads, sliding.head_dim) == (8, 256)
    assert (whole.num_kv_heads, whole.head_dim, whole.values_are_keys) == (2, 512, True)
    assert "v" not in shape.layer_tensors(5) and "v" in shape.layer_tensors(4)
    # 25 layers of 2 x 8 heads x 256 and 5 of 2 x 2 heads x 512 numbers of 2 bytes
    assert shape.kv_bytes_per_token(2) == 25 * 8192 + 5 * 4096
    whole_group, ring = shape.cache_groups(100_000)
    assert whole_group.is_whole and whole_group.layout.token_bytes(2) == 4096
    assert ring.most_rows == 1024 + 511 and ring.layout.token_bytes(2) == 8192


def test_global_heads_count_in_a_mean_layer_of_gemma() -> None:
    """25 output projections of 16 heads x 256 numbers, 5 of 16 x 512."""
    shape = load_model("gemma-4-26b-a4b").shape
    mean = (25 * 16 * 256 + 5 * 16 * 512) * 2816 // 30
    assert DenseParams(shape).put_out.decoding == mean


def test_global_heads_are_as_files_say_or_as_transformers_writes_them() -> None:
    released = gemma(attention_k_eq_v=True, num_global_key_value_heads=2, global_head_dim=64)
    entry = {"head_dim": 64, "num_key_value_heads": 2}
    written = gemma(
        attention_k_eq_v=True,
        per_layer_config={f"{layer:02d}": entry for layer in (5, 11, 17, 23, 29)},
    )
    assert released == written
    assert gemma(num_global_key_value_heads=2).attentions[1].num_kv_heads == 4, "values apart"


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_transformers_leaves_out_sizes_of_gemma_that_are_the_same_in_all_layers(
    kv_heads: int, head_dim: int
) -> None:
    sizes = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    usual = {"num_key_value_heads": 4, "head_dim": 32}
    entry = {key: size for key, size in sizes.items() if size != usual[key]}
    shape = gemma(
        **usual,
        attention_k_eq_v=True,
        per_layer_config={str(layer): entry for layer in (5, 11, 17, 23, 29)} if entry else {},
    )
    whole = shape.attentions[-1]
    assert (whole.num_kv_heads, whole.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_text_model_of_llama_says_whether_its_head_is_tied(is_tied: bool) -> None:
    """transformers has the head in the text model, that of other families beside it."""
    config: dict[str, Any] = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {"tie_word_embeddings": is_tied},
        "tie_word_embeddings": not is_tied,
    }
    assert read_shape(config, "config.json").tie_word_embeddings == is_tied


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"num_kv_shared_layers": 2}, r"num_kv_shared_layers \(2\) must be 0"),
        ({"hidden_size_per_layer_input": 256}, r"hidden_size_per_layer_input \(256\) must be 0"),
        ({"enable_moe_block": False}, "models without experts"),
        ({"use_bidirectional_attention": "all"}, "not computed"),
        ({"num_experts": None}, "num_experts: expected a whole number"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "the same in all layers"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            r"num_attention_heads \(8\) must be a multiple of the 3",
        ),
        ({"global_head_dim": 7}, r"global_head_dim \(7\) must be even"),
    ],
)
def test_what_is_not_computed_of_gemma_is_refused_by_name(
    entries: dict[str, Any], says: str
) -> None:
    with pytest.raises(FaultyConfig, match=says):
        gemma(**entries)


def test_layers_of_llama() -> None:
    scout, maverick = (load_model(f"llama-4-{name}").shape for name in ("scout", "maverick"))
    assert scout.sliding_windows == (8192, 8192, 8192, None) * 12
    for shape in (scout, maverick):
        assert layers_of(shape, attentions(shape)[1]) == tuple(range(3, 48, 4))
    assert scout.moe_layers == tuple(range(48)) and maverick.moe_layers == tuple(range(1, 48, 2))
    rotating, plain = attentions(scout)
    assert rotating.qk_norm == "unscaled" and rotating.rotary_dim == 128
    assert plain.qk_norm == "none" and plain.rotary_dim == 0
    assert plain.temperature == Temperature(8192, 0.1) and rotating.temperature is None
    assert maverick.attention.num_heads == 40 and attentions(maverick)[0].qk_norm == "none"
    assert [str(group) for group in scout.cache_groups(10**6)] == ["all tokens", "8703 tokens"]
    assert llama(attention_chunk_size=None).sliding_windows == (None,) * 48


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"no_rope_layers": [1, 0]}, "expected 48 zeros and ones"),
        ({"no_rope_layers": [0] * 48}, "no layer has rotary positions"),
        ({"moe_layers": [48]}, "a list of layers below 48"),
        (
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48},
            "attention_chunk_size: expected a whole number",
        ),
        ({"layer_types": ["sliding_attention"] * 48}, "full_attention and chunked_attention"),
    ],
)
def test_faults_of_llama_are_said(entries: dict[str, Any], says: str) -> None:
    with pytest.raises(FaultyConfig, match=says):
        llama(**entries)


def test_sinks_are_refused_where_layers_attend_in_two_ways() -> None:
    for shape in (gemma(), llama()):
        assert shape.seen_through(None) is shape
        with pytest.raises(ConfigError, match=r"model\.attention: .* attends in two ways"):
            shape.seen_through(SinkWindow(4, 64))
