"""Names, sizes and views of tensors in both layouts of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moebatch.checkpoint.direct import PAGE_BYTES
from moebatch.checkpoint.header import Extent
from moebatch.checkpoint.index import Checkpoint
from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.formats.plain import FLOAT32
from moebatch.formats.weight_format import Matrix
from moebatch.model.dense_weights import DenseWeights
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from moebatch.spec.model.stored_experts import StoredExperts, StoredPiece
from moebatch.spec.model.tensor_names import TensorNames
from tests import tiny
from tests.model.cases import CASES, PLAIN
from tests.model.driver import read_tensors
from tests.shapes import load_shape
from tests.spec.test_shape import ARCHITECTURES, minimal

PASSED_OVER = (
    *("vision", "visual", "audio_", "multi_modal", "vit_", "vit.", "patch_merge"),
    *("mm_projector", "self_attn.slope_rate", "_decay", "resampler_model", "gate.weight_1"),
    "mlp1.",
)
"""What nothing is computed with; how fast heads of lightning attention fade is worked out."""


def shape_of(family: str, **entries: Any) -> ModelShape:
    return read_shape(minimal(family, **entries), "config.json")


def names_of(shape: ModelShape) -> TensorNames:
    names = FAMILIES[shape.architecture].names
    assert names is not None
    return names


def experts_in(shape: ModelShape, *names: str) -> tuple[Checkpoint, StoredExperts]:
    """A checkpoint that holds a few names, and its experts."""
    found = Extent(path=Path(), offset=0, num_bytes=0, dtype="F32", shape=())
    tensors = dict.fromkeys(names, found)
    checkpoint = Checkpoint(folder=Path("m"), tensors=tensors, files={})
    layouts = names_of(shape).experts
    return checkpoint, StoredExperts.found(shape, layouts, checkpoint.find_format, checkpoint.look)


def required(shape: ModelShape, *names: str) -> dict[str, tuple[int, ...]]:
    """What is required of a checkpoint that holds a few names."""
    checkpoint, experts = experts_in(shape, *names)
    files = ModelFiles(
        config={}, shape=shape, checkpoint=checkpoint, experts=experts, dtype=torch.float32
    )
    return {part.name: part.shape for part in files.required_tensors()}


@pytest.mark.few(case=PLAIN)
@pytest.mark.parametrize("case", [name for name in CASES if "rope" not in name])
def test_names_and_shapes_are_those_of_written_checkpoints(case: str, tiny_checkpoint: Any) -> None:
    family, options = CASES[case]
    folder = tiny_checkpoint(family, **options)
    shape, files = load_shape(folder), open_model(folder, "auto")
    # Those that give back what they see need no matrices; those of images follow those of text.
    others = range(shape.num_experts, max(shape.num_choices, 2 * shape.num_experts))
    passed_over = (*PASSED_OVER, *(f".experts.{number}." for number in others))
    found = {
        name: tuple(tensor.shape)
        for name, tensor in read_tensors(folder).items()
        if not any(part in name for part in passed_over)
    }
    parts = list(files.required_tensors())
    assert {part.name: part.shape for part in parts} == found
    assert {files.checkpoint.look(part.name) for part in parts} == set(parts)
    tables = {part.name for part in parts if part.name.endswith("tid2eid")}
    assert {part.dtype for part in parts if part.name not in tables} == {"F32"}


@pytest.mark.parametrize(
    "family", ["qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "lara_mini", "minimax"]
)
def test_projections_of_recurrent_layers_are_joined_where_they_were_read(
    family: str, tiny_checkpoint: Any
) -> None:
    """Copies would take memory that no plan knows of."""
    files = open_model(tiny_checkpoint(family, vocab_size=320), "float32")
    weights = DenseWeights.load(files).layers[files.shape.recurrent_layers[0]]
    roles = ("recurrent_in", "recurrent_norm", "recurrent_out")
    assert len({weights[role].untyped_storage().data_ptr() for role in roles}) == 1


def test_mixtral_experts_in_both_layouts() -> None:
    shape = shape_of("mixtral", num_hidden_layers=2)
    prefix = "model.layers.1.block_sparse_moe.experts.5"
    _, apart = experts_in(shape)
    assert apart.pieces(1, 5) == (
        StoredPiece(f"{prefix}.w1.weight", None),
        StoredPiece(f"{prefix}.w3.weight", None),
        StoredPiece(f"{prefix}.w2.weight", None),
    )
    _, stacked = experts_in(shape, "model.layers.0.mlp.experts.gate_up_proj")
    assert stacked.pieces(1, 5) == (
        StoredPiece("model.layers.1.mlp.experts.gate_up_proj", 5),
        StoredPiece("model.layers.1.mlp.experts.down_proj", 5),
    )


@pytest.mark.parametrize(
    "router", ["model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"]
)
def test_mixtral_router_under_either_name(router: str) -> None:
    shape = shape_of("mixtral")
    assert names_of(shape).layer_weights(shape, 0, {router})["router"] == (router, (8, 4096))


def test_missing_tensors_are_required_under_their_released_names() -> None:
    shape = shape_of("mixtral", num_hidden_layers=1, num_local_experts=2)
    found = required(shape)
    assert found["model.layers.0.block_sparse_moe.gate.weight"] == (2, 4096)
    assert found["model.layers.0.block_sparse_moe.experts.1.w2.weight"] == (4096, 14336)
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"] == (32000, 4096)
    assert len(found) == 3 + 6 + 1 + 2 * 3


def test_tied_head_is_required_only_if_it_is_there() -> None:
    shape = shape_of("olmoe", tie_word_embeddings=True)
    assert "lm_head.weight" not in required(shape)
    assert "lm_head.weight" in required(shape, "lm_head.weight")


def test_layers_without_experts() -> None:
    shape = shape_of("qwen2_moe", mlp_only_layers=[0], intermediate_size=10)
    dense, sparse = (names_of(shape).layer_weights(shape, layer, ()) for layer in (0, 1))
    assert "mlp_gate" in dense and "router" not in dense
    assert "shared_mix" in sparse and "mlp_gate" not in sparse


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_required_numbers_are_all_numbers(family: str) -> None:
    shape = shape_of(family, tie_word_embeddings=family == "olmoe")
    total = sum(torch.Size(size).numel() for size in required(shape).values())
    assert total == shape.num_params
    assert shape.architecture == ARCHITECTURES[family]


def test_matrices_of_an_expert_are_views_in_either_layout() -> None:
    shape = shape_of("mixtral", hidden_size=64, intermediate_size=5)
    stacked, apart = (
        StoredExperts.of(shape, FLOAT32, layout) for layout in names_of(shape).experts[::-1]
    )
    gate_up, down = torch.randn(10, 64), torch.randn(64, 5)
    fused = stacked.matrices((gate_up, down))
    assert as_tensor(fused["gate"]).data_ptr() == gate_up.data_ptr()
    assert as_tensor(fused["up"]).data_ptr() == gate_up[5:].data_ptr()
    assert fused["down"] is down
    separate = apart.matrices((gate_up[:5], gate_up[5:], down))
    assert all(as_tensor(separate[role]).equal(as_tensor(fused[role])) for role in fused)


def test_an_expert_of_three_stacks_is_three_reads(tiny_checkpoint: Any) -> None:
    files = open_model(tiny_checkpoint("dbrx"), "auto")
    of_expert = 4 * files.shape.expert_params
    for record in files.expert_records().values():
        assert len(record.pieces) == 3
        assert sum(piece.num_bytes for piece in record.pieces) <= of_expert + 6 * PAGE_BYTES
    assert files.expert_bytes == 3 * 6 * of_expert


def as_tensor(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor)
    return matrix


def test_sizes_of_roles() -> None:
    layer = shape_of("qwen3_moe", head_dim=128, attention_bias=True).layer_tensors(0)
    assert layer["q"] == (4096, 2048)
    assert layer["k_bias"] == (512,)
    assert layer["q_norm"] == (128,)
    assert shape_of("olmoe").layer_tensors(0)["k_norm"] == (2048,)
