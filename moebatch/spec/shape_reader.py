"""Shapes of models out of their ``config.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebatch.quoting import shown
from moebatch.spec.config_faults import ConfigFault, FaultyConfig
from moebatch.spec.config_file import load_config
from moebatch.spec.config_keys import ConfigKeys
from moebatch.spec.latent_attention import LatentAttention
from moebatch.spec.shape import ModelShape
from moebatch.spec.shape_keys import FAMILY_KEYS, RUNNABLE, FamilyKeys


def load_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder. Raises CheckpointError."""
    path = folder / "config.json"
    return read_shape(load_config(path), str(path))


def read_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a raw ``config.json`` describes, absent keys as transformers fills them.

    Raises FaultyConfig, with ``where`` and all faults at once, for architectures and
    quantisations that are not supported and for figures that make no sense. Architectures
    beyond `RUNNABLE` can be planned, not run.
    """
    family = _family_keys(config, where)
    expert_bits = _expert_bits(config, family, where)
    keys = ConfigKeys(config, family)
    shape = _shape(keys, family, expert_bits)
    keys.require_countable(len(shape.moe_layers), shape.num_experts)
    if keys.faults:
        raise FaultyConfig(where, keys.faults)
    return shape


def require_runnable(config: Mapping[str, Any], where: str) -> None:
    """Raises FaultyConfig for an architecture that the decoder does not compute."""
    family = _family_keys(config, where)
    if not family.runnable:
        message = (
            f"architecture {family.architecture} can be planned but not run yet; those that can "
            f"be run are {', '.join(RUNNABLE)}"
        )
        raise FaultyConfig(where, [ConfigFault("architectures", message, names_key=True)])


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
        plannable = [name for name in FAMILY_KEYS if name not in RUNNABLE]
        message = (
            f"architecture {shown(found)} is not supported; supported are {', '.join(RUNNABLE)}, "
            f"and for plans only {', '.join(plannable)}"
        )
        raise FaultyConfig(where, [ConfigFault("architectures", message, names_key=True)])
    return family


def _expert_bits(config: Mapping[str, Any], family: FamilyKeys, where: str) -> float | None:
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if isinstance(method, str) and method in family.expert_bits:
        return family.expert_bits[method]
    message = (
        f"quantization_config ({shown(method) if method else 'unnamed'}): quantised checkpoints "
        "are not supported; use the model's bfloat16, float16 or float32 checkpoint"
    )
    raise FaultyConfig(where, [ConfigFault("quantization_config", message, names_key=True)])


def _shape(keys: ConfigKeys, family: FamilyKeys, expert_bits: float | None) -> ModelShape:
    num_layers = keys.count("num_hidden_layers")
    heads, kv_heads, head_dim = keys.heads()
    latent = _latent(keys, head_dim) if family.latent_attention else None
    return ModelShape(
        architecture=family.architecture,
        num_layers=num_layers,
        hidden_size=keys.count("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim + keys.count("qk_nope_head_dim") if latent else head_dim,
        vocab_size=keys.count("vocab_size"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        moe_layers=keys.moe_layers(num_layers),
        num_experts=keys.num_experts(),
        experts_per_token=keys.experts_per_token(),
        expert_width=keys.count(family.expert_width_key),
        dense_width=keys.count("intermediate_size") if family.dense_layers != "none" else 0,
        shared_expert_width=_shared_expert_width(keys, family),
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
        shared_expert_gate=family.shared_experts != "counted",
        moe_bias=family.moe_bias,
        attention_sinks=family.attention_sinks,
        latent=latent,
        expert_bits_per_param=expert_bits,
    )


def _latent(keys: ConfigKeys, rope_head_dim: int) -> LatentAttention:
    return LatentAttention(
        kv_rank=keys.count("kv_lora_rank"),
        query_rank=keys.count_or_none("q_lora_rank"),
        rope_head_dim=rope_head_dim,
        value_head_dim=keys.count("v_head_dim"),
    )


def _shared_expert_width(keys: ConfigKeys, family: FamilyKeys) -> int:
    if family.shared_experts == "gated":
        return keys.count("shared_expert_intermediate_size")
    if family.shared_experts == "counted":
        return keys.count_or_zero("n_shared_experts") * keys.count(family.expert_width_key)
    return 0
