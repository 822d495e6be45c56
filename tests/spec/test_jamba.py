"""Shapes of Jamba, whose files say in turns of how many layers one attends, and one has experts."""

from pathlib import Path
from typing import Any

import pytest

from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.models import load_model
from moebatch.spec.model.recurrence import SelectiveScan
from tests.shapes import load_shape
from tests.spec.described import Described

FAMILY = Described("jamba", "JambaForCausalLM")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 40,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 5,
    "mamba_d_state": 7,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_layer_period": 3, "attn_layer_offset": 0, "expert_layer_offset": 0},
        {"num_hidden_layers": 5, "expert_layer_period": 3, "mamba_dt_rank": 24, "mamba_expand": 3},
        {"mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3},
        {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 4},
    ],
)
def test_shapes_are_those_of_models_that_transformers_makes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    entries = SIZES | options
    FAMILY.assert_tensors_are_those_of_transformers(**entries)
    shape, config = FAMILY.shape_of(**entries), FAMILY.transformers(**entries)
    kinds = ["linear_attention" if shape.is_recurrent(n) else "full_attention" for n in range(32)]
    assert kinds[: shape.num_layers] == config.layer_types
    experts = [shape.num_experts if shape.is_moe(n) else 1 for n in range(shape.num_layers)]
    assert experts == config.layers_num_experts
    assert (shape.rms_eps, shape.activation) == (config.rms_norm_eps, config.hidden_act)
    assert (shape.router.norm_order, shape.experts_per_token) == (None, 2)
    assert shape.max_positions == config.max_position_embeddings
    assert isinstance(shape.attention, GroupedAttention)
    assert (shape.attention.rotary_dim, shape.attention.score_scale) == (0, None)
    if shape.recurrence is not None:
        assert isinstance(shape.recurrence, SelectiveScan)
        assert shape.recurrence.rank == config.mamba_dt_rank
        assert shape.recurrence.conv_width == config.mamba_d_conv
    config.architectures = [FAMILY.architecture]
    config.save_pretrained(tmp_path)
    assert load_shape(tmp_path) == shape


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got 'gelu'"),
    ({"num_hidden_layers": 4}, "no layer has full attention"),
    ({"num_experts": 1, "num_experts_per_tok": 1}, "no layer has experts"),
    ({"mamba_d_conv": 1}, "mamba_d_conv: expected a whole number from 2 to 16"),
    ({"mamba_dt_rank": "wide"}, "mamba_dt_rank: expected a whole number"),
    ({"attn_layer_offset": 8}, "attn_layer_offset (8) must be less than attn_layer_period (8)"),
    ({"expert_layer_offset": -1}, "expert_layer_offset: expected a whole number"),
    ({"attn_layer_period": 0}, "attn_layer_period: expected a whole number"),
)


@pytest.mark.parametrize(
    ("name", "billions", "active"), [("jamba-1.5-mini", 51.6, 12.1), ("jamba-1.5-large", 399, 94.1)]
)
def test_released_models_are_as_large_as_their_cards_say(
    name: str, billions: float, active: float
) -> None:
    """52 and 398 billion parameters, of which 12 and 94 take part in a token."""
    shape = load_model(name).shape
    assert shape.num_params == pytest.approx(billions * 1e9, rel=0.002)
    idle = len(shape.moe_layers) * (shape.num_experts - shape.experts_per_token)
    assert shape.num_params - idle * shape.expert_params == pytest.approx(active * 1e9, rel=0.002)


def test_a_state_is_a_matrix_and_the_last_inputs() -> None:
    shape = load_model("jamba-1.5-mini").shape
    assert shape.recurrence is not None
    assert shape.recurrence.state.token_bytes(2) == 16 * 8192 * 4 + 3 * 8192 * 2
    halves = shape.cached_in(states="float16").recurrence
    assert halves is not None
    assert halves.state.token_bytes(2) == 16 * 8192 * 2 + 3 * 8192 * 2
