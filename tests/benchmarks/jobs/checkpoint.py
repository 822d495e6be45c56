"""Checkpoints of about 6 GB with random weights, one for each class of shapes."""

import json
import subprocess
import sys
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.benchmarks.jobs.tokenizer import write_tokenizer
from tests.tiny import quiet

VOCABULARY = 32_000
_SPARE = 16
"""Token ids of the model that the tokenizer leaves to what transformers adds for a family."""
STORED = "stored"
"""The weights of a checkpoint as they are written first."""
_INDEX = "model.safetensors.index.json"
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": (
        "mixtral",
        {"intermediate_size": 7168, "num_hidden_layers": 8, "num_key_value_heads": 4},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "num_hidden_layers": 6,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "topk_method": "greedy",
        },
    ),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "granite-4": (
        "granitemoehybrid",
        {
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "attention_multiplier": 2**-7,
            "mamba_d_state": 128,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
        },
    ),
    "lfm2": (
        "lfm2_moe",
        {
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_hidden_layers": 9,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 1,
            "layer_types": [*2 * ["conv", "conv", "full_attention", "conv"], "conv"],
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 13,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
        },
    ),
}
"""By name: transformers' model type and what its configuration has besides. Experts and heads are
those of Mixtral, narrower; Qwen3-30B-A3B; DeepSeek-V2-Lite; Qwen3.5-35B-A3B; Granite-4.0-H-Small;
LFM2-8B-A1B; gpt-oss-20b, whose experts are in MXFP4, as it is published."""
_MXFP4_SCALE = 120
"""A power of two, biased by 127, that gives random codes the variance of other weights."""


def checkpoint(folder: Path, shape: str = "mixtral") -> Path:
    """The checkpoint of a shape in a folder of `folder`, made if it is not there. The index is
    written last, so what has an index is whole."""
    made = folder / ("checkpoint" if shape == "mixtral" else f"checkpoint-{shape}")
    if not (made / _INDEX).is_file():
        print(f"making a checkpoint of about 6 GB in {made}", flush=True)
        made.mkdir(parents=True, exist_ok=True)
        write_tokenizer(made, VOCABULARY - _SPARE)
        _write_model(made, *SHAPES[shape])
    return made


def packed(source: Path, weights: str) -> Path:
    """The checkpoint with its experts in fewer bits, written beside it by `moebatch pack` if it is
    not there."""
    if weights == STORED:
        return source
    folder = source.with_name(f"{source.name}-{weights}")
    if not (folder / _INDEX).is_file():
        command = [sys.executable, "-m", "moebatch", "pack", str(source)]
        subprocess.run([*command, "--to", weights, "-o", str(folder)], check=True)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files with weights, large ones first."""
    return sorted(folder.glob("*.safetensors"), key=lambda file: (-file.stat().st_size, file.name))


def _write_model(folder: Path, family: str, sizes: Mapping[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **_COMMON | sizes, dtype="bfloat16")
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    if family == "gpt_oss":
        config.quantization_config = {"quant_method": "mxfp4"}
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        _write_mxfp4(folder, model, generator)
        return
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            _fill(name, weight, generator)
    with quiet():
        model.save_pretrained(folder, max_shard_size="750MB")


def _write_mxfp4(folder: Path, model: Any, generator: torch.Generator) -> None:
    """As gpt-oss is published: a file for each layer, stacks of experts in blocks of 32 codes."""
    files: dict[str, dict[str, torch.Size]] = {}
    for name, weight in model.state_dict().items():
        part = name.split(".")[2] if ".layers." in name else "outer"
        files.setdefault(f"model-{part}.safetensors", {})[name] = weight.shape
    names: dict[str, str] = {}
    for file, shapes in files.items():
        tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, inputs, outputs = shape
                codes = (experts, outputs, inputs // 32, 16)
                tensors[f"{name}_blocks"] = torch.randint(
                    256, codes, dtype=torch.uint8, generator=generator
                )
                tensors[f"{name}_scales"] = torch.full(codes[:3], _MXFP4_SCALE, dtype=torch.uint8)
            else:
                weight = torch.empty(shape, dtype=torch.bfloat16)
                tensors[name] = _fill(name, weight, generator)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / _INDEX).write_text(json.dumps({"weight_map": names}))


def _fill(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Matrices keep the variance of what passes through them; norms are as if they were not
    there, where they count from zero as well as where they count from one."""
    if weight.dim() > 1:
        most = sqrt(3 / weight.shape[-1])
        return weight.uniform_(-most, most, generator=generator)
    return weight.fill_(1.0 if "norm" in name else 0.0)
