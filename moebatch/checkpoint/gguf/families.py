"""Families that llama.cpp knows, by the names that it gives their architectures."""

from dataclasses import replace
from typing import Any

from moebatch.checkpoint.gguf.family import (
    DIVIDES,
    Arranged,
    GgufFamily,
    GgufMetadata,
    divided,
    rotated_share,
)
from moebatch.formats.ggml_rearranged import (
    AsRows,
    ByKeyHead,
    ByTurns,
    CountedFromZero,
    Fading,
    Interleaved,
    LatentHalves,
)
from moebatch.quoting import shown
from moebatch.spec.families.kinds import FULL, LINEAR, SLIDING

_KEY_HEADS = "attention.head_count_kv"


def _key_heads(said: GgufMetadata, usual: int | None = None) -> int:
    """As many in all layers that attend; the others have none."""
    by_layer = said.get(_KEY_HEADS)
    if not isinstance(by_layer, list):
        return said.count(_KEY_HEADS, usual)
    attending = [count for count in by_layer if count != 0]
    count = attending[0] if attending else None
    if type(count) is not int or set(attending) != {count}:
        raise said.fault(
            f"{said.architecture}.{_KEY_HEADS} is {shown(by_layer)}, expected one number of at "
            "least 1 wherever a layer attends, and else 0"
        )
    return count


def _by_layer(said: GgufMetadata, key: str, has_none: str) -> list[Any]:
    found = said.get(key)
    if isinstance(found, list):
        return found
    raise said.fault(
        f"{said.architecture}.{key} is {shown(found)}, expected a number for each layer, 0 where "
        f"it {has_none}"
    )


def _kinds_by_heads(said: GgufMetadata, *, recurs: str, attends: str) -> dict[str, Any]:
    """Layers without heads of keys recur."""
    by_layer = _by_layer(said, _KEY_HEADS, "does not attend")
    return {
        "num_key_value_heads": _key_heads(said),
        "layer_types": [attends if count else recurs for count in by_layer],
    }


def _interleaved(said: GgufMetadata) -> Arranged:
    heads = said.count("attention.head_count")
    by_role = {"q": Interleaved(heads), "k": Interleaved(_key_heads(said, heads))}
    return {
        f"attn_{role}.{kind}": each for role, each in by_role.items() for kind in ("weight", "bias")
    }


def _latent(said: GgufMetadata) -> dict[str, Any]:
    """Heads of latent attention; older files have the sizes that newer ones give as ``_mla``."""
    rotated = said.count("rope.dimension_count")
    heads = said.count("attention.head_count")
    names = (f"attention.{kind}_length" for kind in ("key", "value"))
    key, value = (
        said.count(name if said.get(f"{name}_mla") is None else f"{name}_mla") for name in names
    )
    return {
        "num_key_value_heads": heads,
        "head_dim": None,  # which files have of latents
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "kv_lora_rank": said.count("attention.kv_lora_rank"),
        "q_lora_rank": said.get("attention.q_lora_rank"),
        "norm_topk_prob": said.get("expert_weights_norm") is True,
        **_groups(said),
    }


def _deepseek(said: GgufMetadata) -> dict[str, Any]:
    if said.get("attention.temperature_scale"):
        raise said.fault("queries have a temperature, which is not read of this architecture")
    return _latent(said)


def _mistral4(said: GgufMetadata) -> dict[str, Any]:
    """The temperature of queries is that of all released models, which files leave out."""
    usual = {"scale": 0.1, "length": said.get("rope.scaling.original_context_length")}
    found = {name: said.get(f"attention.temperature_{name}") for name in usual}
    if any(value not in (None, usual[name]) for name, value in found.items()):
        raise said.fault(f"the temperature of queries is {shown(found)}, expected {shown(usual)}")
    return _latent(said)


def _groups(said: GgufMetadata) -> dict[str, Any]:
    """Groups of experts, which files older than October 2025 leave out: only two released models of
    the architecture have any, DeepSeek-V3 (256 experts) and V2 (160)."""
    released = {256: (8, 4), 160: (8, 3)}
    usual, usual_kept = released.get(said.count("expert_count"), (1, 1))
    count = said.count("expert_group_count", usual)
    kept = said.count("expert_group_used_count", usual_kept if count == usual else count)
    return {
        "n_group": count,
        "topk_group": kept,
        "topk_method": "group_limited_greedy" if count > 1 else "greedy",
    }


def _choosing(said: GgufMetadata) -> dict[str, Any]:
    """Layers that take the choice of another one have no indexer; newer files say which do."""
    types = said.get("attention.indexer.types")
    if not isinstance(types, list):
        indexed = said.layers_with("indexer.attn_k.weight")
        types = [layer in indexed for layer in range(said.count("block_count"))]
    kinds = ["full" if each else "shared" for each in said.of_layers(types)]
    return {**_deepseek(said), "indexer_types": kinds}


def _latent_halves(said: GgufMetadata) -> Arranged:
    sizes = _latent(said)
    return {
        "attn_kv_b.weight": LatentHalves(sizes["num_key_value_heads"], sizes["qk_nope_head_dim"])
    }


_RECURRENT_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}


def _recurrent(said: GgufMetadata) -> dict[str, Any]:
    """Heads of values, and which layers recur where a file lists them."""
    keys: dict[str, Any] = {
        "linear_value_head_dim": said.count("ssm.inner_size") // said.count("ssm.time_step_rank")
    }
    recurs = said.get("attention.recurrent_layers")
    if isinstance(recurs, list):
        keys["layer_types"] = [LINEAR if each else FULL for each in said.of_layers(recurs)]
    return keys


def _from_zero(said: GgufMetadata) -> Arranged:
    """Norms count from one, but that behind a recurrence."""
    layer = ("attn_norm", "post_attention_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")
    norms = (*layer, "output_norm")
    return {f"{norm}.weight": CountedFromZero() for norm in norms}


def _recurrence(said: GgufMetadata, *, by_turns: bool) -> Arranged:
    """Of a recurrent layer; heads of values are in turns, or in the model's order."""
    key_heads, value_heads = said.count("ssm.group_count"), said.count("ssm.time_step_rank")
    key_head_dim = said.count("ssm.state_size")
    shared = value_heads // key_heads if by_turns else 1
    num_heads = key_heads if by_turns else value_heads
    before = 2 * key_heads * key_head_dim

    def turns(**others: Any) -> ByTurns:
        return ByTurns(num_key_heads=num_heads, num_shared=shared, **others)

    return {
        "attn_qkv.weight": turns(num_rows_before=before),
        "attn_gate.weight": turns(),
        "ssm_alpha.weight": turns(),
        "ssm_beta.weight": turns(),
        "ssm_conv1d.weight": turns(num_rows_before=before),
        "ssm_a": Fading(turns()),
        "ssm_dt.bias": turns(),
        "ssm_out.weight": turns(has_columns=True),
    }


def _qwen3_next(said: GgufMetadata) -> Arranged:
    """Older files have ``ssm_in`` as the model has it."""
    by_key_head = ByKeyHead(said.count("ssm.group_count"), said.count("ssm.state_size"))
    recurrence = _recurrence(said, by_turns=False)
    return {**_from_zero(said), **recurrence, "ssm_in.weight": by_key_head}


def _qwen3_5(said: GgufMetadata) -> Arranged:
    return {**_from_zero(said), **_recurrence(said, by_turns=True)}


def _llama4(said: GgufMetadata) -> dict[str, Any]:
    """Chunks, layers without positions and the temperature of these are not in files; they are
    those of all released models. Maverick, which has 128 experts, does not norm what it rotates."""
    if said.get("attention.sliding_window") == 0:
        raise said.fault("layers do not attend in chunks, which is not read of this architecture")
    return {
        "intermediate_size": said.count("expert_feed_forward_length"),
        "intermediate_size_mlp": said.count("feed_forward_length"),
        "use_qk_norm": said.count("expert_count") != 128,
    }


def _phimoe(said: GgufMetadata) -> dict[str, Any]:
    """By what cosines and sines are multiplied is not in files; it is as in all released models."""
    keys = {"sliding_window": said.get("attention.sliding_window") or None}
    if not said.scaling_tensors:
        return keys
    long, short = (said.factors(name) for name in _BY_LENGTH)
    strength = 1.243163121016122
    rotary = {
        "rope_type": "longrope",
        "rope_theta": said.get("rope.freq_base") or 1e4,
        "original_max_position_embeddings": said.count("rope.scaling.original_context_length"),
        "long_factor": long,
        "short_factor": short,
        "long_mscale": strength,
        "short_mscale": strength,
    }
    return keys | {"rope_parameters": rotary}


def _dense_first(said: GgufMetadata) -> dict[str, Any]:
    """No layer is dense where a file does not say so, as that of Solar Open."""
    return {"first_k_dense_replace": said.get("leading_dense_block_count") or 0}


def _lfm2(said: GgufMetadata) -> dict[str, Any]:
    return {
        "num_dense_layers": said.get("leading_dense_block_count") or 0,
        **_kinds_by_heads(said, recurs="conv", attends=FULL),
    }


def _short_convolution(said: GgufMetadata) -> Arranged:
    return {"shortconv.conv.weight": AsRows(said.count("shortconv.l_cache"))}


def _expansion(said: GgufMetadata) -> int:
    """How many times as wide as hidden states is what a recurrence sees."""
    width, hidden_size = said.count("ssm.inner_size"), said.count("embedding_length")
    if width % hidden_size:
        raise said.fault(
            f"{said.architecture}.ssm.inner_size is {width}, expected a multiple of "
            f"embedding_length ({hidden_size})"
        )
    return width // hidden_size


def _jamba(said: GgufMetadata) -> dict[str, Any]:
    """Layers with heads of keys attend, and those with a gate have experts."""
    by_layer = _by_layer(said, _KEY_HEADS, "does not attend")
    attending = [layer for layer, count in enumerate(by_layer) if count]
    return {
        "num_key_value_heads": _key_heads(said),
        "mamba_expand": _expansion(said),
        **_turns(said, "attn_layer", attending),
        **_turns(said, "expert_layer", said.layers_with("ffn_gate_inp.weight")),
    }


def _turns(said: GgufMetadata, which: str, layers: list[int]) -> dict[str, int]:
    """Such layers as one of so many, from the first on."""
    count = said.count("block_count")
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else count + 1
    if layers != [*range(first, count, period)]:
        raise said.fault(f"layers {layers} of {count} ({which}) do not come every so many")
    return {f"{which}_offset": first, f"{which}_period": period}


def _granite_hybrid(said: GgufMetadata) -> dict[str, Any]:
    """Whether layers that attend have rotary positions, files say under another name."""
    has_positions = said.get("rope.scaling.finetuned") is not False
    return {
        "shared_intermediate_size": said.get("expert_shared_feed_forward_length") or 0,
        "mamba_expand": _expansion(said),
        "position_embedding_type": "rope" if has_positions else "nope",
        **_kinds_by_heads(said, recurs="mamba", attends="attention"),
    }


def _nemotron(said: GgufMetadata) -> dict[str, Any]:
    """A layer of a file has heads of keys, or the width of an expert, or else it is Mamba-2."""
    heads = _by_layer(said, _KEY_HEADS, "does not attend")
    widths = _by_layer(said, "feed_forward_length", "has no experts")
    kinds = [
        FULL if count else "moe" if width else LINEAR
        for count, width in zip(heads, widths, strict=False)
    ]
    return {
        "num_key_value_heads": _key_heads(said),
        "layer_types": said.of_layers(kinds),
        "intermediate_size": said.get("expert_feed_forward_length"),
        "mamba_d_head": said.count("ssm.inner_size") // said.count("ssm.time_step_rank"),
    }


def _state_space(said: GgufMetadata) -> Arranged:
    by_head = AsRows(1)
    by_group = AsRows(said.count("ssm.inner_size") // said.count("ssm.group_count"))
    return {
        **_interleaved(said),
        "ssm_conv1d.weight": AsRows(said.count("ssm.conv_kernel")),
        "ssm_a": Fading(by_head),
        "ssm_d": by_head,
        "ssm_norm.weight": by_group,
    }


def _scan(said: GgufMetadata) -> Arranged:
    return {
        "ssm_conv1d.weight": AsRows(said.count("ssm.conv_kernel")),
        "ssm_a": Fading(AsRows(said.count("ssm.state_size"))),
    }


def _windows(said: GgufMetadata) -> list[str]:
    """What kind each layer is of, by whether it slides."""
    key = "attention.sliding_window_pattern"
    slides = said.get(key)
    if not isinstance(slides, list):
        raise said.fault(f"{said.architecture}.{key} is missing")
    return [SLIDING if each else FULL for each in said.of_layers(slides)]


def _by_window(said: GgufMetadata) -> dict[str, Any]:
    return {"layer_types": _windows(said)}


def _heads_by_window(said: GgufMetadata, key: str = _KEY_HEADS) -> dict[str, Any]:
    """Heads by the kind of a layer."""
    kinds, heads = _windows(said), said.get(key)
    by_layer = heads if isinstance(heads, list) else [heads] * len(kinds)
    if any(type(count) is not int for count in by_layer):
        key = f"{said.architecture}.{key}"
        raise said.fault(f"{key} is {shown(heads)}, expected numbers of heads")
    return dict(zip(kinds, by_layer, strict=False))


def _gemma(said: GgufMetadata) -> dict[str, Any]:
    """Layers that slide and layers that do not have heads of their own. The share of a head that
    rotates in the latter is not in files; it is that of all released models."""
    kinds, of_kind = _windows(said), _heads_by_window(said)
    return {
        "layer_types": kinds,
        "num_key_value_heads": of_kind.get(SLIDING),
        "num_global_key_value_heads": of_kind.get(FULL),
        "attention_k_eq_v": said.num_with("attn_v.weight") < said.num_with("attn_k.weight"),
        "global_head_dim": said.get("attention.key_length"),
        "head_dim": said.get("attention.key_length_swa"),
        "hidden_size_per_layer_input": said.get("embedding_length_per_layer_input") or 0,
        "num_kv_shared_layers": said.get("attention.shared_kv_layers") or 0,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": said.get("rope.freq_base_swa") or 1e4},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": said.get("rope.freq_base") or 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
    }


def _mlp_kinds(said: GgufMetadata) -> list[str]:
    sparse = said.layers_with("ffn_gate_inp.weight")
    return ["sparse" if layer in sparse else "dense" for layer in range(len(_windows(said)))]


def _step(said: GgufMetadata) -> dict[str, Any]:
    heads = _heads_by_window(said, "attention.head_count")
    limits = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}
    by_layer = {name: said.get(key) for name, key in limits.items()}
    return {
        "layer_types": _windows(said),
        "mlp_layer_types": _mlp_kinds(said),
        "num_attention_heads": heads.get(FULL, heads.get(SLIDING)),
        "num_sliding_attention_heads": heads.get(SLIDING),
        "num_key_value_heads": _key_heads(said),
        "rope_parameters": {FULL: _half(said), SLIDING: _unscaled(said, "rope.freq_base_swa")},
        **{
            name: said.of_layers(found) if isinstance(found, list) else found
            for name, found in by_layer.items()
        },
    }


def _unscaled(said: GgufMetadata, base: str) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": said.get(base) or 1e4}


def _half(said: GgufMetadata) -> dict[str, Any]:
    """Half of a head rotates where layers see everything, in all released models. The first
    converters worked out what divides frequencies as if all of it did: of twice as many, every
    other one is one of the half's. Later ones have nothing but ones behind those of the half."""
    rotary = _unscaled(said, "rope.freq_base") | {"partial_rotary_factor": 0.5}
    if not said.scaling_tensors:
        return rotary
    factors = said.factors(said.scaling_tensors[0])
    middle = len(factors) // 2
    is_padded = all(each == 1 for each in factors[middle:])
    return rotary | divided(factors[:middle] if is_padded else factors[::2])


def _mimo(said: GgufMetadata) -> dict[str, Any]:
    """The window of files leaves out the token itself, as that of released ones does. Both kinds of
    layers rotate the same share of a head."""
    of_kind = _heads_by_window(said)
    if of_kind.keys() == {FULL, SLIDING} and of_kind[SLIDING] != 2 * of_kind[FULL]:
        raise said.fault(
            f"{said.architecture}.{_KEY_HEADS} is {shown(said.get(_KEY_HEADS))}, expected twice as "
            "many in layers that slide as in the others"
        )
    bases = {FULL: said.get("rope.freq_base"), SLIDING: said.get("rope.freq_base_swa")}
    return {
        "layer_types": _windows(said),
        "mlp_layer_types": _mlp_kinds(said),
        "num_key_value_heads": of_kind.get(FULL),
        "sliding_window_size": said.get("attention.sliding_window"),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, **rotated_share(said)}
            for kind, base in bases.items()
        },
    }


def _kimi(said: GgufMetadata) -> dict[str, Any]:
    """All layers have as many heads. Groups are not in files of models without them."""
    return {
        **_deepseek(said),
        **_kinds_by_heads(said, recurs=LINEAR, attends=FULL),
        "num_key_value_heads": said.count("attention.head_count"),
        "linear_num_heads": said.count("attention.head_count"),
        "n_group": said.count("expert_group_count", 1),
        "topk_group": said.count("expert_group_used_count", 1),
        "norm_topk_prob": True,
    }


def _channel_delta(said: GgufMetadata) -> Arranged:
    taps = AsRows(said.count("ssm.conv_kernel"))
    return {
        **_latent_halves(said),
        **{f"ssm_conv1d_{role}.weight": taps for role in "qkv"},
        "ssm_a": Fading(AsRows(1)),
    }


_INDEXER_SIZES = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors by which frequencies of longer and of shorter rows are divided."""
_GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_MAMBA_SIZES = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
_QWEN3 = GgufFamily(architecture="Qwen3MoeForCausalLM", entries={"norm_topk_prob": True})
FAMILIES = {
    "llama": GgufFamily(architecture="MixtralForCausalLM", arranged=_interleaved, divides=True),
    "llama4": GgufFamily(
        architecture="Llama4ForCausalLM",
        sizes={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        keys=_llama4,
        divides=True,
    ),
    "qwen2moe": GgufFamily(architecture="Qwen2MoeForCausalLM"),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": _QWEN3,  # of text alone, whose positions are those of one axis
    "olmoe": GgufFamily(architecture="OlmoeForCausalLM"),
    "glm4moe": GgufFamily(
        architecture="Glm4MoeForCausalLM",
        keys=_dense_first,
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "minimax-m2": GgufFamily(architecture="MiniMaxM2ForCausalLM"),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        sizes=_WINDOW,
        positions={"truncate": False},
        flags={"attention_bias": "attn_q.bias"},
    ),
    "deepseek": GgufFamily(architecture="DeepseekForCausalLM", arranged=_interleaved),
    "deepseek2": GgufFamily(
        architecture="DeepseekV2ForCausalLM", keys=_deepseek, arranged=_latent_halves
    ),
    "mistral4": GgufFamily(
        architecture="Mistral4ForCausalLM",
        keys=_mistral4,
        arranged=_latent_halves,
        positions={"llama_4_scaling_beta": 0.1},
    ),
    "bailingmoe": GgufFamily(architecture="BailingMoeForCausalLM", arranged=_interleaved),
    "bailingmoe2": GgufFamily(
        architecture="BailingMoeV2ForCausalLM",
        flags={"use_qk_norm": "attn_q_norm.weight"},
    ),
    "exaone-moe": GgufFamily(
        architecture="ExaoneMoeForCausalLM",
        sizes=_WINDOW,
        keys=_by_window,
    ),
    "afmoe": GgufFamily(
        architecture="AfmoeForCausalLM",
        sizes=_WINDOW
        | {
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
        },
        entries={"mup_enabled": True},
    ),
    "mimo2": GgufFamily(
        architecture="MiMoV2FlashForCausalLM",
        sizes={
            "v_head_dim": "attention.value_length",
            "attention_value_scale": "attention.value_scale",
        },
        keys=_mimo,
    ),
    "phimoe": GgufFamily(
        architecture="PhimoeForCausalLM",
        keys=_phimoe,
        flags={"attention_bias": "attn_q.bias", "lm_head_bias": "output.bias"},
        scaling_tensors=_BY_LENGTH,
    ),
    "step35": GgufFamily(
        architecture="Step3p5ForCausalLM",
        sizes=_WINDOW
        | {
            "share_expert_dim": "expert_shared_feed_forward_length",
            "moe_router_scaling_factor": "expert_weights_scale",
        },
        keys=_step,
        arranged=_from_zero,
        scaling_tensors=DIVIDES,
    ),
    "dbrx": GgufFamily(
        architecture="DbrxForCausalLM",
        sizes={"rms_norm_eps": "attention.layer_norm_epsilon"},
    ),
    "glm-dsa": GgufFamily(
        architecture="GlmMoeDsaForCausalLM",
        sizes=_INDEXER_SIZES,
        keys=_choosing,
        arranged=_latent_halves,
    ),
    "dots1": GgufFamily(architecture="Dots1ForCausalLM", entries={"sliding_window": None}),
    "ernie4_5-moe": GgufFamily(
        architecture="Ernie4_5_MoeForCausalLM",
        sizes={
            "num_shared": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "granitemoe": GgufFamily(
        architecture="GraniteMoeSharedForCausalLM",
        sizes=_GRANITE_SCALES | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        arranged=_interleaved,
    ),
    "granitehybrid": GgufFamily(
        architecture="GraniteMoeHybridForCausalLM",
        sizes=_GRANITE_SCALES | _MAMBA_SIZES,
        keys=_granite_hybrid,
        arranged=_state_space,
    ),
    "jamba": GgufFamily(
        architecture="JambaForCausalLM",
        sizes={
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        keys=_jamba,
        arranged=_scan,
    ),
    "nemotron_h_moe": GgufFamily(
        architecture="NemotronHForCausalLM",
        sizes=_MAMBA_SIZES
        | {
            "rms_norm_eps": "attention.layer_norm_epsilon",
            "moe_latent_size": "moe_latent_size",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        keys=_nemotron,
        arranged=_state_space,
    ),
    "lfm2moe": GgufFamily(
        architecture="Lfm2MoeForCausalLM",
        sizes={"conv_L_cache": "shortconv.l_cache"},
        keys=_lfm2,
        arranged=_short_convolution,
    ),
    "kimi-linear": GgufFamily(
        architecture="KimiLinearForCausalLM",
        sizes={"linear_head_dim": "kda.head_dim", "linear_conv_kernel_dim": "ssm.conv_kernel"},
        keys=_kimi,
        arranged=_channel_delta,
    ),
    "hunyuan-moe": GgufFamily(architecture="HunYuanMoEV1ForCausalLM"),
    "gemma4": GgufFamily(
        architecture="Gemma4ForCausalLM",
        sizes=_WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        entries={"enable_moe_block": True},
        keys=_gemma,
        scaling_tensors=DIVIDES,
    ),
    "qwen3next": GgufFamily(
        architecture="Qwen3NextForCausalLM",
        sizes=_RECURRENT_SIZES,
        keys=_recurrent,
        arranged=_qwen3_next,
    ),
    "qwen35moe": GgufFamily(
        architecture="Qwen3_5MoeForCausalLM",
        sizes=_RECURRENT_SIZES,
        keys=_recurrent,
        arranged=_qwen3_5,
    ),
}
"""By the architecture's name in GGUF."""
_WITH_SIGMOIDS = {"deepseek2": replace(FAMILIES["deepseek2"], architecture="DeepseekV3ForCausalLM")}
"""Those that share a name with another family. Kimi-K2 and GLM-4.7-Flash are as DeepSeek-V3."""


def family_of(said: GgufMetadata) -> GgufFamily:
    """By the architecture; where two share a name, by how gates score. Raises CheckpointError for
    one that is not known."""
    found = said.architecture
    if not isinstance(found, str) or found not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise said.fault(
            f"architecture {shown(found)} of GGUF is not supported; supported are {known}, with "
            "experts"
        )
    with_sigmoids = _WITH_SIGMOIDS.get(found) if said.has_sigmoids else None
    return with_sigmoids or FAMILIES[found]
