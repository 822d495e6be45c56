"""Names and shapes of tensors in both layouts of experts."""

from typing import Any

import pytest
import torch

from moebatch.model.families import (
    Part,
    expected_shape,
    expert_weights,
    family_of,
    required_tensors,
)
from moebatch.spec.shape import ModelShape
from moebatch.spec.shape_reader import read_shape
from tests import tiny
from tests.model.cases import CASES
from tests.spec.test_shape import ARCHITECTURES, minimal


def shape_of(family: str, **entries: Any) -> ModelShape:
    return read_shape(minimal(family, **entries), "config.json")


@pytest.mark.parametrize("case", [name for name in CASES if "rope" not in name])
def test_names_and_shapes_are_those_of_written_checkpoints(case: str, tiny_checkpoint: Any) -> None:
    from moebatch.spec.shape_reader import load_shape
    from tests.model.driver import read_tensors

    family, options = CASES[case]
    folder = tiny_checkpoint(family, **options)
    found = {name: tuple(tensor.shape) for name, tensor in read_tensors(folder).items()}
    assert required_tensors(load_shape(folder), found) == found


def test_mixtral_experts_in_both_layouts() -> None:
    shape = shape_of("mixtral", num_hidden_layers=2)
    family = family_of(shape)
    prefix = "model.layers.1.block_sparse_moe.experts.5"
    assert family.expert_parts(shape, 1, 5, ()) == (
        Part(f"{prefix}.w1.weight", None),
        Part(f"{prefix}.w3.weight", None),
        Part(f"{prefix}.w2.weight", None),
    )
    stacked = "model.layers.1.mlp.experts"
    assert family.expert_parts(shape, 1, 5, {f"{stacked}.gate_up_proj"}) == (
        Part(f"{stacked}.gate_up_proj", 5),
        Part(f"{stacked}.down_proj", 5),
    )


@pytest.mark.parametrize(
    "router", ["model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"]
)
@pytest.mark.parametrize("fused", [False, True])
def test_mixtral_router_under_either_name(router: str, fused: bool) -> None:
    """Whatever the layout of the experts."""
    shape = shape_of("mixtral")
    names = {router} | ({"model.layers.0.mlp.experts.gate_up_proj"} if fused else set())
    assert family_of(shape).layer_tensors(shape, 0, names)["router"] == router


def test_missing_tensors_are_required_under_their_released_names() -> None:
    shape = shape_of("mixtral", num_hidden_layers=1, num_local_experts=2)
    required = required_tensors(shape, ())
    assert required["model.layers.0.block_sparse_moe.gate.weight"] == (2, 4096)
    assert required["model.layers.0.block_sparse_moe.experts.1.w2.weight"] == (4096, 14336)
    assert required["lm_head.weight"] == required["model.embed_tokens.weight"] == (32000, 4096)
    assert len(required) == 3 + 6 + 1 + 2 * 3


def test_tied_head_is_required_only_if_it_is_there() -> None:
    shape = shape_of("olmoe", tie_word_embeddings=True)
    assert "lm_head.weight" not in required_tensors(shape, ())
    assert "lm_head.weight" in required_tensors(shape, {"lm_head.weight"})


def test_layers_without_experts() -> None:
    shape = shape_of("qwen2_moe", mlp_only_layers=[0], intermediate_size=10)
    family = family_of(shape)
    assert "mlp_gate" in family.layer_tensors(shape, 0, ())
    assert "router" not in family.layer_tensors(shape, 0, ())
    assert "shared_mix" in family.layer_tensors(shape, 1, ())
    with pytest.raises(AssertionError, match="layer 0 has no experts"):
        family.expert_parts(shape, 0, 0, ())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_required_numbers_are_all_numbers(family: str) -> None:
    shape = shape_of(family, tie_word_embeddings=family == "olmoe")
    total = sum(torch.Size(size).numel() for size in required_tensors(shape, ()).values())
    assert total == shape.num_params
    assert shape.architecture == ARCHITECTURES[family]


def test_expert_weights_are_views() -> None:
    gate_up, down = torch.randn(10, 4), torch.randn(4, 5)
    fused = expert_weights((gate_up, down))
    assert fused.gate_FD.data_ptr() == gate_up.data_ptr()
    assert torch.equal(fused.up_FD, gate_up[5:])
    assert fused.up_FD.data_ptr() == gate_up[5:].data_ptr()
    assert fused.down_DF is down
    apart = expert_weights((gate_up[:5], gate_up[5:], down))
    assert all(map(torch.equal, apart, fused))


def test_expected_shape_of_roles() -> None:
    shape = shape_of("qwen3_moe", head_dim=128, attention_bias=True)
    assert expected_shape(shape, "q") == (4096, 2048)
    assert expected_shape(shape, "k_bias") == (512,)
    assert expected_shape(shape, "q_norm") == (128,)
    assert expected_shape(shape_of("olmoe"), "k_norm") == (2048,)
    assert expected_shape(shape, "experts_gate_up") == (128, 1536, 2048)
