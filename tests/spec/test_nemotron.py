"""Shapes of Nemotron-H, whose files number what mixes tokens, experts and MLPs one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.models import load_model
from moebatch.spec.model.recurrence import StateSpace
from tests.shapes import load_shape
from tests.spec.described import Described

FAMILY = Described("nemotron_h", "NemotronHForCausalLM")
shape_of = FAMILY.shape_of
LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 3,
    "ssm_state_size": 7,
}


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("ME*-", {}),
        ("MEMM*EM-*", {"mlp_bias": True, "use_bias": True, "use_conv_bias": False}),
        ("*E*E", {"n_routed_experts": 12, "num_experts_per_tok": 5, "n_groups": 1}),
        ("ME*E", {"moe_latent_size": 14}),
        ("ME*-", {"moe_latent_size": 40, "mlp_bias": True}),
        ("M*-ME", {"conv_kernel": 3, "n_group": 2, "topk_group": 1, "mlp_hidden_act": "silu"}),
    ],
)
def test_shapes_are_those_of_models_that_transformers_makes(
    pattern: str, options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    entries = {**SIZES, **options, "layers_block_type": [LETTERS[each] for each in pattern]}
    config = FAMILY.transformers(**entries)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(**entries)
    numbers = {name: weight.numel() for name, weight in model.named_parameters()}
    corrections = [each for name, each in model.named_buffers() if "correction" in name]
    experts = sum(count for name, count in numbers.items() if ".experts." in name)
    assert shape.num_params == sum(numbers.values()) + sum(each.numel() for each in corrections)
    assert shape.num_experts * shape.expert_params * len(shape.moe_layers) == experts
    assert len(shape.moe_layers) == len(corrections) == pattern.count("E")
    assert shape.num_layers == pattern.count("M") + pattern.count("*")
    assert shape.router.scale == config.routed_scaling_factor
    assert shape.activation == config.mlp_hidden_act
    assert shape.rms_eps == config.layer_norm_epsilon
    for each in (shape.expert, shape.shared_expert, shape.dense):
        assert each is None or each.roles == ("up", "down")
    attention, recurrence = shape.attention, shape.recurrence
    assert isinstance(attention, GroupedAttention)
    assert (attention.rotary_dim, attention.score_scale) == (0, None)
    if recurrence is not None:
        assert isinstance(recurrence, StateSpace)
        assert recurrence.num_key_heads == config.n_groups
    config.architectures = [FAMILY.architecture]
    config.save_pretrained(tmp_path)
    assert load_shape(tmp_path) == shape


def test_layers_that_mix_tokens_are_one_with_the_experts_or_the_mlp_behind_them() -> None:
    shape = shape_of(hybrid_override_pattern="MEM*-MM*E")
    assert shape.num_layers == 6
    assert shape.recurrent_layers == (0, 1, 3, 4)
    assert (shape.moe_layers, shape.bare_layers) == ((0, 5), (1, 3, 4))
    assert [shape.numbers_of(layer) for layer in range(6)] == [
        *((0, 1), (2, 2), (3, 4)),
        *((5, 5), (6, 6), (7, 8)),
    ]
    dense, bare = shape.layer_tensors(2), shape.layer_tensors(1)
    assert {"input_norm", "mlp_norm", "q", "mlp_up", "mlp_down"} <= dense.keys()
    assert "mlp_gate" not in dense and "router" not in dense
    assert all(role == "input_norm" or role.startswith("recurrent_") for role in bare)
    names = FAMILIES[shape.architecture].names
    found = names.layer_weights(shape, 5, ())
    assert found["input_norm"][0] == "backbone.layers.7.norm.weight"
    assert found["mlp_norm"][0] == "backbone.layers.8.norm.weight"
    assert found["router"][0] == "backbone.layers.8.mixer.gate.weight"


def test_kinds_of_layers_are_read_however_files_say_them() -> None:
    types = [LETTERS[each] for each in "ME*EM-"]
    older = [{"linear_attention": "mamba", "full_attention": "attention"}.get(t, t) for t in types]
    shape = shape_of(hybrid_override_pattern="ME*EM-", num_hidden_layers=6)
    assert shape.num_layers == 3
    for said in (
        {"layers_block_type": types},
        {"layers_block_type": older},
        {"layer_types": types},
        {"layers_block_type": types, "hybrid_override_pattern": "M*"},  # transformers looks here
        {"hybrid_override_pattern": "ME*EM-", "num_hidden_layers": 99},  # which is not looked at
    ):
        assert shape_of(**said) == shape
    assert shape_of() == shape_of(hybrid_override_pattern="ME*-")
    renamed = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False}
    own = {"n_groups": 4, "conv_kernel": 3, "use_conv_bias": False}
    assert shape_of(**renamed) == shape_of(**own) != shape_of()


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"hybrid_override_pattern": "EM*"}, "hybrid_override_pattern: expected up to 10000 layer"),
    ({"hybrid_override_pattern": "ME-*"}, "behind each of which may be one with experts (E)"),
    ({"hybrid_override_pattern": ""}, "got ''"),
    ({"hybrid_override_pattern": "M" * 10001}, "expected up to 10000 layers"),
    ({"layers_block_type": ["moe", "full_attention"]}, "layers_block_type: expected up to"),
    ({"layers_block_type": ["conv"]}, "layers_block_type: expected a list of linear_attention"),
    ({"layers_block_type": "ME"}, "layers_block_type: expected a list of linear_attention"),
    ({"hybrid_override_pattern": "MEME"}, "no layer has full attention"),
    ({"hybrid_override_pattern": "M-*-"}, "no layer has experts"),
    ({"moe_latent_size": 0}, "moe_latent_size: expected a whole number from 1 to"),
    ({"attention_bias": True}, "attention_bias: expected false, since biases of attention"),
    ({"sliding_window": 9}, "sliding_window: expected null, since layers of this family"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act: expected silu or swish, got 'gelu'"),
    ({"n_groups": 3}, "mamba_num_heads (128) must be a multiple of n_groups (3)"),
    ({"time_step_limit": [0.001, 0.1]}, "time_step_limit: expected [0.0, Infinity], got"),
    ({"n_groups": 4, "mamba_n_groups": 2}, "n_groups (4) and mamba_n_groups (2) contradict"),
)


def test_nemotron_3_nano_is_as_large_as_its_card_says() -> None:
    """31.6 billion parameters, of which 3.2 take part in a token, embeddings left out."""
    shape = load_model("nemotron-3-nano-30b-a3b").shape
    assert (shape.num_layers, len(shape.moe_layers), len(shape.bare_layers)) == (29, 23, 6)
    assert shape.num_params == 31_577_940_288
    idle = len(shape.moe_layers) * (shape.num_experts - shape.experts_per_token)
    head = shape.vocab_size * shape.hidden_size
    assert round((shape.num_params - idle * shape.expert_params - head) / 1e8) == 32
