"""Routing, row counts, room, rotary positions and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import CheckpointError
from moebatch.layout.scratch import Limits, bucket_rows, decoder_buffers
from moebatch.model.attention.span import Span
from moebatch.model.batch import BatchPlanner
from moebatch.model.layers import activation_of, layer_norm
from moebatch.model.native.loader import SWITCH
from moebatch.model.rope import Rope, rotate
from moebatch.model.routing.router import choose_experts
from moebatch.model.routing.tokens import ExpertTokens, TokensByExpert, group_by_expert
from moebatch.model.scratch import Scratch
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from tests.model.driver import LIMITS, Driver
from tests.spec.test_shape import minimal

CPU = torch.device("cpu")


def model_of(**entries: Any) -> tuple[ModelShape, dict[str, Any]]:
    config = minimal("mixtral", hidden_size=64, num_attention_heads=8, **entries)
    return read_shape(config, "config.json"), config


def rope_of(**entries: Any) -> Rope:
    rope, *_ = Rope.by_layer(*model_of(**entries), CPU)
    return rope


def planner(
    *windows: int | None, dtype: torch.dtype = torch.float32, gather_rows: int = 64, **entries: Any
) -> BatchPlanner:
    """For layers with these sliding windows."""
    shape, config = model_of(**entries)
    shape = replace(shape, sliding_windows=windows)
    return BatchPlanner(shape, config, dtype=dtype, device=CPU, gather_rows=gather_rows)


@given(st.integers(1, 5000))
def test_bucket_rows_grows_slowly_and_stays_put(num_rows: int) -> None:
    bucket = bucket_rows(num_rows)
    assert num_rows <= bucket == bucket_rows(bucket)
    assert bucket <= max(2 * num_rows, num_rows + 15) and bucket <= 1.25 * num_rows + 15
    assert bucket_rows(num_rows + 1) >= bucket


def test_there_are_few_row_counts() -> None:
    assert len({bucket_rows(n) for n in range(1, 1025)}) == 28


@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    num_chosen=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_group_by_expert(num_tokens: int, num_experts: int, num_chosen: int, seed: int) -> None:
    num_chosen = min(num_chosen, num_experts)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    experts_TK = scores.topk(num_chosen, dim=-1).indices
    groups = group_by_expert(experts_TK, slice(0, num_tokens), num_experts)
    assert list(groups) == sorted(set(experts_TK.flatten().tolist()))
    for expert, (rows, choices) in groups.items():
        want_rows, want_choices = torch.where(experts_TK == expert)
        assert torch.equal(rows, want_rows) and torch.equal(choices, want_choices)


def test_tokens_are_sorted_once_and_not_before_an_expert_runs() -> None:
    sorts = []

    def sort() -> ExpertTokens:
        sorts.append(1)
        return ExpertTokens(torch.tensor([4, 7, 5, 9]), torch.tensor([0, 1, 1, 0]))

    tokens = TokensByExpert({2: 2, 6: 1}, sort)
    assert list(tokens) == [2, 6] and tokens.counts[2] == 2 and not sorts
    assert tokens[2].rows_M.tolist() == [4, 7] and tokens[6].choices_M.tolist() == [1]
    assert len(sorts) == 1


def test_choose_experts_rounds_last() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]], dtype=torch.bfloat16)
    weights, experts = choose_experts(logits, Router(), 2, {}, torch.float32)
    assert experts.tolist() == [[1, 2]]
    probs = logits.float().softmax(-1)
    torch.testing.assert_close(weights, probs[:, [1, 2]])
    router = Router(norm_order=1.0)
    weights, _ = choose_experts(logits, router, 2, {}, torch.bfloat16)
    assert weights.dtype == torch.bfloat16
    assert weights.sum().item() == pytest.approx(1, abs=0.01)
    exact_router = replace(router, has_exact_weights=True)
    exact, _ = choose_experts(logits, exact_router, 2, {}, torch.bfloat16)
    assert exact.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_is_that_of_torch(dtype: torch.dtype, has_bias: bool) -> None:
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((7, 40), (40,), (40,)))
    x = x * 5 + 3
    room, out = torch.empty(7 * 40), x.clone()
    layer_norm(out, weight, bias if has_bias else None, 1e-5, room, out)
    expected = F.layer_norm(x, (40,), weight, bias if has_bias else None, 1e-5)
    torch.testing.assert_close(out, expected)


def test_neighbours_are_put_where_halves_rotate() -> None:
    """Scores are what they were: each query and key has the same numbers in another order."""
    attention = GroupedAttention(
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        num_rotated=4,
        rotates_neighbours=True,
        qk_norm="head",
    )
    assert attention.row_order("q") == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert attention.row_order("k_bias") == attention.row_order("q_norm") == [0, 2, 1, 3, 4, 5]
    assert attention.row_order("v") is attention.row_order("o") is None
    assert replace(attention, qk_norm="full").row_order("q_norm") == attention.row_order("q")
    assert replace(attention, rotates_neighbours=False).row_order("q") is None
    x_TC, angles = torch.randn(5, 6), torch.randn(5, 2)
    pairs = torch.view_as_complex(x_TC[:, :4].unflatten(1, (2, 2))) * torch.polar(
        torch.ones_like(angles), angles
    )
    expected = torch.cat([torch.view_as_real(pairs).flatten(1), x_TC[:, 4:]], 1)
    order = attention.row_order("k")
    ours_T1C = x_TC[:, None, order].clone()
    rotate(ours_T1C, angles.cos(), angles.sin())
    torch.testing.assert_close(ours_T1C[:, 0], expected[:, order])


def test_frames_hand_out_separate_views_of_one_buffer() -> None:
    scratch = Scratch(256, device=CPU, dtype=torch.bfloat16)
    frame = scratch.frame()
    first, second = frame.take(3, 5), frame.take_float(4, 4)
    assert second.dtype == torch.float32
    second.fill_(1.0)
    first.fill_(7.0)
    assert second.eq(1.0).all()
    assert scratch.frame().take(1).data_ptr() == first.data_ptr() == scratch.buffer.data_ptr()
    with pytest.raises(AssertionError, match="scratch too small"):
        frame.take(200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"family": "nemotron_h", "moe_latent_size": 44},
        {"family": "longcat_flash"},
        {"family": "cohere2_moe"},
        {"family": "deepseek_v4"},
        {"family": "hy_v4"},
        {"family": "axk2"},
        {"family": "mistral_large4"},
        {"family": "dots3_note"},
        {"family": "beam"},
        {"family": "muse_spark"},
        {"family": "glm5_next"},
    ],
)
def test_scratch_bytes_is_what_a_decoder_holds(
    dtype: torch.dtype,
    options: dict[str, Any],
    tiny_checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without kernels, which need no room for weights of another dtype."""
    monkeypatch.setenv(SWITCH, "0")
    driver = Driver(tiny_checkpoint(**{"family": "qwen3_moe", **options}), dtype)
    converts = dtype != torch.float32
    expected = decoder_buffers(driver.shape, LIMITS, dtype.itemsize, "dram", converts=converts)
    assert driver.decoder.scratch_bytes == sum(buffer.num_bytes for buffer in expected)


_LATENTS = {
    "family": "nemotron_h",
    "layers_block_type": ["full_attention", "moe"],
    "moe_shared_expert_intermediate_size": 4,
}
_GIVEN_BACK = {
    "family": "longcat_flash",
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 2),
    **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        _LATENTS | {"moe_latent_size": 20},
        _LATENTS | {"moe_latent_size": 150},
        _GIVEN_BACK,
        _GIVEN_BACK | {"hidden_size": 150},
        _GIVEN_BACK | {"zero_expert_num": 900},
    ],
)
def test_all_has_room_where_experts_take_more_rows_than_attention(
    dtype: torch.dtype,
    options: dict[str, Any],
    tiny_checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Latents, and what is given back or added late. By torch, whose products of bfloat16 have more
    rows than they are asked for."""
    monkeypatch.setenv(SWITCH, "0")
    folder = tiny_checkpoint(**options)
    limits = Limits(
        pass_tokens=72, micro_batch_tokens=4, context_tokens=8, gather_rows=8, expert_rows=72
    )
    driver = Driver(folder, dtype, limits)
    seqs = driver.generate([[3 + n, 9, 20, 5] for n in range(18)], 2, micro_batch=1)
    assert all(len(seq.answer) == 2 for seq in seqs)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v4"])
def test_each_pass_and_each_block_of_logits_has_the_room_of_the_one_before(
    family: str, tiny_checkpoint: Any
) -> None:
    """Pieces of that size, asked for again and again, would leave holes as large in a heap."""
    decoder = Driver(tiny_checkpoint(family)).decoder
    with torch.inference_mode():
        x_TD = decoder.embed(torch.tensor([3, 4, 5]))
        logits_RV = decoder.logits(x_TD)
        assert decoder.logits(x_TD[:1]).data_ptr() == logits_RV.data_ptr()
        assert decoder.embed(torch.tensor([6])).data_ptr() == x_TD.data_ptr()


def test_a_sequence_may_be_longer_than_the_gather() -> None:
    limits = Limits(pass_tokens=1, micro_batch_tokens=1, context_tokens=999, gather_rows=100)
    assert limits.kv_rows == 1008


def test_rope_lengths_count_the_whole_prompt() -> None:
    """A slice early in a long prompt is rotated as the prompt's length demands."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    spans = [
        Span(start=0, num_tokens=2, context=0, rows_S=np.arange(2), rope_length=40),
        Span(start=2, num_tokens=2, context=0, rows_S=np.arange(2), rope_length=2),
        Span(start=4, num_tokens=1, context=1, rows_S=np.arange(2), rope_length=40),
    ]
    batch = planner(None, max_position_embeddings=16, rope_parameters=dynamic).plan(spans)
    angles, *_ = batch.angles
    assert torch.equal(angles.cos_TR[1], angles.cos_TR[4])
    assert not torch.equal(angles.cos_TR[1], angles.cos_TR[3])


def test_decode_groups_have_little_padding_and_bounded_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    contexts = [3, 200, 7, 90, 100, 95, 0, 1000]
    spans = [
        Span(start=i, num_tokens=1, context=c, rows_S=np.arange(c + 1), rope_length=1)
        for i, c in enumerate(contexts)
    ]
    batch = planner(None, 50, gather_rows=256).plan(spans)
    for window, layers in batch.by_window.items():
        (plan,) = layers.plans
        members = torch.cat([group.seen.tokens_B for group in plan.decodes]).tolist()
        assert sorted(members) == list(range(len(contexts)))
        for group in plan.decodes:
            assert group.seen.rows_BS.numel() <= 256 or len(group.seen.rows_BS) == 1
            for token, rows_S, mask in zip(
                group.seen.tokens_B.tolist(), group.seen.rows_BS, group.mask_B11S, strict=True
            ):
                seen = rows_S[mask.view(-1) == 0].tolist()
                first = 0 if window is None else max(0, contexts[token] - window + 1)
                assert seen == list(range(first, contexts[token] + 1))


def test_spans_with_a_gap_are_our_mistake() -> None:
    spans = [
        Span(start=s, num_tokens=1, context=0, rows_S=np.zeros(1, np.int64), rope_length=1)
        for s in (0, 2)
    ]
    with pytest.raises(AssertionError, match="contiguous"):
        planner(None).plan(spans)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope parameters: KeyError: 'spiral'"),
        ({"rope_scaling": {"type": "linear"}}, "rope parameters: .*factor"),
        ({"rope_scaling": {"type": "yarn", "factor": "big"}}, "rope parameters: "),
        ({"rope_theta": 0}, "rope parameters: ValueError: angles are no numbers"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2**63}}, "angles are no numbers"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1e300}},
            "angles are no numbers",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rotate 4 of 8 head dimensions",
        ),
    ],
)
def test_rope_parameters_that_cannot_be_used(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_of(**entries)


def test_unknown_activation() -> None:
    with pytest.raises(CheckpointError, match="hidden_act 'wavy' is not known"):
        activation_of("wavy")
