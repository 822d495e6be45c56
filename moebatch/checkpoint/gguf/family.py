"""What a family that llama.cpp knows says of its metadata in GGUF: how they become a configuration
as transformers has it, and which weights the converter has rearranged."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moebatch.checkpoint.gguf.header import Value
from moebatch.checkpoint.header import Extent
from moebatch.errors import CheckpointError
from moebatch.formats.ggml_rearranged import Arrangement
from moebatch.quoting import shown
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.files.json_file import readable
from moebatch.spec.model.blocks import Router

Arranged = Mapping[str, Arrangement]
"""By the name of a weight, without that of its layer: what has been done to it."""
_USUAL_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "clip_qkv": "attention.clamp_kqv",
}
"""Keys as most families spell them (`FamilySpec.spelled` knows of others), and those of GGUF,
behind the architecture's name."""
_SIZES_OF_SOME = {
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
"""The same of those that have such experts and layers; what a file leaves out is as usual in the
family."""
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""The same of scaled positions, behind ``rope.scaling``."""
_SOFTMAX, _SIGMOID = 1, 2
"""How gates score, in GGUF's numbers."""
_CORRECTION = "exp_probs_b.bias"
_FACTORS = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_\w+)\.weight")
DIVIDES = ("rope_freqs.weight",)
"""The tensor by which frequencies of rows of any length are divided."""
_NO_ROW_IS_LONGER = 2**40


class GgufMetadata:
    """What a model says of itself."""

    def __init__(
        self, where: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Extent]
    ) -> None:
        """`tensors` are all that it holds."""
        self.where, self._metadata, self._tensors = where, metadata, tensors
        self.architecture = metadata.get("general.architecture")

    def get(self, key: str) -> Value | None:
        """Of a key behind the architecture's name."""
        return self._metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, usual: int | None = None) -> int:
        """A whole number of at least 1. Raises CheckpointError."""
        value = self.get(key)
        value = usual if value is None else value
        if type(value) is not int or value < 1:
            raise self.unexpected(key, "a number of at least 1")
        return value

    @property
    def num_layers(self) -> Value | None:
        """Without those behind the last one, which guess further tokens ahead."""
        count, behind = self.get("block_count"), self.get("nextn_predict_layers")
        return count - behind if type(count) is int and type(behind) is int else count

    @property
    def has_sigmoids(self) -> bool:
        """Gates score by sigmoids; older files show it by what corrects them."""
        scores = self.get("expert_gating_func") or (_SIGMOID if self.has(_CORRECTION) else None)
        return scores == _SIGMOID

    def require_layers(self) -> None:
        """Raises CheckpointError where there are more than tensors: they are looked at one by
        one."""
        count = self.get("block_count")
        if type(count) is int and count > len(self._tensors):
            raise self.fault(
                f"{self.architecture}.block_count is {count}, of {len(self._tensors)} tensors"
            )

    def require_scores(self, router: Router) -> None:
        """Raises CheckpointError where gates score otherwise than those of the family do."""
        usual = _SIGMOID if router.scores == "sigmoid" else _SOFTMAX
        found = self.get("expert_gating_func")
        if found not in (None, 0, usual):
            raise self.fault(
                f"gates score in way {shown(found)} of GGUF (expert_gating_func), those of "
                f"{self.architecture} do in way {usual}; use the model's safetensors files"
            )

    @property
    def scaling_tensors(self) -> list[str]:
        """Those by which positions are scaled (Llama 3, LongRoPE)."""
        return sorted(name for name in self._tensors if _FACTORS.fullmatch(name))

    def factors(self, tensor: str) -> list[float]:
        """The numbers in such a tensor, one for each pair of a head. Raises CheckpointError for
        others than float32 above 0, and StorageError if the disk fails."""
        place = self._tensors.get(tensor)
        if place is None:
            raise self.fault(f"tensor {shown(tensor)}, by which positions are scaled, is missing")
        if place.dtype != "F32" or place.shape != (self._num_pairs,):
            raise self.fault(
                f"tensor {shown(tensor)} scales positions; expected {self._num_pairs} numbers in "
                f"F32, got {list(place.shape)} in {place.dtype}"
            )
        with readable(place.path), place.path.open("rb") as file:
            file.seek(place.offset)
            numbers = np.frombuffer(file.read(place.num_bytes), "<f4")
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise self.fault(f"tensor {shown(tensor)} scales positions by what is not above 0")
        return [float(number) for number in numbers]

    @property
    def _num_pairs(self) -> int:
        if self.get("attention.key_length") is not None:
            return self.count("attention.key_length") // 2
        return self.count("embedding_length") // self.count("attention.head_count") // 2

    def has(self, tensor: str) -> bool:
        """Whether any layer has it."""
        return self.num_with(tensor) > 0

    def num_with(self, tensor: str) -> int:
        """How many layers have it; one of no layer counts as of one."""
        return sum(f".{name}".endswith(f".{tensor}") for name in self._tensors)

    def layers_with(self, tensor: str) -> list[int]:
        """Their numbers."""
        count = self.num_layers
        layers = range(count if type(count) is int else 0)
        return [layer for layer in layers if f"blk.{layer}.{tensor}" in self._tensors]

    def of_layers(self, by_layer: list[Any]) -> list[Any]:
        """A list by layer without those behind the last one."""
        count = self.num_layers
        return by_layer[:count] if type(count) is int else by_layer

    def unexpected(self, key: str, expected: str) -> CheckpointError:
        """For what it says of a key behind the architecture's name."""
        return self.fault(
            f"{self.architecture}.{key} is {shown(self.get(key))}, expected {expected}"
        )

    def fault(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFamily:
    """How a family that llama.cpp knows is configured in transformers."""

    architecture: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    """The same as `_SIZES_OF_SOME`, of this one."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Keys of transformers that are true where a layer has a tensor."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """What llama.cpp takes for granted and transformers does not."""
    keys: Callable[[GgufMetadata], dict[str, Any]] = lambda said: {}
    """Keys of transformers that take more than one of GGUF."""
    positions: Mapping[str, Any] = field(default_factory=dict)
    """What llama.cpp takes for granted of scaled positions."""
    scaling_tensors: Collection[str] = ()
    """Those by which positions may be scaled, of which `keys` know."""
    divides: bool = False
    """Files may have one of `DIVIDES`, which is read."""
    arranged: Callable[[GgufMetadata], Arranged] = lambda said: {}
    """Weights that are not as the model has them."""

    def config(self, said: GgufMetadata, vocab_size: int, *, is_tied: bool) -> dict[str, Any]:
        """As ``config.json`` would have it. Raises CheckpointError for what is not read."""
        if not said.get("expert_count"):
            raise said.fault("no layer has experts; Mixture-of-Experts models are run")
        said.require_layers()
        width = said.get("expert_feed_forward_length") or said.get("feed_forward_length")
        sizes = {**_SIZES_OF_SOME, **self.sizes}
        own = ((key, said.get(name)) for key, name in sizes.items())
        described = FAMILIES[self.architecture]
        config = {
            **{key: said.get(name) for key, name in _USUAL_SIZES.items()},
            **{key: value for key, value in own if value is not None},
            **{key: said.has(name) for key, name in self.flags.items()},
            "mamba_conv_bias": said.has("ssm_conv1d.bias"),
            "num_hidden_layers": said.num_layers,
            "architectures": [self.architecture],
            "model_type": described.model_type,
            "dtype": "bfloat16",
            "vocab_size": vocab_size,
            "tie_word_embeddings": is_tied,
            "intermediate_size": said.get("feed_forward_length") or width,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": said.get("expert_shared_feed_forward_length")
            or width,
            "rope_parameters": {
                "rope_theta": said.get("rope.freq_base") or 10000.0,
                **self._scaled_positions(said),
                **rotated_share(said),
            },
            **self.entries,
            **self.keys(said),
        }
        return _in_objects({described.spelled(key): value for key, value in config.items()})

    def _scaled_positions(self, said: GgufMetadata) -> dict[str, Any]:
        """YaRN (Peng et al. 2023), or all positions closer together."""
        kind, tensors = said.get("rope.scaling.type"), said.scaling_tensors
        known = ("none",) if tensors else ("none", "yarn", "linear")
        read = DIVIDES if self.divides else self.scaling_tensors
        if kind not in (None, *known) or not {*read}.issuperset(tensors):
            by = tensors[0] if tensors else kind
            raise said.fault(
                f"positions are scaled ({shown(by)}), which is not read from GGUF; use the model's "
                "safetensors files"
            )
        if kind in (None, "none"):
            is_divided = self.divides and bool(tensors)
            return divided(said.factors(tensors[0])) if is_divided else {"rope_type": "default"}
        found = {key: said.get(f"rope.scaling.{name}") for key, name in _YARN.items()}
        given = {key: value for key, value in found.items() if value is not None}
        return {"rope_type": kind, **given, **self.positions, **_strength(said)}


def divided(factors: list[float]) -> dict[str, Any]:
    """Frequencies are divided by these (Llama 3), in rows of any length."""
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": _NO_ROW_IS_LONGER,
    }


def _in_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names such as ``ffn_config.moe_top_k``, in objects."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *objects, last = name.split(".")
        place = found
        for each in objects:
            place = place.setdefault(each, {})
        place[last] = value
    return found


def rotated_share(said: GgufMetadata) -> dict[str, float]:
    """How much of a head rotates, be it all; latents have a head of their own for it."""
    if said.get("attention.kv_lora_rank"):
        return {}
    rotated, head_dim = said.get("rope.dimension_count"), said.get("attention.key_length")
    if type(rotated) is not int or type(head_dim) is not int or not 0 < rotated <= head_dim:
        return {}
    return {"partial_rotary_factor": rotated / head_dim}


def _strength(said: GgufMetadata) -> dict[str, float]:
    """DeepSeek's ``mscale_all_dim``, of which files have a tenth; ``mscale``, which they leave out,
    is the same in all released models."""
    tenth = said.get("rope.scaling.yarn_log_multiplier")
    if not isinstance(tenth, float):
        return {}
    strength = round(10 * tenth, 6)
    return {"mscale": strength, "mscale_all_dim": strength}
