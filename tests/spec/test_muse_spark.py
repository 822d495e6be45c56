"""Muse Spark's text: windows and rotary positions by layer, latents, and learnt shares."""

from typing import Any

import pytest
import torch

from moebatch.spec.model.blocks import Mixing
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.models import load_model
from tests import tiny
from tests.spec.described import Described, transformers

FAMILY = Described("muse_spark", "MuseSparkForConditionalGeneration", "muse_spark_text")
shape_of = FAMILY.shape_of
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "moe_hidden_size": 18,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 10,
}
ROTARY = {"rope_type": "default", "rope_theta": 30.0}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        SIZES,
        {**SIZES, "mlp_layer_types": ["sparse", "dense"] * 2 + ["dense"], "attention_bias": True},
        {
            **SIZES,
            "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 2,
            "layer_rope_theta": [30.0, 0, 30.0, 0, 30.0],
            "rope_parameters": ROTARY,
            "sliding_window": 7,
        },
        {"output_multiplier": 0.5, "post_norm_eps": 0.1, "residual_gate_temperature": 2.0},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = shape_of(**entries), transformers("muse_spark_text", **entries)
    sparse = [n for n, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    assert list(shape.moe_layers) == sparse
    assert (shape.latent_width, shape.num_layers) == (
        config.moe_hidden_size,
        config.num_hidden_layers,
    )
    assert shape.logit_scale == shape.router.logit_scale == config.output_multiplier
    assert shape.logit_cap == config.final_logit_softcapping
    assert shape.out_eps == config.post_norm_eps
    assert shape.mlp_residual.mixing == Mixing(temperature=config.residual_gate_temperature)
    for layer, kind in enumerate(config.layer_types):
        attention = shape.attention_of(layer)
        assert isinstance(attention, GroupedAttention)
        assert attention.rotary_dim == config.head_dim * bool(config.layer_rope_theta[layer])
        assert attention.scale == pytest.approx(config.qk_scale_factor * config.head_dim**-0.5)
        window = config.sliding_window if kind == "sliding_attention" else None
        assert shape.sliding_windows[layer] == window


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"layer_rope_theta": [0] * 5}, "no layer has rotary positions; models without are not run"),
    (
        {"layer_rope_theta": [0, 10.0, 10.0, 0, 0]},
        "text_config.layer_rope_theta: expected a list with 0 or rope_theta (500000.0) for each "
        "of 5 layers",
    ),
    ({"layer_rope_theta": [500_000.0]}, "layer_rope_theta: expected a list with 0 or rope_theta"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 5 layers"),
    ({"sliding_window": None}, "sliding_window: expected a whole number"),
    ({"final_logit_softcapping": None}, "final_logit_softcapping: expected a number above 0"),
    ({"residual_gate_temperature": 0}, "residual_gate_temperature: expected a number above 0"),
    ({"post_norm_eps": 0}, "post_norm_eps: expected a number above 0"),
    ({"moe_hidden_size": None}, "moe_hidden_size: expected a whole number"),
    **SIZES,
)


def test_some_norms_have_no_weights_and_others_are_of_latents() -> None:
    shape = shape_of(**SIZES, mlp_layer_types=["dense", *["sparse"] * 4])
    dense, sparse = map(shape.layer_tensors, (0, 1))
    own = {"latent_in": (18, 32), "latent_norm": (18,), "latent_out": (32, 18)}
    own["each_expert_norm"] = (18,)
    assert own.items() <= sparse.items() and not own.keys() & dense.keys()
    for tensors in (dense, sparse):
        norms = {role for role in tensors if role.endswith("norm")} - own.keys()
        assert norms == {"input_norm", "mlp_norm", "mlp_out_norm"}
        assert tensors["mixer_share"] == tensors["mlp_share"] == (32,)


def test_one_of_four_layers_sees_everything() -> None:
    shape = load_model("muse-spark-open-816b-a42b").shape
    assert [n for n in range(62) if shape.sliding_windows[n] is None] == [*range(1, 62, 4)]
    assert shape.attends_beside_gpu


@pytest.mark.parametrize(
    "entries", [{}, SIZES, {**SIZES, "mlp_layer_types": ["dense"] * 4 + ["sparse"]}]
)
def test_every_number_is_counted(entries: dict[str, Any]) -> None:
    """Those of the text, and of the head, which transformers has beside it."""
    from transformers import AutoModel

    shape, config = shape_of(**entries), transformers("muse_spark_text", **entries)
    with tiny.quiet(), torch.device("meta"):
        tensors = AutoModel.from_config(config).state_dict().values()
    head = shape.vocab_size * shape.hidden_size
    assert shape.num_params == head + sum(tensor.numel() for tensor in tensors)
