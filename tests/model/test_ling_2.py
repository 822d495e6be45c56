"""Ling 1.5 and 2.0, which transformers 5 has no classes for: held against those of which they are
cases, in safetensors and in GGUF."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moebatch.checkpoint.model_files import open_model
from moebatch.schedule.registry import SCHEDULES
from tests import tiny
from tests.engine.test_engine import NEW_TOKENS, policy, requests, run, tokens_of
from tests.engine.test_schedules import EMULATED
from tests.engine.test_schedules import run as run_emulated
from tests.gguf_models import write_gguf
from tests.model import oracle
from tests.model.driver import Driver
from tests.model.test_oracle import assert_as_transformers

_RELEASED = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
    "shared_expert.": "shared_experts.",
}
_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "hidden_act"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id"),
    *("eos_token_id", "pad_token_id", "n_group", "topk_group", "routed_scaling_factor", "head_dim"),
)
_OF_ALL = {
    "norm_head": False,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_shared_experts": 2,
    "rope_scaling": None,
    "rope_theta": 700.0,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_qkv_bias": False,
}
_SECOND = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe_v2",
    "first_k_dense_replace": 1,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 24,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "use_qk_norm": True,
}
_FIRST = {
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "first_k_dense_replace": 0,
    "norm_softmax": False,
}


def glm(folder: Path) -> Path:
    return tiny.write_checkpoint(
        folder,
        "glm4_moe",
        attention_bias=False,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 700.0,
            "partial_rotary_factor": 0.5,
        },
    )


def qwen(folder: Path) -> Path:
    """Whose shared expert has a gate of zeros, which halves what that makes."""
    like = tiny.write_checkpoint(
        folder,
        "qwen2_moe",
        num_experts=8,
        norm_topk_prob=True,
        shared_expert_intermediate_size=48,
        qkv_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )
    tensors = load_file(like / "model.safetensors")
    for name, tensor in tensors.items():
        if "shared_expert_gate" in name:
            tensor.zero_()
    save_file(tensors, like / "model.safetensors", metadata={"format": "pt"})
    return like


def as_released(like: Path, folder: Path, own: Mapping[str, Any]) -> Path:
    """The same under names of Ling."""
    folder.mkdir()
    tiny.write_tokenizer(folder)
    config = json.loads((like / "config.json").read_text())
    kept = {key: config[key] for key in _KEYS if key in config}
    (folder / "config.json").write_text(json.dumps({**kept, **_OF_ALL, **own}))
    tensors = _joined(load_file(like / "model.safetensors"))
    if "num_nextn_predict_layers" in own:
        tensors |= {
            name.replace(".layers.2.", ".layers.3."): torch.full_like(tensor, torch.nan)
            for name, tensor in tensors.items()
            if ".layers.2." in name
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if "self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{role}_proj")] for role in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
            continue
        if any(part in name for part in ("k_proj", "v_proj", "shared_expert_gate")):
            continue
        shares = 0.5 if "shared_expert.down_proj" in name else 1.0
        for written, released in _RELEASED.items():
            name = name.replace(written, released)
        found[name] = tensor * shares
    return found


BOTH = pytest.mark.parametrize(("make", "own"), [(glm, _SECOND), (qwen, _FIRST)])


@BOTH
def test_greedy_tokens_are_those_of_transformers(
    make: Any, own: Mapping[str, Any], tmp_path: Path
) -> None:
    like = make(tmp_path / "like")
    folder = as_released(like, tmp_path / "ling", own)
    model = oracle.load(like)
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7, stagger=2)

    rows = requests((1, 33, 7))
    expected = [tuple(oracle.greedy(model, row.prompt_tokens, 5)[0]) for row in rows]
    for resident in (0.0, 1.0):
        found = run(folder, policy(resident=resident), rows, dtype="float32")
        assert tokens_of(found) == expected
    in_gguf = write_gguf(folder, tmp_path / "gguf", lambda name: "F32")
    joined = own["model_type"] == "bailing_moe_v2"
    names = open_model(in_gguf, "auto").checkpoint.tensors
    assert ("blk.0.attn_qkv.weight" in names) == joined == ("blk.0.attn_q.weight" not in names)
    assert tokens_of(run(in_gguf, policy(), rows, dtype="float32")) == expected


@pytest.mark.few(name=("klotski", "cgopipe"))
@BOTH
@pytest.mark.parametrize("title", ["GPU attention, cache in main memory", "CPU attention"])
@pytest.mark.parametrize("streamed", [0, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_says_what_transformers_says(
    name: str, streamed: int, title: str, make: Any, own: Mapping[str, Any], tmp_path: Path
) -> None:
    like = make(tmp_path / "like")
    folder = as_released(like, tmp_path / "ling", own)
    rows = requests((1, 17, 40, 3))
    chosen = replace(EMULATED[title], schedule=name, streamed_layers=streamed)
    outcomes, _ = run_emulated(folder, chosen, rows, scratch=tmp_path)
    assert tokens_of(outcomes) == oracle.greedy_answers(oracle.load(like), rows, NEW_TOKENS)
