"""Shapes of the text of ERNIE-4.5-VL: experts for text lie before those for images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError
from moebatch.model.dense_weights import DenseWeights
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from moebatch.store.dense import load_gates
from tests import tiny
from tests.model import oracle
from tests.model.driver import Driver
from tests.model.test_oracle import assert_as_transformers

OWN = {
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "model_type": "ernie4_5_vl_moe",
}


def shape_of(**entries: Any) -> ModelShape:
    return read_shape({**OWN, "text_config": entries}, "m/config.json")


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"moe_intermediate_size": [96, 32], "moe_num_experts": 12, "moe_k": 3},
        {"mlp_layer_types": ["sparse"] * 28, "moe_num_shared_experts": 0},
        {"use_bias": True, "num_key_value_heads": 20, "moe_norm_min": 0.5},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    said = json.loads(json.dumps(entries))
    shape = shape_of(**entries)
    config = AutoConfig.for_model("ernie4_5_vl_moe", text_config=said).text_config
    sparse = [n for n, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    assert list(shape.moe_layers) == sparse
    assert (shape.num_experts, shape.experts_per_token) == (config.num_experts, config.moe_k)
    width = config.moe_intermediate_size[0]
    assert shape.expert_width == width
    assert shape.shared_expert_width == config.moe_num_shared_experts * width
    assert shape.router.least_norm == config.moe_norm_min
    assert shape.attention.qkv_bias == config.use_bias and not shape.head_bias
    assert shape.tie_word_embeddings == config.tie_word_embeddings


def test_other_rotary_positions_are_refused_as_by_transformers() -> None:
    with pytest.raises(CheckpointError, match="rope_type default, got 'yarn'"):
        shape_of(rope_parameters={"rope_type": "yarn", "factor": 2.0})


def test_gates_of_text_are_turned_and_corrected_by_their_own_row(tmp_path: Path) -> None:
    """What is for images may be anything."""
    folder = tiny.write_checkpoint(tmp_path, "ernie4_5_vl_moe")
    path, name = folder / "model.safetensors", "model.layers.1.mlp.{}"
    tensors = load_file(path)
    gate = tensors[name.format("gate.weight")]
    corrections = tensors[name.format("moe_statics.e_score_correction_bias")]
    files = open_model(folder, "float32")
    for roles in (DenseWeights.load(files).layers[1], load_gates(files, torch.float32)[0]):
        assert torch.equal(roles["router"], gate.T) and roles["router"].is_contiguous()
        assert torch.equal(roles["router_correction"], corrections[0])
    model = oracle.load(folder)
    of_images = ("weight_1", "vision_model", "resampler", *(f"experts.{n}." for n in range(7, 14)))
    for key, tensor in tensors.items():
        if any(part in key for part in of_images):
            tensor.fill_(torch.nan)
        if key.endswith("correction_bias"):
            tensor[1] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)
