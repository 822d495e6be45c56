"""Keys of transformers that take more than one of GGUF, for each family that has such."""

from typing import Any

from moebatch.checkpoint.gguf.family import GgufMetadata, divided, rotated_share
from moebatch.quoting import shown
from moebatch.spec.families.kinds import FULL, LINEAR, SLIDING

BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors by which frequencies of longer and of shorter rows are divided."""
_KEY_HEADS = "attention.head_count_kv"


def key_heads(said: GgufMetadata, usual: int | None = None) -> int:
    """As many in all layers that attend; the others have none."""
    by_layer = said.get(_KEY_HEADS)
    if not isinstance(by_layer, list):
        return said.count(_KEY_HEADS, usual)
    attending = [count for count in by_layer if count != 0]
    count = attending[0] if attending else None
    if type(count) is not int or set(attending) != {count}:
        expected = "one number of at least 1 wherever a layer attends, and else 0"
        raise said.unexpected(_KEY_HEADS, expected)
    return count


def _by_layer(said: GgufMetadata, key: str, has_none: str) -> list[Any]:
    found = said.get(key)
    if isinstance(found, list):
        return found
    raise said.unexpected(key, f"a number for each layer, 0 where it {has_none}")


def _kinds_by_heads(said: GgufMetadata, *, recurs: str, attends: str) -> dict[str, Any]:
    """Layers without heads of keys recur."""
    by_layer = _by_layer(said, _KEY_HEADS, "does not attend")
    return {
        "num_key_value_heads": key_heads(said),
        "layer_types": [attends if count else recurs for count in by_layer],
    }


def latent(said: GgufMetadata) -> dict[str, Any]:
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


def deepseek(said: GgufMetadata) -> dict[str, Any]:
    if said.get("attention.temperature_scale"):
        raise said.fault("queries have a temperature, which is not read of this architecture")
    return latent(said)


def mistral4(said: GgufMetadata) -> dict[str, Any]:
    """The temperature of queries is that of all released models, which files leave out."""
    usual = {"scale": 0.1, "length": said.get("rope.scaling.original_context_length")}
    found = {name: said.get(f"attention.temperature_{name}") for name in usual}
    if any(value not in (None, usual[name]) for name, value in found.items()):
        raise said.fault(f"the temperature of queries is {shown(found)}, expected {shown(usual)}")
    return latent(said)


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


def choosing(said: GgufMetadata) -> dict[str, Any]:
    """Layers that take the choice of another one have no indexer; newer files say which do."""
    types = said.get("attention.indexer.types")
    if not isinstance(types, list):
        indexed = said.layers_with("indexer.attn_k.weight")
        types = [layer in indexed for layer in range(said.count("block_count"))]
    kinds = ["full" if each else "shared" for each in said.of_layers(types)]
    return {**deepseek(said), "indexer_types": kinds}


def recurrent(said: GgufMetadata) -> dict[str, Any]:
    """Heads of values, and which layers recur where a file lists them."""
    keys: dict[str, Any] = {
        "linear_value_head_dim": said.count("ssm.inner_size") // said.count("ssm.time_step_rank")
    }
    recurs = said.get("attention.recurrent_layers")
    if isinstance(recurs, list):
        keys["layer_types"] = [LINEAR if each else FULL for each in said.of_layers(recurs)]
    return keys


def llama4(said: GgufMetadata) -> dict[str, Any]:
    """Chunks, layers without positions and the temperature of these are not in files; they are
    those of all released models. Maverick, which has 128 experts, does not norm what it rotates."""
    if said.get("attention.sliding_window") == 0:
        raise said.fault("layers do not attend in chunks, which is not read of this architecture")
    return {
        "intermediate_size": said.count("expert_feed_forward_length"),
        "intermediate_size_mlp": said.count("feed_forward_length"),
        "use_qk_norm": said.count("expert_count") != 128,
    }


def phimoe(said: GgufMetadata) -> dict[str, Any]:
    """By what cosines and sines are multiplied is not in files; it is as in all released models."""
    keys = {"sliding_window": said.get("attention.sliding_window") or None}
    if not said.scaling_tensors:
        return keys
    long, short = (said.factors(name) for name in BY_LENGTH)
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


def dense_first(said: GgufMetadata) -> dict[str, Any]:
    """No layer is dense where a file does not say so, as that of Solar Open."""
    return {"first_k_dense_replace": said.get("leading_dense_block_count") or 0}


def lfm2(said: GgufMetadata) -> dict[str, Any]:
    return {
        "num_dense_layers": said.get("leading_dense_block_count") or 0,
        **_kinds_by_heads(said, recurs="conv", attends=FULL),
    }


def _expansion(said: GgufMetadata) -> int:
    """How many times as wide as hidden states is what a recurrence sees."""
    width, hidden_size = said.count("ssm.inner_size"), said.count("embedding_length")
    if width % hidden_size:
        raise said.unexpected("ssm.inner_size", f"a multiple of embedding_length ({hidden_size})")
    return width // hidden_size


def jamba(said: GgufMetadata) -> dict[str, Any]:
    """Layers with heads of keys attend, and those with a gate have experts."""
    by_layer = _by_layer(said, _KEY_HEADS, "does not attend")
    attending = [layer for layer, count in enumerate(by_layer) if count]
    return {
        "num_key_value_heads": key_heads(said),
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


def granite_hybrid(said: GgufMetadata) -> dict[str, Any]:
    """Whether layers that attend have rotary positions, files say under another name."""
    has_positions = said.get("rope.scaling.finetuned") is not False
    return {
        "shared_intermediate_size": said.get("expert_shared_feed_forward_length") or 0,
        "mamba_expand": _expansion(said),
        "position_embedding_type": "rope" if has_positions else "nope",
        **_kinds_by_heads(said, recurs="mamba", attends="attention"),
    }


def nemotron(said: GgufMetadata) -> dict[str, Any]:
    """A layer of a file has heads of keys, or the width of an expert, or else it is Mamba-2."""
    heads = _by_layer(said, _KEY_HEADS, "does not attend")
    widths = _by_layer(said, "feed_forward_length", "has no experts")
    kinds = [
        FULL if count else "moe" if width else LINEAR
        for count, width in zip(heads, widths, strict=False)
    ]
    return {
        "num_key_value_heads": key_heads(said),
        "layer_types": said.of_layers(kinds),
        "intermediate_size": said.get("expert_feed_forward_length"),
        "mamba_d_head": said.count("ssm.inner_size") // said.count("ssm.time_step_rank"),
    }


def _windows(said: GgufMetadata) -> list[str]:
    """What kind each layer is of, by whether it slides."""
    key = "attention.sliding_window_pattern"
    slides = said.get(key)
    if not isinstance(slides, list):
        raise said.fault(f"{said.architecture}.{key} is missing")
    return [SLIDING if each else FULL for each in said.of_layers(slides)]


def by_window(said: GgufMetadata) -> dict[str, Any]:
    return {"layer_types": _windows(said)}


def _heads_by_window(said: GgufMetadata, key: str = _KEY_HEADS) -> dict[str, Any]:
    """Heads by the kind of a layer."""
    kinds, heads = _windows(said), said.get(key)
    by_layer = heads if isinstance(heads, list) else [heads] * len(kinds)
    if any(type(count) is not int for count in by_layer):
        raise said.unexpected(key, "numbers of heads")
    return dict(zip(kinds, by_layer, strict=False))


def gemma(said: GgufMetadata) -> dict[str, Any]:
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
            SLIDING: _unscaled(said, "rope.freq_base_swa"),
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


def step(said: GgufMetadata) -> dict[str, Any]:
    heads = _heads_by_window(said, "attention.head_count")
    limits = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}
    by_layer = {name: said.get(key) for name, key in limits.items()}
    return {
        "layer_types": _windows(said),
        "mlp_layer_types": _mlp_kinds(said),
        "num_attention_heads": heads.get(FULL, heads.get(SLIDING)),
        "num_sliding_attention_heads": heads.get(SLIDING),
        "num_key_value_heads": key_heads(said),
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


def mimo(said: GgufMetadata) -> dict[str, Any]:
    """The window of files leaves out the token itself, as that of released ones does. Both kinds of
    layers rotate the same share of a head."""
    of_kind = _heads_by_window(said)
    if of_kind.keys() == {FULL, SLIDING} and of_kind[SLIDING] != 2 * of_kind[FULL]:
        expected = "twice as many in layers that slide as in the others"
        raise said.unexpected(_KEY_HEADS, expected)
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


def kimi(said: GgufMetadata) -> dict[str, Any]:
    """All layers have as many heads. Groups are not in files of models without them."""
    return {
        **deepseek(said),
        **_kinds_by_heads(said, recurs=LINEAR, attends=FULL),
        "num_key_value_heads": said.count("attention.head_count"),
        "linear_num_heads": said.count("attention.head_count"),
        "n_group": said.count("expert_group_count", 1),
        "topk_group": said.count("expert_group_used_count", 1),
        "norm_topk_prob": True,
    }
