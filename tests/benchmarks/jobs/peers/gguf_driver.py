"""The benchmark's checkpoint as GGUF in bfloat16, without a vocabulary.

    python -m tests.benchmarks.jobs.peers.gguf_driver MODEL OUT.gguf

Runs in llama.cpp's environment, which has numpy but neither torch nor safetensors: tensors are
mapped from the files as they lie there.
"""

import json
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
}
_EXPERTS = {"w1": "ffn_gate_exps.weight", "w2": "ffn_down_exps.weight", "w3": "ffn_up_exps.weight"}
_WIDE = ("attn_norm.weight", "ffn_norm.weight", "ffn_gate_inp.weight", "output_norm.weight")
"""Kept in float32."""


class Weights:
    """Tensors of a checkpoint, as 16-bit words."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, tuple[Path, int, tuple[int, ...]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    assert entry["dtype"] == "BF16", f"{name} is bfloat16"
                    offset = 8 + length + entry["data_offsets"][0]
                    self._places[name] = (path, offset, tuple(entry["shape"]))

    def words(self, name: str) -> Any:
        """A tensor, mapped."""
        path, offset, shape = self._places[name]
        mapped = np.memmap(path, np.uint8, "r", offset=offset, shape=(2 * prod(shape),))
        return mapped.view(np.uint16).reshape(shape)


def tensors(weights: Weights, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """By their names in GGUF."""
    for name, ours in _OUTER.items():
        yield ours, weights.words(name)
    for layer in range(config["num_hidden_layers"]):
        prefix, block = f"model.layers.{layer}.", f"blk.{layer}."
        for name, ours in _LAYER.items():
            yield block + ours, weights.words(prefix + name)
        for name, ours in _EXPERTS.items():
            inside = f"{prefix}block_sparse_moe.experts."
            experts = range(config["num_local_experts"])
            yield (
                block + ours,
                np.stack([weights.words(f"{inside}{e}.{name}.weight") for e in experts]),
            )


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama", use_temp_file=False)
    _describe(writer, config)
    weights = Weights(folder)
    found = list(_shapes(weights, config))
    for name, shape in found:
        if name.endswith(_WIDE):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * prod(shape))
        else:
            as_bytes = [*shape[:-1], 2 * shape[-1]]
            writer.add_tensor_info(
                name,
                as_bytes,
                np.dtype(np.uint8),
                2 * prod(shape),
                raw_dtype=gguf.GGMLQuantizationType.BF16,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, words in tensors(weights, config):
        writer.write_tensor_data(
            _floats(words) if name.endswith(_WIDE) else np.ascontiguousarray(words).view(np.uint8)
        )
    writer.close()


def _shapes(weights: Weights, config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    experts = config["num_local_experts"]
    for name, ours in _OUTER.items():
        yield ours, list(weights.words(name).shape)
    for layer in range(config["num_hidden_layers"]):
        prefix, block = f"model.layers.{layer}.", f"blk.{layer}."
        for name, ours in _LAYER.items():
            yield block + ours, list(weights.words(prefix + name).shape)
        for name, ours in _EXPERTS.items():
            one = weights.words(f"{prefix}block_sparse_moe.experts.0.{name}.weight").shape
            yield block + ours, [experts, *one]


def _floats(words: Any) -> Any:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_BF16))
    writer.add_tokenizer_model("no_vocab")


if __name__ == "__main__":
    main()
