"""Shapes of DeepSeek-V4, whose layers attend in three ways."""

import json
from typing import Any

import pytest
import torch

from moebatch.errors import ConfigError
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.cache_layout import SinkWindow
from moebatch.spec.model.compressed_attention import CompressedAttention
from moebatch.spec.model.models import load_model
from moebatch.spec.model.shape_reader import read_shape
from tests.spec.described import Described

FAMILY = Described("deepseek_v4", "DeepseekV4ForCausalLM")
shape_of = FAMILY.shape_of
SLIDING, SPARSE = "sliding_attention", "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "q_lora_rank": 18,
    "o_groups": 2,
    "o_lora_rank": 10,
    "index_topk": 7,
    "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE],
    "compress_rates": {SPARSE: 3, HEAVY: 9},
    "hc_mult": 3,
}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        SIZES,
        {"compress_ratios": [0, 0, 4, 128] * 11, "num_hash_layers": 5},
        {"compress_rate_csa": 8, "compress_rate_hca": 64, "qk_rope_head_dim": 32},
        {**SIZES, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]},
        {"partial_rotary_factor": 0.25, "swiglu_limit": 7.0, "routed_scaling_factor": 2.5},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    hashed = [n for n, kind in enumerate(config.mlp_layer_types) if kind == "hash_moe"]
    assert list(shape.hashed_layers) == hashed
    assert shape.num_experts == config.n_routed_experts
    assert shape.router.scale == config.routed_scaling_factor
    clamp = shape.expert_clamp(0)
    assert clamp is not None and clamp.limit == config.swiglu_limit
    assert shape.streams is not None
    assert (shape.streams.count, shape.streams.num_balancings, shape.streams.eps) == (
        config.hc_mult,
        config.hc_sinkhorn_iters,
        config.hc_eps,
    )
    for layer, kind in enumerate(config.layer_types):
        attention = shape.attention_of(layer)
        assert isinstance(attention, CompressedAttention)
        assert attention.rope_head_dim == config.qk_rope_head_dim
        assert attention.rotary == ("main" if kind == SLIDING else "compress")
        entries_of = attention.entries
        assert (entries_of is None) == (kind == SLIDING)
        if entries_of is not None:
            assert entries_of.num_tokens == config.compress_rates[kind]
            assert entries_of.overlap == (kind == SPARSE)


def test_rows_have_room_for_their_entries_and_choose_among_no_more_than_needed() -> None:
    """Of 7 that are chosen; one stands for 3 tokens."""
    for tokens, chooses in ((7 * 3 + 2, False), (8 * 3, True), (1000, True)):
        shape = shape_of(**SIZES).attending_within(tokens)
        for layer, kind in enumerate(SIZES["layer_types"]):
            attention = shape.attention_of(layer)
            assert isinstance(attention, CompressedAttention)
            if kind == SLIDING:
                assert attention.entries is None and attention.indexer is None
                continue
            assert attention.entries is not None
            assert attention.entries.most == tokens // attention.entries.num_tokens
            assert (attention.indexer is not None) == (chooses and kind == SPARSE)
        assert shape.max_positions == 1048576


def test_tensors_are_those_that_transformers_writes(tiny_checkpoint: Any) -> None:
    from tests.model.driver import read_tensors

    folder = tiny_checkpoint("deepseek_v4")
    config = json.loads((folder / "config.json").read_text())
    shape, names = read_shape(config, ""), FAMILIES[FAMILY.architecture].names
    theirs = {
        name: tuple(tensor.shape)
        for name, tensor in read_tensors(folder).items()
        if ".experts." not in name
    }
    ours = dict(names.global_weights(shape, theirs).values())
    for layer in range(shape.num_layers):
        ours |= dict(names.layer_weights(shape, layer, theirs).values())
    assert ours == theirs


def test_layers_keep_a_window_and_a_state_of_their_kind() -> None:
    """Entries of 512 numbers, 512 of them or 16, and what is projected of 8 tokens or 128."""
    published = load_model("deepseek-v4-flash").shape
    shape = published.attending_within(2051)
    window, *states = shape.cache_groups(2051)
    assert window.layers == tuple(range(43)) and window.most_rows == 128 + 511
    kept = {group.layout.token_bytes(2): len(group.layers) for group in states}
    assert kept == {2 * (512 * 512 + 8 * 2048): 20, 2 * (16 * 512 + 128 * 1024): 23}
    assert not shape.attends_beside_gpu
    _, *states = published.attending_within(2052).cache_groups(2052)
    keys = 513 * 128 + 8 * 512  # by which 512 are chosen
    assert {group.layout.token_bytes(2) for group in states} == {
        2 * (513 * 512 + 8 * 2048 + keys),
        2 * (16 * 512 + 128 * 1024),
    }


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"scoring_func": "sigmoid"}, "scoring_func: expected sqrtsoftplus, got 'sigmoid'"),
    ({"n_shared_experts": 2}, "n_shared_experts: expected 1, got 2"),
    ({"num_key_value_heads": 4}, "num_key_value_heads: expected 1, got 4"),
    ({"o_groups": 3}, "num_attention_heads (4) must be a multiple of o_groups (3)"),
    (
        {"layer_types": None, "compress_ratios": [4, 5, 4, 4]},
        "compress_ratios: expected 0, 4 or 128 for each layer",
    ),
    ({"compress_rates": {SPARSE: 0, HEAVY: 9}}, "compress_rates: expected a whole number"),
    ({"partial_rotary_factor": 0.2}, "must be an even number"),
    (
        {"partial_rotary_factor": 0.5, "index_head_dim": 6},
        "index_head_dim: expected at least the 8 numbers that rotate, got 6",
    ),
    **SIZES,
)


def test_sinks_and_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="in entries that stand for several tokens"):
        shape_of(**SIZES).seen_through(SinkWindow(4, 64))


def test_deepseek_v4_flash_is_as_large_as_said() -> None:
    """284 billion parameters, of which 13 take part in a token."""
    shape = load_model("deepseek-v4-flash").shape
    assert round(shape.num_params / 1e9) == 284
    idle = len(shape.moe_layers) * (shape.num_experts - shape.experts_per_token)
    embedding = shape.vocab_size * shape.hidden_size
    assert round((shape.num_params - idle * shape.expert_params - embedding) / 1e9) == 13


def test_streams_are_merged_and_spread_as_a_weighted_sum(tiny_checkpoint: Any) -> None:
    """Rows and columns of how streams are mixed sum to one, so that a constant stays as it is."""
    from moebatch.model.scratch import Scratch
    from moebatch.model.streams import StreamMixer

    shape = shape_of(**{**SIZES, "hc_sinkhorn_iters": 50})
    assert shape.streams is not None
    sizes = shape.streams.tensors("input_norm", 32)
    weights = {role: torch.randn(size) for role, size in sizes.items()}
    mixer, scratch = (
        StreamMixer(shape),
        Scratch(5000, device=torch.device("cpu"), dtype=torch.float32),
    )
    x_TS = torch.ones(4, 3 * 32)
    mixer.spread(scratch.frame(), x_TS, weights, "input_norm", torch.zeros(4, 32))
    assert torch.allclose(x_TS, torch.ones_like(x_TS), atol=1e-3)
