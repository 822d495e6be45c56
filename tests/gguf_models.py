"""Plain checkpoints made into GGUF, each with what the gguf package decodes it to."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
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
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_vl_moe": gguf.MODEL_ARCH.QWEN3VLMOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek": gguf.MODEL_ARCH.DEEPSEEK,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "mistral3": gguf.MODEL_ARCH.MISTRAL4,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "jamba": gguf.MODEL_ARCH.JAMBA,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "glm_moe_dsa": gguf.MODEL_ARCH.GLM_DSA,
    "solar_open": gguf.MODEL_ARCH.GLM4_MOE,
    "glm4v_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "bailing_moe": gguf.MODEL_ARCH.BAILINGMOE,
    "bailing_moe_v2": gguf.MODEL_ARCH.BAILINGMOE2,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "afmoe": gguf.MODEL_ARCH.AFMOE,
    "mimo_v2_flash": gguf.MODEL_ARCH.MIMO2,
    "dbrx": gguf.MODEL_ARCH.DBRX,
    "step3p7": gguf.MODEL_ARCH.STEP35,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa", "mistral3")
RECURRENT = ("qwen3_next", "qwen3_5_moe_text")
HYBRID = ("granitemoehybrid", "lfm2_moe", "nemotron_h", "jamba")
"""Those whose files say by heads of keys which layers recur."""
_LING = ("bailing_moe", "bailing_moe_v2")
_GLM = ("glm4_moe", "glm4v_moe", "solar_open")
_SHARED = (*_GLM, "dots1", "deepseek", "exaone_moe", *_LING, *LATENT)
_WITH_SIGMOIDS = (
    *(*_GLM, "minimax_m2", "dots1", "deepseek_v3", "glm4_moe_lite", "lfm2_moe"),
    *("kimi_linear", "bailing_moe_v2", "exaone_moe", "afmoe", "mimo_v2_flash"),
    "glm_moe_dsa",
)
_GRANITE = ("granitemoe", "granitemoeshared", "granitemoehybrid")
_INTERLEAVED = ("mixtral", "deepseek", "nemotron_h", *_GRANITE)
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
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("moe_topk", "moe_top_k", "top_k_experts", "moe_k", "num_experts_per_tok")
_OTHER_NAMES = {
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "kv_n_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "model_max_length": "max_position_embeddings",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
Types = Callable[[str], str]
"""Of a tensor by its name in GGUF."""


def write_gguf(
    source: Path,
    target: Path,
    types: Types,
    *,
    split: int = 0,
    apart: bool = False,
    joined: bool = False,
    older: bool = False,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    left_out: Sequence[str] = (),
    factors: Mapping[str, Any] = MappingProxyType({}),
    cuts: str | None = None,
    trimmed: bool = False,
) -> Path:
    """Makes the folder `target` of the plain one, which holds ``model.gguf`` and a tokenizer, and
    beside it ``TARGET-decoded``, a plain one of the weights that it stands for.

    `types` are those of matrices but routers, float16 where rows are not whole blocks. With `split`
    a file has so many tensors; with `apart` each expert has its own, as in the first files of
    Mixtral; with `joined` gates lie above what they gate; `older` converters left projections
    whole. `metadata` are numbers and texts beside the usual ones, or in their place, and those
    that begin with one of `left_out` are not written. With `factors` positions are scaled by
    tensors of such names. With the name of a way to cut text the file has the tokenizer of the
    source, and none lies beside it. With `trimmed` no tensor begins with a dimension of one, as
    none does once llama.cpp has quantised a file.
    """
    config = json.loads((source / "config.json").read_text())
    for beside in ("text_config", "attn_config", "ffn_config"):
        config = {**config.get(beside, {}), **config}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    config |= {key: config[own] for own, key in _OTHER_NAMES.items() if own in config}
    architecture = ARCHITECTURES[config["model_type"]]
    count = config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0)
    names = gguf.get_tensor_name_map(architecture, count)
    tensors = read_tensors(source)
    places = _by_gguf_name(_of_text(_counted(tensors)), config, names, older=older)
    places = _with_gates_above(places) if joined else places
    flat = torch.cat([each.float().flatten() for each in tensors.values()])
    stored: dict[str, tuple[str, Any]] = {}
    for name, place in places.items():
        weight = flat[place.flatten()].view(place.shape)
        kind = types(name) if place.dim() > 1 and not _is_plain(name) else "F32"
        if place.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            kind = "F16"
        data, numbers = _stored(_worked_out(weight, name, config), kind)
        flat[place.flatten()] = _as_before(numbers, name, config).flatten()
        if apart and "_exps" in name:
            stored |= {
                name.replace("_exps", f".{number}"): (kind, each)
                for number, each in enumerate(data)
            }
        else:
            is_row = "inp_shexp" in name or (trimmed and len(data) == 1)
            stored[name] = kind, data.squeeze(0) if is_row else data
    sizes = [each.numel() for each in tensors.values()]
    decoded = {
        name: numbers.view(each.shape)
        for (name, each), numbers in zip(tensors.items(), torch.split(flat, sizes), strict=True)
    }
    for name, each in {**_factors(config), **factors}.items():
        stored[name] = str(each.dtype).replace("float", "F"), each
    said = {
        key: value
        for key, value in {**_metadata(config, older=older), **metadata}.items()
        if value is not None and not key.startswith(tuple(left_out))
    }
    _write(source, target, architecture, said, stored, split, cuts)
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


def _is_plain(name: str) -> bool:
    numbers = ("ffn_gate_inp", "conv1d", "shortconv.conv", "norm")
    return not name.endswith(".weight") or any(part in name for part in numbers)


def _counted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In place of every number, which one it is of all tensors."""
    counted, start = {}, 0
    for name, each in tensors.items():
        counted[name] = torch.arange(start, start + each.numel()).view(each.shape)
        start += each.numel()
    return counted


def _of_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without those of images, which have a file of their own."""
    return {
        name.replace("language_model.", ""): each
        for name, each in tensors.items()
        if not any(part in name for part in ("visual", "vision", "vit_", "projector"))
    }


def _with_gates_above(places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined = dict(places)
    for name in places:
        if "gate_exps" in name:
            parts = [joined.pop(name), joined.pop(name.replace("gate", "up"))]
            joined[name.replace("gate", "gate_up")] = torch.cat(parts, dim=1)
    return joined


def _by_gguf_name(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], names: Any, *, older: bool
) -> dict[str, Tensor]:
    """As the converter of llama.cpp takes them apart, orders and names them."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [f"{w:0>4}" for w in name.split(".")]):
        is_whole = older and any(part in name for part in ("kv_b_proj", "in_proj_qkvz"))
        parts = _parts(name, tensors[name], config)
        for part, each in [(name, tensors[name])] if is_whole else parts:
            found.setdefault(_gguf_name(part, names), []).append(each)
    return {name: torch.stack(own) if len(own) > 1 else own[0] for name, own in found.items()}


def _gguf_name(name: str, names: Any) -> str:
    """Experts under one."""
    if name.startswith("blk."):
        return name
    words = name.split(".")
    if "experts" in words and words[words.index("experts") + 1].isdigit():
        del words[words.index("experts") + 1]
    merged = ".".join(words).replace("block_sparse_moe.experts", "feed_forward.experts")
    is_short = "feed_forward.experts" in merged and "_proj" not in merged
    merged = merged.removeprefix("model.") if is_short else merged
    merged = merged.replace("e_score_correction_bias", "e_score_correction.bias")
    merged = merged.replace("expert_bias", "expert_bias.bias")
    merged = merged.replace("router_bias", "router_bias.bias")
    merged = merged.replace("attention_sink_bias", "attention_sink_bias.weight")
    if ".mixer.experts." in merged:
        merged = merged.replace("backbone", "model").replace("mixer", "mlp")
    merged = merged.replace("mixer.dt_bias", "mixer.dt.bias")
    merged = merged.replace("dt_bias", "dt_proj.bias").replace("sinks", "sinks.weight")
    theirs = names.get_name(merged, try_suffixes=(".weight", ".bias"))
    assert isinstance(theirs, str), name
    return theirs


def _parts(name: str, weight: Tensor, config: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """What the converter makes of one tensor."""
    family = config["model_type"]
    if family in _INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        keys = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        return [(name, _interleaved(weight, int(config[keys[name.split(".")[-2]]])))]
    if family in _GRANITE and "input_linear" in name:
        kind = "shexp" if "shared" in name else "exps"
        layer = f"blk.{name.split('.')[2]}.ffn"
        halves = torch.chunk(weight, 2, dim=-2)
        return [
            (f"{layer}_{role}_{kind}.weight", half)
            for role, half in zip(("gate", "up"), halves, strict=True)
        ]
    if family == "qwen3_vl_moe" and "experts" in name:
        roles = ("gate", "up") if "gate_up" in name else ("down",)
        stem, parts = name.rpartition(".")[0], torch.chunk(weight, len(roles), dim=1)
        return [
            (f"{stem}.{role}_proj.weight", part) for role, part in zip(roles, parts, strict=True)
        ]
    if family == "llama4_text" and ".experts." in name:
        roles = ("gate", "up") if "gate_up" in name else ("down",)
        stem, by_row = name.rpartition(".")[0], weight.transpose(1, 2)
        parts = torch.chunk(by_row, len(roles), dim=1)
        return [
            (f"{stem}.{role}_proj.weight", part) for role, part in zip(roles, parts, strict=True)
        ]
    if family == "gpt_oss" and "_proj" in name and "experts" in name:
        stem, kind = (name.removesuffix("_bias"), "bias") if "_bias" in name else (name, "weight")
        by_row = weight if kind == "bias" else weight.transpose(1, 2)
        if "gate_up" not in name:
            return [(f"{stem}.{kind}", by_row)]
        return [
            (f"{stem.replace('gate_up', role)}.{kind}", by_row[:, place::2])
            for place, role in enumerate(("gate", "up"))
        ]
    if family == "mistral3" and ".experts." in name:
        return [(f"{name}.weight", weight)]
    if family == "gemma4_text" and ("router." in name or "experts" in name or "scalar" in name):
        return [(_of_gemma(name), weight)]
    if family == "bailing_moe" and "query_key_value" in name:
        return _of_ling(name, weight, config)
    if family == "dbrx" and "experts" in name:
        by_expert = weight.view(config["moe_num_experts"], -1, weight.shape[-1])
        return [(f"{name}.weight", by_expert.transpose(1, 2) if "w2" in name else by_expert)]
    if family == "kimi_linear" and "_conv1d.weight" in name:
        return [(name, weight.unsqueeze(0))]
    if family == "kimi_linear" and "_proj" in name and "expert" not in name:
        # Released files name layers without experts otherwise than transformers.
        name = name.replace("block_sparse_moe", "mlp")
    if family in (*LATENT, "kimi_linear") and "kv_b_proj" in name:
        heads, key = config["num_attention_heads"], config["qk_nope_head_dim"]
        by_head = weight.view(heads, -1, weight.shape[-1])
        return [
            (name.replace("kv_b", "k_b"), by_head[:, :key].transpose(1, 2)),
            (name.replace("kv_b", "v_b"), by_head[:, key:]),
        ]
    if family in HYBRID:
        return [(name, _as_matrix(name, weight, config))]
    return _of_recurrence(name, weight, config) if "linear_attn" in name else [(name, weight)]


def _of_ling(name: str, weight: Tensor, config: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Apart, queries and keys interleaved."""
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = len(weight) // (heads + 2 * key_heads)
    q, k, v = torch.split(weight, [heads * size, key_heads * size, key_heads * size])
    layer = f"blk.{name.split('.')[2]}.attn"
    return [
        (f"{layer}_q.weight", _interleaved(q, heads)),
        (f"{layer}_k.weight", _interleaved(k, key_heads)),
        (f"{layer}_v.weight", v),
    ]


def _as_matrix(name: str, weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Numbers of convolutions, of heads and of groups of heads."""
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        return weight.squeeze(1)
    if name.endswith((".A_log", ".D")) and config["model_type"] != "jamba":
        return weight.unsqueeze(1)
    is_norm = "mamba.norm" in name or "mixer.norm" in name
    groups = config.get("mamba_n_groups") or config.get("n_groups")
    return weight.view(groups, -1) if is_norm else weight


def _of_gemma(name: str) -> str:
    layer = f"blk.{name.split('.')[2]}"
    ends = {
        "router.proj.weight": "ffn_gate_inp.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "layer_scalar": "layer_output_scale.weight",
    }
    return next(f"{layer}.{theirs}" for end, theirs in ends.items() if name.endswith(end))


def _of_recurrence(
    name: str, weight: Tensor, config: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    key_heads, value_heads = (config[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    key, value = (config[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
    weight = weight.squeeze(1) if "conv1d" in name else weight
    shared = value_heads // key_heads
    if "in_proj_qkvz" in name:
        by_head = weight.view(key_heads, -1, weight.shape[1])
        parts = torch.split(by_head, [key, key, shared * value, shared * value], dim=1)
        flat = [part.reshape(-1, weight.shape[1]) for part in parts]
        return [
            (name.replace("qkvz", "qkv"), torch.cat(flat[:3])),
            (name.replace("qkvz", "z"), flat[3]),
        ]
    is_own = any(part in name for part in ("in_proj_ba", "linear_attn.norm"))
    if config["model_type"] == "qwen3_next" or is_own:
        return [(name, weight)]
    before = 2 * key_heads * key if "in_proj_qkv" in name or "conv1d" in name else 0
    rows = weight.T if "out_proj" in name else weight
    of_values = rows[before:].reshape(key_heads, shared, -1)
    in_turns = torch.cat((rows[:before].flatten(), of_values.transpose(0, 1).flatten()))
    in_turns = in_turns.view(rows.shape)
    return [(name, in_turns.T if "out_proj" in name else in_turns)]


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _worked_out(weight: Tensor, name: str, config: Mapping[str, Any]) -> Tensor:
    """What the converter works out beforehand."""
    if _counts_from_one(name, config):
        return weight + 1
    return -weight.exp() if name.endswith("ssm_a") else weight


def _as_before(weight: Tensor, name: str, config: Mapping[str, Any]) -> Tensor:
    if _counts_from_one(name, config):
        return weight - 1
    return (-weight).log() if name.endswith("ssm_a") else weight


def _counts_from_one(name: str, config: Mapping[str, Any]) -> bool:
    is_norm = name.endswith("norm.weight") and "ssm" not in name
    return is_norm and config["model_type"] in (*RECURRENT, "step3p7")


def _metadata(config: Mapping[str, Any], *, older: bool) -> dict[str, Any]:
    """Behind the name of the architecture."""
    rotary = config.get("rope_parameters") or config
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "rope.freq_base": rotary.get("rope_theta"),
        "expert_count": next(config[key] for key in _NUM_EXPERTS if key in config),
        "expert_used_count": next(config[key] for key in _NUM_CHOSEN if key in config),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    family = config["model_type"]
    if family in (*_GLM, "minimax_m2", "bailing_moe_v2", *RECURRENT):
        share = rotary.get("partial_rotary_factor", 1.0)
        found["rope.dimension_count"] = config.get("rotary_dim") or int(config["head_dim"] * share)
    if family in _WITH_SIGMOIDS:
        found["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
    if family in _SHARED:
        behind = config.get("num_nextn_predict_layers", 0)
        found |= {
            "block_count": config["num_hidden_layers"] + behind,
            "nextn_predict_layers": behind,
            "leading_dense_block_count": config.get("first_k_dense_replace"),
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": config.get("routed_scaling_factor", 1.0),
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_group_count": config.get("n_group"),
            "expert_group_used_count": config.get("topk_group"),
        }
    if family in LATENT and older:
        found |= {
            "attention.head_count_kv": config["num_attention_heads"],
            "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "attention.value_length": config["v_head_dim"],
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.q_lora_rank": config["q_lora_rank"],
            "rope.dimension_count": config["qk_rope_head_dim"],
        }
    elif family in LATENT:
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"],
            "attention.kv_lora_rank": rank,
            "attention.q_lora_rank": config["q_lora_rank"],
            "rope.dimension_count": rotated,
        }
    if family in RECURRENT:
        value_heads = config["linear_num_value_heads"]
        recurs = [kind == "linear_attention" for kind in config["layer_types"]]
        found |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": value_heads,
            "ssm.inner_size": config["linear_value_head_dim"] * value_heads,
            "attention.recurrent_layers": recurs,
        }
    if family in _GRANITE:
        found |= {
            "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "attention.scale": config["attention_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    by_layer = [
        0 if kind in ("mamba", "linear_attention", "conv") else config["num_key_value_heads"]
        for kind in config.get("layer_types") or ()
    ]
    if family == "granitemoehybrid":
        found |= {
            "attention.head_count_kv": by_layer,
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.time_step_rank": config["mamba_n_heads"],
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
            "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        }
    if family == "jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        attends = [n % period == offset for n in range(config["num_hidden_layers"])]
        found |= {
            "attention.head_count_kv": [config["num_key_value_heads"] * each for each in attends],
            "rope.freq_base": None,
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.time_step_rank": config["mamba_dt_rank"],
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        }
    if family == "nemotron_h":
        kinds, width = config["layers_block_type"], config["moe_intermediate_size"]
        heads = config["num_key_value_heads"]
        found |= {
            "attention.head_count_kv": [heads * (kind == "full_attention") for kind in kinds],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "feed_forward_length": [width * (kind == "moe") for kind in kinds],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
            "moe_latent_size": config.get("moe_latent_size"),
            "ssm.conv_kernel": config["conv_kernel"],
            "ssm.state_size": config["ssm_state_size"],
            "ssm.group_count": config["n_groups"],
            "ssm.time_step_rank": config["mamba_num_heads"],
            "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
            "rope.scaling.finetuned": False,
        }
    if family == "kimi_linear":
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        attends = [kind == "full_attention" for kind in config["layer_types"]]
        found |= {
            "attention.head_count_kv": [*map(int, attends)],
            "attention.key_length": rank + rotated,
            "attention.value_length": None,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"],
            "attention.kv_lora_rank": rank,
            "attention.q_lora_rank": config["q_lora_rank"],
            "rope.dimension_count": rotated,
            "rope.freq_base": None,
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "kda.head_dim": config["linear_head_dim"],
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
            "expert_weights_scale": config["routed_scaling_factor"],
        }
    if family == "glm_moe_dsa":
        found |= {
            "attention.indexer.head_count": config["index_n_heads"],
            "attention.indexer.key_length": config["index_head_dim"],
            "attention.indexer.top_k": config["index_topk"],
            "attention.indexer.types": [each == "full" for each in config["indexer_types"]],
        }
    if family == "afmoe":
        found |= {
            "expert_shared_count": config["num_shared_experts"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_weights_scale": config["route_scale"],
        }
    if family == "dbrx":
        found |= {"attention.clamp_kqv": config["clip_qkv"], "attention.layer_norm_epsilon": 1e-5}
    if family in ("exaone_moe", "mimo_v2_flash", "step3p7"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        found["attention.sliding_window_pattern"] = slides
    if family == "mimo_v2_flash":
        kinds, heads = config["rope_parameters"], config["num_key_value_heads"]
        full = kinds["full_attention"]
        found |= {
            "attention.head_count_kv": [heads * (1 + each) for each in slides],
            "attention.value_length": config["v_head_dim"],
            "attention.value_scale": config["attention_value_scale"],
            "rope.dimension_count": int(config["head_dim"] * full["partial_rotary_factor"]),
            "rope.freq_base": full["rope_theta"],
            "rope.freq_base_swa": kinds["sliding_attention"]["rope_theta"],
        }
    if family == "llama4_text":
        found |= {
            "feed_forward_length": config["intermediate_size_mlp"],
            "expert_feed_forward_length": config["intermediate_size"],
            "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        }
    if family == "step3p7":
        kinds, heads = config["rope_parameters"], config["num_attention_heads"]
        of_kind = (heads, config["num_sliding_attention_heads"])
        limits = {
            name: [limit or 0.0 for limit in config[key]]
            for name, key in (("exp", "swiglu_limits"), ("shexp", "swiglu_limits_shared"))
        }
        found |= {
            "attention.head_count": [of_kind[each] for each in slides],
            "attention.head_count_kv": [config["num_key_value_heads"]] * len(slides),
            "expert_shared_feed_forward_length": config["share_expert_dim"],
            "expert_weights_scale": config["moe_router_scaling_factor"],
            "leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
            "moe_every_n_layers": 1,
            "rope.freq_base": kinds["full_attention"]["rope_theta"],
            "rope.freq_base_swa": kinds["sliding_attention"]["rope_theta"],
            **{f"swiglu_clamp_{name}": each for name, each in limits.items()},
        }
    if family == "lfm2_moe":
        found |= {
            "attention.head_count_kv": by_layer,
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "leading_dense_block_count": config["num_dense_layers"],
            "shortconv.l_cache": config["conv_L_cache"],
        }
    if family == "qwen3_vl_moe":
        sections = config["rope_parameters"]["mrope_section"]
        found |= {"rope.dimension_sections": [*sections, 0], "n_deepstack_layers": 1}
    if family == "ernie4_5_moe":
        found |= {
            "expert_shared_count": config["moe_num_shared_experts"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
        }
    if family == "gemma4_text":
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        full = next(iter(config["per_layer_config"].values()))
        heads = (full["num_key_value_heads"], config["num_key_value_heads"])
        rotary = config["rope_parameters"]
        found |= {
            "attention.sliding_window_pattern": slides,
            "attention.head_count_kv": [heads[each] for each in slides],
            "attention.key_length": full["head_dim"],
            "attention.key_length_swa": config["head_dim"],
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "attention.shared_kv_layers": config["num_kv_shared_layers"],
            "final_logit_softcapping": config["final_logit_softcapping"],
            "rope.freq_base": rotary["full_attention"]["rope_theta"],
            "rope.freq_base_swa": rotary["sliding_attention"]["rope_theta"],
        }
    found["attention.sliding_window"] = config.get("sliding_window")
    if family == "mimo_v2_flash":  # which leaves out the token itself
        found["attention.sliding_window"] -= 1
    found |= _scaling(config.get("rope_parameters") or {})
    return found


def _factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """By what frequencies are divided, as the converter works it out."""
    rotary = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        return {"rope_freqs.weight": np.ones(4, np.float32)}
    if rotary.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rotary[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rotary.get("rope_type") != "llama3":
        return {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope_freqs.weight": divisors(rotary, size)}


def divisors(rotary: Mapping[str, Any], size: int) -> Any:
    """Of the frequencies with which so many numbers of a head rotate (Llama 3)."""
    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
    turns = rotary["original_max_position_embeddings"] / (2 * np.pi)
    turns = turns / rotary["rope_theta"] ** (np.arange(0, size, 2) / size)
    share = ((turns - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - share) / rotary["factor"] + share)).astype(np.float32)


def _scaling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = parameters.get("rope_type", "default")
    if kind == "longrope":
        length = parameters["original_max_position_embeddings"]
        return {"rope.scaling.original_context_length": length, "rope.scaling.attn_factor": 1.19}
    if kind in ("default", "llama3"):
        return {}
    found = {
        "type": parameters["rope_type"],
        "factor": parameters["factor"],
        "original_context_length": parameters.get("original_max_position_embeddings"),
        "yarn_attn_factor": parameters.get("attention_factor"),
        "yarn_beta_fast": parameters.get("beta_fast"),
        "yarn_beta_slow": parameters.get("beta_slow"),
        "yarn_log_multiplier": 0.1 * parameters.get("mscale_all_dim", 0.0) or None,
    }
    return {f"rope.scaling.{key}": value for key, value in found.items()}


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, cuts: str) -> None:
    """Writes the byte-level tokenizer of a folder as llama.cpp's converter does."""
    content = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "tokenizer_config.json").read_text())
    added = {each["content"]: each["special"] for each in content["added_tokens"]}
    numbers = {each["content"]: each["id"] for each in content["added_tokens"]}
    vocabulary = sorted((content["model"]["vocab"] | numbers).items(), key=lambda each: each[1])
    kinds = {None: gguf.TokenType.NORMAL, True: gguf.TokenType.CONTROL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cuts)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(
        [kinds.get(added.get(token), gguf.TokenType.USER_DEFINED) for token, _ in vocabulary]
    )
    merges = content["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(numbers[config["bos_token"]])
    writer.add_eos_token_id(numbers[config["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template((source / "chat_template.jinja").read_text())


def _write(
    source: Path,
    target: Path,
    architecture: Any,
    metadata: Mapping[str, Any],
    stored: Mapping[str, tuple[str, Any]],
    split: int,
    cuts: str | None,
) -> None:
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists() and cuts is None:
            shutil.copy(source / name, target)
    known = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(target / "model.gguf", known, split_max_tensors=split)
    adders: Any = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        adders[type(value)](f"{known}.{key}", value)
    if cuts is None:
        writer.add_token_list(["a", "list", "of", "texts"])
    else:
        add_tokenizer(writer, source, cuts)
    for name, (kind, data) in stored.items():
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
