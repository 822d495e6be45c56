"""Sizes, counts and kinds of a model, read from its ``config.json``: no weights, no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moebatch.errors import CheckpointError
from moebatch.spec.config_keys import ConfigKeys
from moebatch.spec.shape_keys import FAMILY_KEYS, FamilyKeys

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder with Mixture-of-Experts layers; enough for every byte and every FLOP of it."""

    architecture: str
    """Class name in ``architectures``, such as ``MixtralForCausalLM``."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding and of the head; tokenizers often know fewer tokens."""
    tie_word_embeddings: bool
    """The head is the embedding; a separate head in the checkpoint is ignored."""
    moe_layers: tuple[int, ...]
    """Layers with experts, ascending; the others have one dense MLP."""
    num_experts: int
    experts_per_token: int
    expert_width: int
    dense_width: int
    """Width of the MLP of dense layers; 0 where the family has no such layers."""
    shared_expert_width: int
    """Width of the expert that every token of a MoE layer passes; 0 is none."""
    qkv_bias: bool
    output_bias: bool
    qk_norm: QkNorm
    """RMS norm of queries and keys: per head, over their full width, or none."""
    clip_qkv: float | None
    """Queries, keys and values are clamped to plus and minus this."""
    norm_topk_prob: bool
    """The weights of a token's chosen experts are made to sum to one."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, itself included; None is all before it."""
    rms_eps: float
    activation: str
    """Name of the activation as transformers' ``hidden_act`` has it."""
    max_positions: int
    dtype: str
    """Data type that the file declares: float32, float16 or bfloat16."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> "ModelShape":
        """The shape that a raw ``config.json`` describes, absent keys as transformers fills them.

        Raises CheckpointError, with ``where`` and all faults at once, for architectures and
        quantisations that are not supported and for figures that make no sense.
        """
        family = _family_keys(config, where)
        keys = ConfigKeys(config, family)
        shape = _read(cls, keys, family)
        if keys.faults:
            raise CheckpointError("\n".join(f"{where}: {fault}" for fault in keys.faults))
        return shape

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer in self.moe_layers

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number of the declared data type."""
        return 4 if self.dtype == "float32" else 2

    @property
    def query_width(self) -> int:
        """Width of the queries of a token, all heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of a token in one layer; the values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def expert_params(self) -> int:
        """Numbers in one expert."""
        return 3 * self.hidden_size * self.expert_width  # gate, up, down

    @property
    def embedding_params(self) -> int:
        """Numbers in the embedding, the final norm and, where it is not tied, the head."""
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.vocab_size * self.hidden_size + self.hidden_size

    def resident_layer_params(self, layer: int) -> int:
        """Numbers in a layer beside its experts: norms, attention, router, shared expert, MLP."""
        params = 2 * self.hidden_size + self._attention_params
        if not self.is_moe(layer):
            return params + 3 * self.hidden_size * self.dense_width
        params += self.num_experts * self.hidden_size  # router
        if self.shared_expert_width:
            params += 3 * self.hidden_size * self.shared_expert_width
            params += self.hidden_size  # the shared expert's sigmoid gate
        return params

    @property
    def resident_params(self) -> int:
        """Numbers outside the experts."""
        layers = sum(map(self.resident_layer_params, range(self.num_layers)))
        return self.embedding_params + layers

    @property
    def num_params(self) -> int:
        """Numbers in the whole model."""
        return self.resident_params + len(self.moe_layers) * self.num_experts * self.expert_params

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.kv_width * dtype_bytes

    @property
    def _attention_params(self) -> int:
        params = 2 * self.hidden_size * self.query_width  # queries, output
        params += 2 * self.hidden_size * self.kv_width  # keys, values
        params += (self.query_width + 2 * self.kv_width) * self.qkv_bias
        params += self.hidden_size * self.output_bias
        if self.qk_norm == "head":
            params += 2 * self.head_dim
        elif self.qk_norm == "full":
            params += self.query_width + self.kv_width
        return params


def load_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder. Raises CheckpointError."""
    path = folder / "config.json"
    return ModelShape.from_config(load_config(path), str(path))


def load_config(path: Path) -> dict[str, Any]:
    """The raw object in a ``config.json``. Raises CheckpointError if there is none."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def _family_keys(config: Mapping[str, Any], where: str) -> FamilyKeys:
    architectures = config.get("architectures")
    model_type = config.get("model_type")
    if isinstance(architectures, list) and architectures:
        found = architectures[0]
        family = FAMILY_KEYS.get(found) if isinstance(found, str) else None
    else:
        found = model_type
        by_type = {family.model_type: family for family in FAMILY_KEYS.values()}
        family = by_type.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"{where}: architecture {found!r} is not supported; supported are "
            + ", ".join(FAMILY_KEYS)
        )
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise CheckpointError(
            f"{where}: quantization_config ({method or 'unnamed'}): quantised checkpoints are not "
            "supported; use the model's bfloat16, float16 or float32 checkpoint"
        )
    return family


def _read(cls: type[ModelShape], keys: ConfigKeys, family: FamilyKeys) -> ModelShape:
    num_layers = keys.count("num_hidden_layers")
    heads, kv_heads, head_dim = keys.heads()
    shared = "shared_expert_intermediate_size"
    return cls(
        architecture=family.architecture,
        num_layers=num_layers,
        hidden_size=keys.count("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        moe_layers=keys.moe_layers(num_layers),
        num_experts=keys.num_experts(),
        experts_per_token=keys.experts_per_token(),
        expert_width=keys.count(family.expert_width_key),
        dense_width=keys.count("intermediate_size") if family.has_dense_layers else 0,
        shared_expert_width=keys.count(shared) if shared in family.defaults else 0,
        qkv_bias=keys.flag(family.qkv_bias_key) if family.qkv_bias_key else False,
        output_bias=keys.flag(family.output_bias_key) if family.output_bias_key else False,
        qk_norm=family.qk_norm,
        clip_qkv=keys.positive_or_none("clip_qkv") if "clip_qkv" in family.defaults else None,
        norm_topk_prob=family.always_norm_topk or keys.flag("norm_topk_prob"),
        sliding_windows=keys.sliding_windows(num_layers),
        rms_eps=keys.positive("rms_norm_eps"),
        activation=keys.name("hidden_act"),
        max_positions=keys.count("max_position_embeddings"),
        dtype=keys.dtype(),
    )
