"""Plain checkpoints made into GGUF, each with what the gguf package decodes it to."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.model.driver import read_tensors

ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
}
_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"), (0,)),
    "IQ1_M": (48,),
    "IQ1_S": (0,),
}
"""Where blocks that gguf cannot make have float16: of codes, and of what is taken off. IQ1_M has
its in four parts, above other bits."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
Types = Callable[[str], str]
"""Of a tensor by its name in GGUF."""


def write_gguf(
    source: Path,
    target: Path,
    types: Types,
    *,
    split: int = 0,
    apart: bool = False,
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Makes the folder `target` of the plain one, which holds ``model.gguf`` and a tokenizer, and
    beside it ``TARGET-decoded``, a plain one of the weights that it stands for.

    `types` are those of matrices but routers, float16 where rows are not whole blocks. With `split`
    a file has so many tensors; with `apart` each expert has its own, as in the first files of
    Mixtral; `metadata` are numbers and texts beside the usual ones, or in their place.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    stored: dict[str, tuple[str, Any]] = {}
    decoded: dict[str, Tensor] = {}
    for name, own in _by_gguf_name(read_tensors(source), names).items():
        together = torch.stack(list(own.values())) if len(own) > 1 else next(iter(own.values()))
        heads = _heads(name, config)
        kind = types(name) if together.dim() > 1 and "ffn_gate_inp" not in name else "F32"
        if together.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            kind = "F16"
        data, numbers = _stored(_interleaved(together, heads), kind)
        if apart and "_exps" in name:
            stored |= {
                name.replace("_exps", f".{number}"): (kind, each)
                for number, each in enumerate(data)
            }
        else:
            stored[name] = kind, data.squeeze(0) if "inp_shexp" in name else data
        each = _apart(numbers, heads)
        decoded |= dict(zip(own, each if len(own) > 1 else [each], strict=True))
    _write(source, target, architecture, _metadata(config) | metadata, stored, split)
    plain = target.parent / f"{target.name}-decoded"
    plain.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, plain)
    save_file(
        {name: each.contiguous() for name, each in decoded.items()}, plain / "model.safetensors"
    )
    return target


def blocks_of(weight: Tensor, kind: str) -> np.ndarray[Any, Any]:
    """Rows of a weight in blocks of a type, or of numbers with the same spread where gguf cannot
    encode it."""
    known = gguf.GGMLQuantizationType[kind]
    if kind not in _HALVES:
        return gguf.quants.quantize(weight.float().numpy(), known)
    block, num_bytes = gguf.GGML_QUANT_SIZES[known]
    *rows, columns = weight.shape
    rng = np.random.default_rng(weight.numel())
    blocks = rng.integers(0, 256, (*rows, columns // block, num_bytes), dtype=np.uint8)
    for scale in (np.float16(1), None):
        for place, weighs in zip(_HALVES[kind], (1, 1.5 if kind == "Q2_K" else 7.5), strict=False):
            if scale is None:
                flat = blocks.reshape(*rows, -1)
                spread = gguf.quants.dequantize(flat, known).std()
                scale = np.float16(weight.float().std().item() / spread)
            half = np.frombuffer(np.float16(scale * weighs).tobytes(), np.uint8)
            if kind == "IQ1_M":
                quarters = np.stack((half & 15, half >> 4), -1).flatten()
                upper = blocks[..., place + 1 : place + 8 : 2]
                blocks[..., place + 1 : place + 8 : 2] = upper & 15 | quarters << 4
            else:
                blocks[..., place : place + 2] = half
    return blocks.reshape(*rows, -1)


def _stored(weight: Tensor, kind: str) -> tuple[Any, Tensor]:
    data = blocks_of(weight, kind)
    numbers = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return data, torch.from_numpy(numbers.copy()).view(weight.shape)


def _by_gguf_name(tensors: Mapping[str, Tensor], names: Any) -> dict[str, dict[str, Tensor]]:
    """Experts together, in their order."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [f"{w:0>4}" for w in name.split(".")]):
        words = name.split(".")
        if "experts" in words:
            del words[words.index("experts") + 1]
        merged = ".".join(words).replace("block_sparse_moe.experts", "feed_forward.experts")
        merged = merged.removeprefix("model.") if "feed_forward" in merged else merged
        merged = merged.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = names.get_name(merged, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        found.setdefault(theirs, {})[name] = tensors[name]
    return found


def _heads(name: str, config: Mapping[str, Any]) -> int:
    """Of those whose rows the converter of llama.cpp interleaves."""
    if config["model_type"] != "mixtral":
        return 0
    keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    found = [key for part, key in keys.items() if name.endswith(f"{part}.weight")]
    return int(config[found[0]]) if found else 0


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter does."""
    if not heads:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _apart(weight: Tensor, heads: int) -> Tensor:
    order = _interleaved(torch.arange(len(weight))[:, None], heads)[:, 0]
    return weight[order.argsort()]


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Behind the name of the architecture."""
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "expert_count": next(config[key] for key in _NUM_EXPERTS if key in config),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if config["model_type"] in ("glm4_moe", "minimax_m2"):
        share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        rotated = config.get("rotary_dim") or int(config["head_dim"] * share)
        found["rope.dimension_count"] = rotated
        found["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "glm4_moe":
        behind = config.get("num_nextn_predict_layers", 0)
        found |= {
            "block_count": config["num_hidden_layers"] + behind,
            "nextn_predict_layers": behind,
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": config["norm_topk_prob"],
        }
    return {key: value for key, value in found.items() if value is not None}


def _write(
    source: Path,
    target: Path,
    architecture: Any,
    metadata: Mapping[str, Any],
    stored: Mapping[str, tuple[str, Any]],
    split: int,
) -> None:
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, target)
    known = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(target / "model.gguf", known, split_max_tensors=split)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in metadata.items():
        adders[type(value)](f"{known}.{key}", value)
    writer.add_token_list(["a", "list", "of", "texts"])
    for name, (kind, data) in stored.items():
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
