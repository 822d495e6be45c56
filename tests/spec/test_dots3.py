"""dots3-note's text: latents of two sizes, in layers that slide and where tokens choose."""

from typing import Any

import pytest

from moebatch.errors import CheckpointError
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.models import load_model
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from tests.spec.described import Described, assert_as_many_layers, transformers

TEXT = Described("dots3_note_text", "Dots3NoteForCausalLM")
OWN = {"architectures": ["Dots3NoteForConditionalGeneration"], "model_type": "dots3_note"}
SIZES = {
    "vocab_size": 50,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    "head_dim": 16,
}
SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 22,
    "swa_head_dim": 18,
    "swa_qk_nope_head_dim": 6,
    "swa_v_head_dim": 7,
}
RELEASED = {
    **SIZES,
    **SLIDING,
    "moe_shared_expert_intermediate_size": 28,
    "sliding_window_size": 9,
    "rope_theta": 700.0,
    "swa_rope_theta": 30.0,
    "moe_layer_freq": [1, 0, 1, 1, 0, 1],
    "layer_types": ["full_attention", "sliding_attention"] * 3,
    "use_dsa": True,
    "n_shared_experts": 2,
}
"""Keys of released files, as transformers reads them."""


def released(**entries: Any) -> ModelShape:
    return read_shape({**OWN, **entries}, "m/config.json")


@pytest.mark.parametrize(
    "entries",
    [
        {},
        SIZES,
        SIZES | SLIDING,
        RELEASED,
        {**SIZES, "use_dsa": False, "moe_layer_freq": 2},
        {**SIZES, "use_sliding_window": False, "first_k_dense_replace": 0},
        {**RELEASED, "mlp_layer_types": ["sparse", "dense"] * 3, "swa_qk_rope_head_dim": 12},
        {
            **SIZES,
            "layer_types": ["sliding_attention", "indexed_attention", "full_attention"] * 2,
            "per_layer_config": {
                layer: {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 14}
                for layer in ("00", "03")
            },
        },
        {"n_group": 4, "topk_group": 2, "num_local_experts": 64, "index_topk": 512},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    """Of the text alone, and of files with others beside it, in whose place text may lie."""
    config = transformers("dots3_note_text", **entries)
    shape = TEXT.shape_of(**entries)
    assert_as_many_layers(shape, config)
    assert shape.num_experts == config.n_routed_experts
    shared = config.n_shared_experts * config.shared_experts_intermediate_size
    assert shape.shared_expert_width == shared
    for layer, kind in enumerate(config.layer_types):
        own, attention = config.per_layer_config[layer], shape.attention_of(layer)
        assert isinstance(attention, LatentAttention)
        assert (attention.indexer is not None) == (kind == "indexed_attention")
        window = config.sliding_window if kind == "sliding_attention" else None
        assert (attention.rotary, shape.sliding_windows[layer]) == (kind, window)
        assert (attention.num_heads, attention.query_rank, attention.kv_rank) == (
            own.num_attention_heads,
            own.q_lora_rank,
            own.kv_lora_rank,
        )
        assert (attention.nope_head_dim, attention.rope_head_dim, attention.value_head_dim) == (
            own.qk_nope_head_dim,
            own.qk_rope_head_dim,
            own.v_head_dim,
        )
    nested = {"text_config": {"model_type": "dots3_note_text", **entries}}
    assert released(**entries) == released(**nested)
    TEXT.assert_tensors_are_those_of_transformers(**entries)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected 6, as many as num_attention"),
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads: expected 4, as many as swa_num"),
        (
            {"swa_qk_rope_head_dim": 8},
            "swa_qk_rope_head_dim: expected an even number that is swa_h",
        ),
        ({"swa_head_dim": 6}, "swa_qk_rope_head_dim: expected an even number that is swa_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank: expected a whole number"),
        ({"index_head_dim": 6}, "index_head_dim: expected at least qk_rope_head_dim, 8"),
        ({"mlp_bias": True}, "mlp_bias: expected false, got true"),
        ({"n_shared_experts": 0}, "n_shared_experts: expected a whole number from 1"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types: expected a list of indexed_att"),
        ({"rope_parameters": 7}, "rope_parameters: expected an object, got 7"),
        (
            {"per_layer_config": {"2": {"hidden_size": 7}}},
            "per_layer_config: expected an object with sizes of attention",
        ),
        (
            {"per_layer_config": {"2": {"kv_lora_rank": 7}}},
            "per_layer_config: expected the same sizes for all layers that slide, or do not",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_the_names_of_the_file(
    entries: dict[str, Any], message: str
) -> None:
    assert message in TEXT.faults_of(**{**SIZES, **SLIDING, **entries})


def test_an_object_for_text_has_to_be_one() -> None:
    with pytest.raises(CheckpointError, match="text_config: expected an object"):
        released(text_config=7)


def test_latents_of_layers_that_slide_are_written_over() -> None:
    """1,024 numbers and 64 that rotate of what a window and a slice see, 512 and 64 of all."""
    latents, keys, sliding = load_model("dots3-note-prev").shape.cache_groups(4096)
    assert [group.layout.parts[0].width for group in (latents, keys, sliding)] == [576, 128, 1088]
    assert [len(group.layers) for group in (latents, keys, sliding)] == [13, 13, 33]
    assert sliding.most_rows == 512 + 511


def test_short_rows_choose_nothing() -> None:
    shape = load_model("dots3-note-prev").shape
    short = shape.attending_within(2048)
    assert shape.attending_within(2049) is shape
    assert {each.most_chosen for each in short.attentions} == {None}
    assert short.kv_bytes_per_token(2) == 2 * (13 * 576 + 33 * 1088)
    assert shape.kv_bytes_per_token(2) == short.kv_bytes_per_token(2) + 2 * 13 * 128
    assert short.attends_beside_gpu and not shape.attends_beside_gpu
