"""Weights that converters to GGUF have rearranged, in families that llama.cpp knows."""

from typing import Any

from moebatch.checkpoint.gguf.family import Arranged, GgufMetadata
from moebatch.checkpoint.gguf.keys import key_heads, latent
from moebatch.formats.ggml_rearranged import (
    AsRows,
    ByKeyHead,
    ByTurns,
    CountedFromZero,
    Fading,
    Interleaved,
    LatentHalves,
)


def interleaved(said: GgufMetadata) -> Arranged:
    heads = said.count("attention.head_count")
    by_role = {"q": Interleaved(heads), "k": Interleaved(key_heads(said, heads))}
    return {
        f"attn_{role}.{kind}": each for role, each in by_role.items() for kind in ("weight", "bias")
    }


def latent_halves(said: GgufMetadata) -> Arranged:
    sizes = latent(said)
    return {
        "attn_kv_b.weight": LatentHalves(sizes["num_key_value_heads"], sizes["qk_nope_head_dim"])
    }


def from_zero(said: GgufMetadata) -> Arranged:
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


def qwen3_next(said: GgufMetadata) -> Arranged:
    """Older files have ``ssm_in`` as the model has it."""
    by_key_head = ByKeyHead(said.count("ssm.group_count"), said.count("ssm.state_size"))
    recurrence = _recurrence(said, by_turns=False)
    return {**from_zero(said), **recurrence, "ssm_in.weight": by_key_head}


def qwen3_5(said: GgufMetadata) -> Arranged:
    return {**from_zero(said), **_recurrence(said, by_turns=True)}


def short_convolution(said: GgufMetadata) -> Arranged:
    return {"shortconv.conv.weight": AsRows(said.count("shortconv.l_cache"))}


def state_space(said: GgufMetadata) -> Arranged:
    by_head = AsRows(1)
    by_group = AsRows(said.count("ssm.inner_size") // said.count("ssm.group_count"))
    return {
        **interleaved(said),
        "ssm_conv1d.weight": AsRows(said.count("ssm.conv_kernel")),
        "ssm_a": Fading(by_head),
        "ssm_d": by_head,
        "ssm_norm.weight": by_group,
    }


def scan(said: GgufMetadata) -> Arranged:
    return {
        "ssm_conv1d.weight": AsRows(said.count("ssm.conv_kernel")),
        "ssm_a": Fading(AsRows(said.count("ssm.state_size"))),
    }


def channel_delta(said: GgufMetadata) -> Arranged:
    taps = AsRows(said.count("ssm.conv_kernel"))
    return {
        **latent_halves(said),
        **{f"ssm_conv1d_{role}.weight": taps for role in "qkv"},
        "ssm_a": Fading(AsRows(1)),
    }
