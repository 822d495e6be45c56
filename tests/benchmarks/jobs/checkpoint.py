"""A Mixtral-shaped checkpoint of 6.07 GB with random weights, written layer by layer."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.benchmarks.jobs.tokenizer import write_tokenizer

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS = 2048, 7168, 8, 16, 4
EXPERTS, CHOSEN, VOCABULARY, POSITIONS = 8, 2, 32_000, 4096
STORED = "bfloat16"
"""What the weights of the checkpoint are stored in."""
_INDEX = "model.safetensors.index.json"
Tensors = dict[str, Tensor]


def checkpoint(folder: Path) -> Path:
    """The checkpoint in `folder`, made if it is not there. The index is written last, so what has
    an index is whole."""
    if not (folder / _INDEX).is_file():
        print(f"making a checkpoint of 6.07 GB in {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _config().save_pretrained(folder)
        write_tokenizer(folder, VOCABULARY)
        _write_weights(folder)
    return folder


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


def _config() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def _write_weights(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    names: dict[str, str] = {}
    num_bytes = 0
    for number, tensors in enumerate(_shards(generator), start=1):
        name = f"model-{number:05d}-of-{LAYERS + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": names}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _shards(generator: torch.Generator) -> Iterator[Tensors]:
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {prefix + name: shape for name, shape in _layer_shapes().items()}
        yield {name: _weight(shape, generator) for name, shape in shapes.items()}
    outer = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    yield {name: _weight(shape, generator) for name, shape in outer.items()}


def _layer_shapes() -> Mapping[str, tuple[int, ...]]:
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (kv_width, HIDDEN),
        "self_attn.v_proj.weight": (kv_width, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "block_sparse_moe.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        inside = f"block_sparse_moe.experts.{expert}."
        shapes[f"{inside}w1.weight"] = (WIDTH, HIDDEN)
        shapes[f"{inside}w2.weight"] = (HIDDEN, WIDTH)
        shapes[f"{inside}w3.weight"] = (WIDTH, HIDDEN)
    return shapes


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms are ones; matrices keep the variance of what passes through them."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    most = sqrt(3 / shape[-1])
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-most, most, generator=generator)
