"""Beam: layers with positions and without, and hidden states that are divided by depth."""

from typing import Any

import pytest

from moebatch.spec.model.attention import PowerTemperature
from moebatch.spec.model.models import load_model
from tests.spec.described import Described

BEAM = Described("beam", "BeamForCausalLM")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "head_dim": 10,
}
ROTARY = {"rope_type": "default", "rope_theta": 30.0}


@pytest.mark.parametrize(
    "entries",
    [
        SIZES,
        {**SIZES, "layer_types": ["full_attention", *["sliding_attention"] * 6]},
        {
            **SIZES,
            "attention_bias": True,
            "rope_parameters": {"sliding_attention": None, "full_attention": ROTARY},
        },
        {**SIZES, "rope_parameters": {"sliding_attention": ROTARY, "full_attention": ROTARY}},
    ],
)
def test_layers_without_rotary_parameters_have_queries_that_grow(entries: dict[str, Any]) -> None:
    shape, config = BEAM.shape_of(**entries), BEAM.transformers(**entries)
    for layer, kind in enumerate(config.layer_types):
        attention, rotates = shape.attention_of(layer), config.rope_parameters[kind] is not None
        assert attention.rotary_dim == 10 * rotates
        assert (attention.rotary == kind) == rotates
        assert attention.temperature == (None if rotates else PowerTemperature(2048, 0.1))
    BEAM.assert_tensors_are_those_of_transformers(**entries)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_parameters": ROTARY}, "rope_parameters: expected an object with sliding_attention"),
        ({"rope_parameters": 3}, "rope_parameters: expected an object with sliding_attention and"),
        ({"sliding_window": None}, "sliding_window: expected a whole number from 1"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types: expected a list of full_att"),
        ({"topk_group": 1, "n_group": 6}, "topk_group (1) of 6 groups of 2 experts do not hold"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping: expected a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(entries: dict[str, Any], message: str) -> None:
    assert message in BEAM.faults_of(**{**SIZES, **entries})


def test_norms_add_what_sums_that_are_not_divided_ask_for() -> None:
    """Embeddings are one part, and each layer has two."""
    shape = BEAM.shape_of(**SIZES, rms_norm_eps=0.5)
    found = [shape.norm_eps(role, layer) for layer in (0, 6) for role in ("input_norm", "mlp_norm")]
    assert found == [0.5, 1.0, 6.5, 7.0]
    assert shape.norm_eps("final_norm", None) == 7.5


def test_beam_is_as_large_as_its_name_says() -> None:
    shape = load_model("beam-1.0-501b-a23b").shape
    active = shape.num_params - len(shape.moe_layers) * 248 * shape.expert_params
    assert active / 1e9 == pytest.approx(23, abs=0.5)
    whole, sliding = shape.cache_groups(4096)
    assert (len(whole.layers), len(sliding.layers), sliding.most_rows) == (9, 43, 512 + 511)
    assert whole.layout.token_bytes(2) == sliding.layout.token_bytes(2) == 2 * 2 * 8 * 128
