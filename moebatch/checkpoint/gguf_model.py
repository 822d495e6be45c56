"""A model in GGUF, one file or several, as a checkpoint and the configuration it stands for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moebatch.checkpoint.gguf_header import Value, read_gguf_header
from moebatch.checkpoint.header import TensorEntry
from moebatch.checkpoint.index import INDEX_NAME, SINGLE_NAME, Checkpoint, file_inside
from moebatch.errors import CheckpointError
from moebatch.formats.ggml import GgmlRows
from moebatch.formats.weight_format import WeightFormat
from moebatch.quoting import shown

_SUFFIX = ".gguf"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_SHARDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """How a family that llama.cpp knows is configured in transformers."""

    model_type: str
    architecture: str
    width: str
    """Key of the width of an expert."""
    entries: Mapping[str, Any]
    """What llama.cpp takes for granted."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Keys of transformers and of GGUF, beside the usual ones; what a file leaves out is as usual
    in the family."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Keys of transformers that are true where the first layer has a tensor."""
    has_sigmoids: bool = False
    """Gates score by sigmoids, and not by a softmax."""
    interleaves: bool = False
    """Rows of queries and keys are in llama.cpp's order."""


_FAMILIES = {
    "llama": _Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        width="intermediate_size",
        entries={"sliding_window": None},
        interleaves=True,
    ),
    "qwen2moe": _Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        width="moe_intermediate_size",
        entries={"norm_topk_prob": False, "qkv_bias": True},
    ),
    "qwen3moe": _Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        width="moe_intermediate_size",
        entries={"norm_topk_prob": True},
    ),
    "olmoe": _Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        width="intermediate_size",
        entries={"norm_topk_prob": False},
    ),
    "glm4moe": _Family(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        width="moe_intermediate_size",
        entries={},
        sizes={
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        has_sigmoids=True,
    ),
    "minimax-m2": _Family(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        width="intermediate_size",
        entries={},
        has_sigmoids=True,
    ),
}
_SOFTMAX, _SIGMOID = 1, 2
"""How gates score, in GGUF's numbers."""
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
"""Keys of transformers and of GGUF, behind the architecture's name."""


def find_gguf(path: Path) -> tuple[str, ...]:
    """Names of the files of the model that `path`, a GGUF file or a model folder, holds in that
    format; none where it is another one. Raises CheckpointError."""
    if path.suffix == _SUFFIX:
        return _with_shards(path.parent, path.name)
    if any((path / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
        return ()
    names = sorted(each.name for each in path.glob(f"*{_SUFFIX}"))
    first = [name for name in names if not (match := _SHARD.fullmatch(name)) or int(match[2]) == 1]
    if len(first) > 1:
        several = ", ".join(map(shown, first[:4]))
        raise CheckpointError(f"{path}: holds several models ({several}); name the file of one")
    return _with_shards(path, (first or names)[0]) if names else ()


def open_gguf(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], Checkpoint]:
    """The configuration as ``config.json`` would have it, and the tensors.

    Raises CheckpointError for damaged files and for models that are not read.
    """
    files = {name: file_inside(folder, name) for name in names}
    headers = [read_gguf_header(path) for path in files.values()]
    tensors: dict[str, tuple[Path, TensorEntry]] = {}
    formats: dict[str, WeightFormat] = {}
    for (file, path), header in zip(files.items(), headers, strict=True):
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            fault = f"tensor {shown(min(twice))} is in another file as well"
            raise CheckpointError(f"{folder / file}: {fault}")
        tensors |= {name: (path, _with_rows(name, each)) for name, each in header.tensors.items()}
        formats |= header.formats
    said = _Said(folder / names[0], headers[0].metadata)
    checkpoint = Checkpoint(
        folder=folder,
        tensors=tensors,
        files=files,
        formats=formats | _interleaved(said, tensors, formats),
        is_gguf=True,
    )
    return _config(said, checkpoint), checkpoint


class _Said:
    """Metadata of a model."""

    def __init__(self, where: Path, metadata: Mapping[str, Value]) -> None:
        self.where, self._metadata = where, metadata
        found = metadata.get("general.architecture")
        if not isinstance(found, str) or found not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise CheckpointError(
                f"{where}: architecture {shown(found)} of GGUF is not supported; supported are "
                f"{known}, with experts"
            )
        self.architecture = found
        self.family = _FAMILIES[self.architecture]

    def get(self, key: str) -> Value | None:
        """Of a key behind the architecture's name."""
        return self._metadata.get(f"{self.architecture}.{key}")


def _with_shards(folder: Path, name: str) -> tuple[str, ...]:
    match = _SHARD.fullmatch(name)
    if match is None:
        return (name,)
    count = int(match[3])
    if not 0 < count <= _MOST_SHARDS:
        raise CheckpointError(
            f"{folder}: {shown(name)} is of {count} files, at most {_MOST_SHARDS}"
        )
    numbers = range(1, count + 1)
    return tuple(f"{match[1]}-{number:05}-of-{count:05}{_SUFFIX}" for number in numbers)


def _with_rows(name: str, entry: TensorEntry) -> TensorEntry:
    """The gate of a shared expert is a matrix of one row, which GGUF keeps as a vector."""
    is_vector = name.endswith("ffn_gate_inp_shexp.weight") and len(entry.shape) == 1
    return replace(entry, shape=(1, *entry.shape)) if is_vector else entry


def _interleaved(
    said: _Said,
    tensors: Mapping[str, tuple[Path, TensorEntry]],
    formats: Mapping[str, WeightFormat],
) -> dict[str, WeightFormat]:
    """Formats of queries and keys whose rows llama.cpp has reordered."""
    heads = said.get("attention.head_count")
    by_end = {"attn_q": heads, "attn_k": said.get("attention.head_count_kv") or heads}
    found: dict[str, WeightFormat] = {}
    if not said.family.interleaves:
        return found
    for name, (_, entry) in tensors.items():
        count = by_end.get(name.removesuffix(".weight").rpartition(".")[2])
        if count is None or not name.endswith(".weight"):
            continue
        if type(count) is not int or count < 1 or entry.shape[0] % (2 * count):
            raise CheckpointError(
                f"{said.where}: {name} has {entry.shape[0]} rows, which {shown(count)} heads do "
                "not share"
            )
        stored = formats.get(name, GgmlRows(type=entry.dtype, block=1, block_bytes=0))
        assert isinstance(stored, GgmlRows)
        found[name] = replace(stored, num_heads=count)
    return found


def _config(said: _Said, checkpoint: Checkpoint) -> dict[str, Any]:
    scaling = said.get("rope.scaling.type")
    if scaling not in (None, "none"):
        raise CheckpointError(
            f"{said.where}: positions are scaled ({shown(scaling)}), which is not read from GGUF; "
            "use the model's safetensors files"
        )
    if not said.get("expert_count"):
        raise CheckpointError(
            f"{said.where}: no layer has experts; Mixture-of-Experts models are run"
        )
    embedding = checkpoint.look("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{said.where}: tensor token_embd.weight is missing")
    _require_scores(said)
    width = said.get("expert_feed_forward_length") or said.get("feed_forward_length")
    config = {key: said.get(name) for key, name in _SIZES.items()}
    own = ((key, said.get(name)) for key, name in said.family.sizes.items())
    config |= {key: value for key, value in own if value is not None}
    flags = {
        key: checkpoint.look(f"blk.0.{name}") is not None for key, name in said.family.flags.items()
    }
    return {
        **config,
        **flags,
        "num_hidden_layers": _num_layers(said),
        "architectures": [said.family.architecture],
        "model_type": said.family.model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": checkpoint.look("output.weight") is None,
        "intermediate_size": said.get("feed_forward_length") or width,
        said.family.width: width,
        "shared_expert_intermediate_size": said.get("expert_shared_feed_forward_length") or width,
        "num_key_value_heads": said.get("attention.head_count_kv"),
        "head_dim": said.get("attention.key_length"),
        "clip_qkv": said.get("attention.clamp_kqv"),
        "rope_parameters": {
            "rope_theta": said.get("rope.freq_base") or 10000.0,
            "rope_type": "default",
            **_rotated_share(said),
        },
        **said.family.entries,
    }


def _num_layers(said: _Said) -> Value | None:
    """Without those behind the last one, which guess further tokens ahead."""
    count, behind = said.get("block_count"), said.get("nextn_predict_layers")
    return count - behind if type(count) is int and type(behind) is int else count


def _rotated_share(said: _Said) -> dict[str, float]:
    """Where only a part of a head rotates."""
    rotated, head_dim = said.get("rope.dimension_count"), said.get("attention.key_length")
    if type(rotated) is not int or type(head_dim) is not int or not 0 < rotated < head_dim:
        return {}
    return {"partial_rotary_factor": rotated / head_dim}


def _require_scores(said: _Said) -> None:
    """Raises CheckpointError where gates score otherwise than those of the family do."""
    usual = _SIGMOID if said.family.has_sigmoids else _SOFTMAX
    found = said.get("expert_gating_func")
    if found not in (None, 0, usual):
        raise CheckpointError(
            f"{said.where}: gates score in way {shown(found)} of GGUF (expert_gating_func), those "
            f"of {said.architecture} do in way {usual}; use the model's safetensors files"
        )
