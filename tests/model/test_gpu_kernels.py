"""Kernels in Triton: equal to torch, row by row and for experts of few rows together."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moebatch.formats import decoding
from moebatch.formats.coded import ZEROS, CodedMatrix, Numbers
from moebatch.layout.fused import Middle
from moebatch.model.elementwise import Elementwise
from moebatch.model.gpu import check, rows
from moebatch.model.gpu import loader as gpu_loader
from moebatch.model.gpu.attention import attend_single
from moebatch.model.gpu.check import Codes
from moebatch.model.gpu.coding import Coding
from moebatch.model.gpu.delta_steps import take_delta_steps
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.gpu.gates import GpuGates
from moebatch.model.grouped import GroupedExpert
from moebatch.model.native import loader
from moebatch.model.native.attention_work import Cached, SingleQueries
from moebatch.model.native.delta_rule import DeltaInput, StateSpans
from moebatch.model.native.scoring import Scoring
from moebatch.model.recurrence.delta_rule import DeltaRule
from moebatch.model.recurrence.plan import RecurrentPlan, StateRun
from moebatch.model.routing.router import Routing, choose_experts
from moebatch.model.routing.tokens import ExpertTokens, group_by_expert
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate, ExpertGroups, Router
from moebatch.spec.model.models import load_model
from moebatch.spec.model.recurrence import (
    ChannelDelta,
    GatedDelta,
    MatrixRecurrence,
    StateSpace,
)
from moebatch.spec.model.shape import ModelShape
from tests.few import examples
from tests.gpu_kernels import DEVICE, use_gpu_kernels, use_launch

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REPOSITORY = Path(__file__).parents[2]
_LOADS_OF_SCALES = 4
LEAST_SHARED_BYTES = 99 * 2**10
"""Of a block, with compute capability 8.6 and 8.9."""
WRONG = {
    "norm": "a norm",
    "norm_gated": "a gated norm",
    "rotate": "a rotation",
    "gate_rows": "a gate",
    "add": "sums",
    "place": "what is placed",
    "experts_in": "experts",
    "experts_out": "experts",
    "attend_single": "attention",
    "delta_step": "steps of a recurrence",
    "scan_steps": "a selective scan",
    "choose": "weights by softmax",
    "group": "tokens by expert",
}
"""What is found to differ where a kernel does nothing."""
IN_PLACE = {"rotate", "gate_rows", "add", "place"}
"""Kernels that change what is there; the others fill what holds no number before."""
CLAMPED = [
    None,
    ClampedGate(limit=1.5, alpha=1.7, added=1.0),
    ClampedGate(limit=0.7, clamps_activated=True),
]
MIDDLES: Sequence[tuple[Middle, ClampedGate | None]] = (
    *(("gated", clamped) for clamped in CLAMPED),
    ("relu", None),
    ("relu2", None),
)

few = settings(max_examples=15, deadline=None)
counts = st.integers(0, 9)
widths = st.sampled_from([1, 7, 32, 33, 100])
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 99)


@few
@given(counts, widths, dtypes, st.sampled_from(CLAMPED), seeds)
def test_gates(
    num_rows: int, width: int, dtype: torch.dtype, clamped: ClampedGate | None, seed: int
) -> None:
    gate, up = (noise(seed + i, dtype, num_rows, width, scale=3.0) for i in range(2))

    def gated(elementwise: Elementwise) -> Tensor:
        out = gate.clone()
        elementwise.gate(out, up.clone())
        return out

    assert_alike(gated, clamped=clamped)


@few
@given(counts, st.sampled_from([(), (3,)]), widths, dtypes, st.booleans(), seeds)
def test_norms(
    num_rows: int,
    heads: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    has_exact_weight: bool,
    seed: int,
) -> None:
    """Of heads that lie among others, too."""
    wide = noise(seed, dtype, num_rows, *((5,) if heads else ()), width)
    weight = noise(seed + 1, torch.float32 if has_exact_weight else dtype, width)

    def normed(elementwise: Elementwise) -> Tensor:
        out = wide.clone()
        part = out[:, : heads[0]] if heads else out
        elementwise.rms_norm(part, weight, 1e-5, torch.empty(part.numel(), device=DEVICE), part)
        return out

    assert_alike(normed)


@few
@given(counts, st.integers(1, 3), st.sampled_from([8, 20, 64]), st.integers(0, 5), dtypes, seeds)
def test_gated_norms(
    num_rows: int, heads: int, width: int, gap: int, dtype: torch.dtype, seed: int
) -> None:
    """Of gates that lie among other numbers."""
    x, weight = noise(seed, torch.float32, num_rows, heads, width), noise(seed + 1, dtype, width)
    wide = noise(seed + 2, dtype, num_rows, heads * width + gap)
    z = wide[:, gap:].view(num_rows, heads, width)

    def normed(elementwise: Elementwise) -> Tensor:
        out = torch.full_like(x, torch.nan, dtype=dtype)
        elementwise.norm_gated(x.clone(), weight, 1e-5, z, out)
        return out

    assert_alike(normed)


@few
@given(counts, st.integers(1, 3), st.sampled_from([2, 6, 16]), dtypes, st.booleans(), seeds)
def test_rotation(
    num_tokens: int, num_heads: int, rotary_dim: int, dtype: torch.dtype, is_part: bool, seed: int
) -> None:
    """What does not rotate stays as it is."""
    x = noise(seed, dtype, num_tokens, num_heads, rotary_dim + 8 * is_part)
    angles = noise(seed + 1, torch.float32, num_tokens, rotary_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotated(elementwise: Elementwise) -> Tensor:
        out = x.clone()
        elementwise.rotate(out[..., 4 * is_part :], cos, sin)
        assert torch.equal(out[..., : 4 * is_part], x[..., : 4 * is_part])
        return out

    assert_alike(rotated)


@few
@given(counts, st.integers(1, 4), widths, dtypes, st.booleans(), st.sampled_from([1.0, 0.3]), seeds)
def test_sums(
    num_rows: int,
    num_choices: int,
    width: int,
    dtype: torch.dtype,
    is_shared: bool,
    scale: float,
    seed: int,
) -> None:
    x = noise(seed, dtype, num_rows, width)
    parts = [noise(seed + 1, dtype, num_rows, num_choices, width)]
    if is_shared:
        parts.append(noise(seed + 2, dtype, num_rows, width))

    def added(elementwise: Elementwise) -> Tensor:
        out = x.clone()
        frame = Frame(torch.empty(2 * num_rows * width, dtype=dtype, device=DEVICE))
        elementwise.add(frame, out, *parts, scale=scale)
        return out

    assert_alike(added)


@few
@given(st.integers(1, 9), st.integers(1, 4), widths, dtypes, seeds)
def test_placing(
    num_tokens: int, num_choices: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    routing = routing_of(num_tokens, num_choices, width, dtype, seed)
    for tokens in routing.tokens.values():
        y_MD = noise(seed, dtype, len(tokens.rows_M), width)

        def placed(elementwise: Elementwise, tokens=tokens, y_MD=y_MD) -> Tensor:
            routing.outputs_TKD.fill_(7)
            elementwise.place(y_MD.clone(), tokens, routing.outputs_TKD, routing.weights_TK)
            return routing.outputs_TKD.clone()

        assert_alike(placed)


@st.composite
def codes(draw: st.DrawFn) -> Codes:
    """Of any kind that a `CodedMatrix` may be of."""
    numbers = draw(st.sampled_from(get_args(Numbers)))
    has_zeros = numbers in ZEROS and draw(st.booleans())
    blocks = [(1, 16), (1, 32), (1, 48), (1, 128), (1, 999)]
    return Codes(
        numbers=numbers,
        scales=draw(st.sampled_from([*DTYPES, torch.uint8, torch.float8_e4m3fn])),
        block=draw(st.sampled_from(blocks if has_zeros else [*blocks, (32, 16), (999, 999)])),
        has_zeros=has_zeros,
        has_factor=draw(st.booleans()),
        divides=draw(st.booleans()),
        rounds_to=draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
    )


@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([(32, 64), (64, 32), (96, 160)]),
    dtypes,
    st.integers(1, 40),
    st.one_of(st.none(), codes()),
    st.sampled_from(MIDDLES),
    st.sampled_from([None, *DTYPES]),
    seeds,
)
@examples(40)
def test_experts_together_make_what_each_makes_alone(
    num_tokens: int,
    num_choices: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    most_rows: int,
    stored: Codes | None,
    between: tuple[Middle, ClampedGate | None],
    bias_dtype: torch.dtype | None,
    seed: int,
) -> None:
    """Of whatever sizes and codes, with more rows than a tile has and more than there is room for
    at once; some of them are left for later, and untouched."""
    hidden, width = sizes
    routing = routing_of(num_tokens, num_choices, hidden, dtype, seed)
    routing.outputs_TKD.fill_(7)
    later = next(iter(routing.tokens)) if len(routing.tokens) > 1 else None
    chosen = {e: tokens for e, tokens in routing.tokens.items() if e != later}
    matrices = {e: expert(seed + e, dtype, hidden, width, stored) for e in chosen}
    middle, clamped = between
    if middle != "gated":
        for of_expert in matrices.values():
            del of_expert["gate"]
    if bias_dtype is not None:
        for e, of_expert in matrices.items():
            of_expert |= biases(seed + e, bias_dtype, of_expert)
    kernels = GroupedExperts(middle)
    largest = max(len(tokens.rows_M) for tokens in chosen.values())
    most_rows = max(most_rows, largest)
    frame = Frame(torch.empty(most_rows * width, dtype=dtype, device=DEVICE))
    group = grouped(kernels, chosen, matrices, dtype)
    kernels.run(frame, group, routing, most_rows=most_rows, clamped=clamped)
    want = torch.full_like(routing.outputs_TKD, 7)
    for e, tokens in chosen.items():
        compute_by_torch(routing, tokens, matrices[e], between, want)
    assert_close(routing.outputs_TKD, want)


@given(
    st.integers(0, 5),
    st.sampled_from([(1, 1), (2, 3), (4, 24), (5, 30), (8, 128)]),
    st.sampled_from(check.ROUTERS),
    dtypes,
    seeds,
)
@examples(40)
def test_choices(
    num_tokens: int, sizes: tuple[int, int], router: Router, dtype: torch.dtype, seed: int
) -> None:
    """Of logits no two of which are nearly alike."""
    num_chosen, num_experts = sizes
    if router.groups is not None and num_experts % router.groups.num_groups:
        router = replace(router, groups=None)
    size = num_tokens, num_experts
    places_TE = noise(seed, torch.float32, *size).argsort(dim=-1)
    logits_TE = (places_TE + noise(seed + 1, torch.float32, *size).sigmoid() / 2) / num_experts
    logits_TE = logits_TE.mul_(8).sub_(4)
    weights = {
        "router_correction": noise(seed + 2, torch.float32, num_experts),
        "router_expert_weights": noise(seed + 3, torch.float32, num_experts),
    }
    weights_TK, experts_TK = into = unwritten_choices(num_tokens, num_chosen)
    GpuGates().choose(logits_TE, router, into, weights, dtype)
    want_TK, want_experts_TK = choose_experts(logits_TE, router, num_chosen, weights, dtype)
    assert_close(weights_TK.to(want_TK.dtype), want_TK)
    assert torch.equal(experts_TK, want_experts_TK)


@given(seeds)
@few
def test_experts_corrected_below_zero_lose_against_those_of_other_groups(
    seed: int,
) -> None:
    """Where these are not ruled out."""
    groups = ExpertGroups(6, 5, 1, others_are_zero=True)
    router = Router(scores="sigmoid", has_correction=True, groups=groups)
    logits_TE = noise(seed, torch.float32, 5, 6)
    weights = {"router_correction": torch.tensor([-2.0, 1, -2, -2, 1, -2], device=DEVICE)}
    _, experts_TK = into = unwritten_choices(5, 3)
    GpuGates().choose(logits_TE, router, into, weights, torch.float32)
    _, want_experts_TK = choose_experts(logits_TE, router, 3, weights, torch.float32)
    assert torch.equal(experts_TK, want_experts_TK)
    worst_T = (logits_TE.sigmoid() + weights["router_correction"]).argmin(dim=1)
    assert (experts_TK == worst_T[:, None]).any(dim=1).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_of_equal_numbers_the_first_is_chosen_and_what_is_none_is_the_largest() -> None:
    """So choices are experts, each once, whatever gates make."""
    logits_TE = torch.zeros(3, 6, device=DEVICE)
    logits_TE[1, 4] = torch.nan
    logits_TE[2] = -torch.inf
    for router in check.ROUTERS:
        weights_TK, experts_TK = into = unwritten_choices(3, 4)
        weights = {
            "router_correction": torch.zeros(6, device=DEVICE),
            "router_expert_weights": torch.ones(6, device=DEVICE),
        }
        ungrouped = replace(router, groups=None)
        GpuGates().choose(logits_TE, ungrouped, into, weights, torch.float32)
        assert {*experts_TK[0].tolist()} == {0, 1, 2, 3}
        assert weights_TK[1].isnan().any()
        for chosen in experts_TK.tolist():
            assert len(set(chosen)) == 4 and set(chosen) <= set(range(6))


@given(st.data(), st.sampled_from([4, 700]), st.integers(1, 9), seeds)
@few
def test_tokens_by_expert(data: st.DataObject, most: int, num_experts: int, seed: int) -> None:
    """In the order of torch, to the last one, with choices that are left out; of more of them than
    a program looks at together."""
    num_tokens = data.draw(st.integers(1, most))
    num_choices = data.draw(st.integers(1, min(3, num_experts)))
    start = data.draw(st.integers(0, num_tokens))
    rows = slice(start, data.draw(st.integers(start, num_tokens)))
    scores = noise(seed, torch.float32, num_tokens, num_experts + 1)  # one is that of none
    experts_TK = scores.topk(num_choices, dim=-1).indices
    want = group_by_expert(experts_TK, rows, num_experts)
    counts = {expert: len(tokens.rows_M) for expert, tokens in want.items()}
    for known in (None, counts):
        got = GpuGates().group(experts_TK, rows, num_experts, known)
        assert [*got] == [*want]
        for expert, tokens in want.items():
            for ours, theirs in zip(got[expert], tokens, strict=True):
                assert torch.equal(ours, theirs)


def test_experts_whose_matrices_lie_otherwise_are_launched_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routing = routing_of(20, 3, 64, torch.float32, 1)
    kinds = [None, check.CODES[0], check.CODES[1]]
    matrices = {e: expert(e, torch.float32, 64, 32, kinds[e % 3]) for e in routing.tokens}
    frame = Frame(torch.empty(60 * 32, device=DEVICE))
    kernels = GroupedExperts()
    group = grouped(kernels, routing.tokens, matrices, torch.float32)
    want = torch.empty_like(routing.outputs_TKD)
    for e, tokens in routing.tokens.items():
        compute_by_torch(routing, tokens, matrices[e], ("gated", None), want)
    launched = use_gpu_kernels(monkeypatch)
    kernels.run(frame, group, routing, most_rows=60)
    assert_close(routing.outputs_TKD, want)
    assert launched == {"experts_in": 3, "experts_out": 3}


@pytest.mark.parametrize("stored", check.CODES, ids=lambda stored: stored.numbers)
def test_scales_that_are_no_numbers_make_none(stored: Codes) -> None:
    """Of the outputs that they are those of, and of no others: not behind the end of a row."""
    none = 255 if stored.scales == torch.uint8 else torch.nan
    routing = routing_of(5, 1, 64, torch.float32, 1)
    number, tokens = next(iter(routing.tokens.items()))
    matrices = expert(1, torch.float32, 64, 96, stored)
    down = matrices["down"]
    assert isinstance(down, CodedMatrix)
    scales = down.scales.clone()
    scales[0, -1] = none
    matrices["down"] = replace(down, scales=scales)
    kernels = GroupedExperts()
    group = grouped(kernels, {number: tokens}, {number: matrices}, torch.float32)
    kernels.run(Frame(torch.empty(5 * 96, device=DEVICE)), group, routing, most_rows=5)
    outputs = routing.outputs_TKD[tokens]
    num_rows = 64 if stored.block[0] > 1 else 1
    assert outputs[:, :num_rows].isnan().all() and not outputs[:, num_rows:].isnan().any()


@few
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 20)]),
    st.sampled_from([8, 24, 64]),
    st.sampled_from([9, 24, 64]),
    dtypes,
    st.booleans(),
    seeds,
)
def test_tokens_attend_to_rows_anywhere_in_the_cache(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    has_sink_scores: bool,
    seed: int,
) -> None:
    """To more than a block of them, or fewer; other tokens are left alone, and what no token has
    written does not matter."""
    (num_kv_heads, num_shared), num_rows = heads, 600
    num_heads, num_tokens = num_kv_heads * num_shared, len(lengths) + 2
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    rows_seen = [rows_S.to(DEVICE) for rows_S in order[: sum(lengths)].split(lengths)]
    cache = [noise(seed, dtype, num_rows, num_kv_heads, dim) for dim in (head_dim, value_dim)]
    unseen = torch.ones(num_rows, dtype=torch.bool, device=DEVICE)
    unseen[torch.cat(rows_seen)] = False
    for part in cache:
        part[unseen] = torch.nan
    q_THC = noise(seed + 1, dtype, num_tokens, num_heads, head_dim)
    scores_H = noise(seed + 2, torch.float32, num_heads) if has_sink_scores else None
    tokens = torch.arange(num_tokens).flip(0)[: len(lengths)].to(DEVICE)
    starts = torch.tensor([0, *accumulate(lengths)], device=DEVICE)
    seen = SingleQueries(tokens, starts, torch.cat(rows_seen))
    out = q_THC.new_full((num_tokens, num_heads, value_dim), 7)
    scoring = Scoring(head_dim**-0.5, None, scores_H)
    attend_single(seen, q_THC, Cached(*cache), out, scoring)
    want = torch.full_like(out, 7)
    for token, rows_S in zip(tokens.tolist(), rows_seen, strict=True):
        keys, values = (x[rows_S].repeat_interleave(num_shared, 1).float() for x in cache)
        scores_HS = torch.einsum("hc,shc->hs", q_THC[token].float(), keys) * scoring.scale
        if scores_H is not None:
            scores_HS = torch.cat([scores_HS, scores_H[:, None]], 1)
        weights_HS = scores_HS.softmax(-1)[:, : len(rows_S)]
        want[token] = torch.einsum("hs,shv->hv", weights_HS, values).to(dtype)
    assert_close(out, want)


@pytest.mark.parametrize("kept_in", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(1, 2, 16, 32), (2, 4, 24, 40), (1, 3, 7, 33), (2, 2, 128, 128)])
@pytest.mark.parametrize("kind", [GatedDelta, ChannelDelta, StateSpace])
def test_steps_of_a_recurrence(
    kind: type[MatrixRecurrence], heads: tuple[int, int, int, int], kept_in: torch.dtype
) -> None:
    """Those of torch, which rounds with the same noise; states of others are left alone."""
    (G, H, K, V), T = heads, 3
    ranks = {"rank": K} if kind is ChannelDelta else {}
    recurrence = kind(
        **ranks,
        num_key_heads=G,
        num_value_heads=H,
        key_head_dim=K,
        value_head_dim=V,
        conv_width=4,
        state_dtype="float16" if kept_in == torch.float16 else "float32",
    )
    q_TGK, k_TGK = (F.normalize(noise(i, torch.float32, T, G, K), dim=-1) for i in (1, 2))
    rates_TH, fading_THF = (
        noise(i, torch.float32, T, *size).sigmoid()
        for i, size in ((3, (H,)), (4, (H, recurrence.fading_dim)))
    )
    given = DeltaInput(q_TGK, k_TGK, noise(5, torch.float32, T, H, V), rates_TH, -fading_THF)
    rows, tokens, befores = [4, 1, 2], [0, 2, 1], [7, 0, 70000]
    table = torch.tensor([rows, tokens, [1] * T, befores], device=DEVICE)
    ours, theirs = (noise(6, kept_in, T + 2, H, K, V) for _ in "ot")
    out, want = (torch.full((T, H, V), 7.0, device=DEVICE) for _ in "ot")
    take_delta_steps(StateSpans(*table), given, ours, out, corrects=recurrence.corrects)
    singles = (
        StateRun(slice(row, row + 1), table[1, i : i + 1], table[3, i : i + 1])
        for i, row in enumerate(rows)
    )
    begun = torch.tensor([], dtype=torch.int64)
    plan = RecurrentPlan(begun_B=begun, runs=tuple(singles))
    frame = Frame(torch.empty(2**18, device=DEVICE))
    DeltaRule(recurrence, DEVICE).run(frame, plan, given, theirs, want)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=1e-6)
    assert (ours == theirs).float().mean() > 0.99 or kept_in == torch.float32


@pytest.mark.parametrize(
    "spoil",
    [
        lambda matrix: matrix.double(),
        lambda matrix: matrix.t().contiguous().t(),
        lambda matrix: matrix[:, :-1].contiguous(),
        lambda matrix: F.pad(matrix, (0, 1)).flatten()[1:][: matrix.numel()].view(matrix.shape),
    ],
    ids=["of another type", "the other way round", "rows of odd length", "odd addresses"],
)
def test_experts_that_do_not_suit_are_left_to_torch(spoil: Callable[[Tensor], Tensor]) -> None:
    good = expert(1, torch.float32, 48, 32)
    assert GroupedExperts.taken(good, torch.float32) is not None
    assert GroupedExperts.taken(good, torch.bfloat16) is None
    bad = {**good, "up": spoil(good["up"])}
    assert GroupedExperts.taken(bad, torch.float32) is None
    assert GroupedExperts.taken({**good, "up_bias": good["up"][:, 0]}, torch.float32) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda matrix: replace(matrix, block=(1, 24)),
        lambda matrix: replace(matrix, codes=matrix.codes[:, :-8].contiguous(), shape=(32, 80)),
        lambda matrix: replace(matrix, codes=matrix.codes.t().contiguous().t()),
        lambda matrix: replace(matrix, rounds_to=torch.float16),
        lambda matrix: replace(matrix, groups=torch.zeros(matrix.shape[1], dtype=torch.int32)),
        lambda matrix: replace(matrix, numbers="q8_0", scales=None),
    ],
    ids=[
        "odd blocks",
        "rows of odd length",
        "the other way round",
        "gate and up rounded apart",
        "an order of its own",
        "blocks of ggml",
    ],
)
def test_codes_that_do_not_suit_are_left_to_torch(
    spoil: Callable[[CodedMatrix], CodedMatrix],
) -> None:
    good = expert(1, torch.float32, 96, 32, check.CODES[0])
    assert GroupedExperts.taken(good, torch.bfloat16) is not None
    assert isinstance(good["up"], CodedMatrix)
    bad = {**good, "up": spoil(good["up"])}
    assert GroupedExperts.taken(bad, torch.bfloat16) is None


def test_what_does_not_suit_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    elementwise, x = in_triton(), noise(1, torch.float32, 4, 8)
    monkeypatch.setattr(rows, "launch", lambda *_, **__: pytest.fail("a kernel was launched"))
    wide, frame = torch.empty(1, 2**15, device=DEVICE), Frame(torch.empty(2**16, device=DEVICE))
    elementwise.gate(x[:, ::2], x[:, ::2])  # gaps
    elementwise.gate(x, x.half())  # two types
    elementwise.add(frame, x.double(), x.double())  # a type that is not known
    elementwise.norm(frame, x, x[0].half(), 1e-5)
    elementwise.norm(frame, wide, wide[0], 1e-5)  # longer than a block


@pytest.mark.exhaustive  # interprets all of them in three types
def test_kernels_compute_what_torch_computes() -> None:
    assert check.differences(DEVICE) is None


@pytest.mark.few(2, idle=("gate_rows", "attend_single"))
@pytest.mark.parametrize(
    ("idle", "what", "with_codes"),
    [*((name, what, False) for name, what in WRONG.items()), ("", "experts of e2m1", True)],
)
def test_kernels_are_checked_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, idle: str, what: str, *, with_codes: bool
) -> None:
    launch = rows.launch
    monkeypatch.setattr(check, "CODES", check.CODES[1:2])
    monkeypatch.setattr(check, "ROUTERS", check.ROUTERS[:1])

    def launch_others(name: str, *given: Any, **options: Any) -> None:
        coding: Coding | None = options.get("coding")
        if name != idle and not (with_codes and coding is not None and coding.bits > 0):
            launch(name, *given, **options)
        elif name not in IN_PLACE:
            out = given[1]
            is_unwritten = out.isnan() | (out == check.UNWRITTEN)
            assert is_unwritten.all(), "memory may hold what was right before"

    use_launch(monkeypatch, launch_others)
    assert f"{what} in torch.float32 otherwise" in str(check.differences(DEVICE))


@pytest.mark.exhaustive  # a compiler takes some ten seconds for one type and capability
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """An A100 and an H100; and a GPU of desktops, which has the least shared memory. Weights are
    read 16 bytes at a time, though their addresses come from a table; so are codes, and single
    numbers are scales and biases."""
    targets = [
        f"{kind}-{capability}" for kind in ("fp32", "bf16", "fp16") for capability in (80, 86, 90)
    ]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.model.compiled_gpu_kernels", *targets]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {(made["kernel"], f"{made['type']}-{made['capability']}") for made in found} == {
        (kernel, target) for kernel in WRONG for target in targets
    }
    for made in found:
        assert made["code_bytes"] > 0 and made["shared_bytes"] <= LEAST_SHARED_BYTES, made
        if made["kernel"].startswith(("experts", "attend")) and made["type"] != "fp32":
            singles = made["loads_of_8_bits"], made["loads_of_16_bits"]
            assert made["tensor_cores"] > 0 and singles[0] <= _LOADS_OF_SCALES, made
            assert singles == (0, 0) or made["numbers"], made


class TestWhereThereAreNone:
    @pytest.fixture(autouse=True)
    def asked_anew(self) -> Iterator[None]:
        """What was found out is known for as long as a process lives."""
        gpu_loader._checked.cache_clear()
        yield
        gpu_loader._checked.cache_clear()

    def with_gpu(self, monkeypatch: pytest.MonkeyPatch, *, has_bfloat16: bool) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: has_bfloat16)

    def test_a_cpu_needs_no_reason(self) -> None:
        assert not gpu_loader.are_for(torch.device("cpu"))

    def test_an_old_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_gpu(monkeypatch, has_bfloat16=False)
        assert gpu_loader.prepare() == "the GPU is older than compute capability 8.0"
        assert not gpu_loader.are_for(torch.device("cuda"))

    def test_a_compiler_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(device: torch.device) -> None:
            raise ImportError("no module named triton")

        self.with_gpu(monkeypatch, has_bfloat16=True)
        monkeypatch.setattr(check, "differences", failing)
        assert gpu_loader.prepare() == "Triton: ImportError: no module named triton"
        assert not gpu_loader.attends_single(mixtral(), torch.device("cuda"))

    def test_results_that_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_gpu(monkeypatch, has_bfloat16=True)
        monkeypatch.setattr(check, "differences", lambda device: "Triton computes it otherwise")
        assert gpu_loader.prepare() == "Triton computes it otherwise"

    def test_a_user_who_wants_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_gpu(monkeypatch, has_bfloat16=True)
        monkeypatch.setattr(check, "differences", lambda device: None)
        assert gpu_loader.prepare() is None
        monkeypatch.setenv(gpu_loader.SWITCH, "0")
        assert gpu_loader.prepare() == "MOEBATCH_TRITON=0"


def mixtral() -> ModelShape:
    return load_model("mixtral-8x7b").shape


# --- helpers --------------------------------------------------------------------------------------


def by_torch(clamped: ClampedGate | None = None) -> Elementwise:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(loader.SWITCH, "0")
        return Elementwise("silu", torch.device("cpu")).clamping(clamped)


def in_triton(clamped: ClampedGate | None = None) -> Elementwise:
    with pytest.MonkeyPatch.context() as patch:
        use_gpu_kernels(patch)
        return Elementwise("silu", DEVICE).clamping(clamped)


def unwritten_choices(num_tokens: int, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Room for weights and experts."""
    weights_TK = torch.full((num_tokens, num_chosen), torch.nan, device=DEVICE)
    return weights_TK, torch.full_like(weights_TK, check.UNWRITTEN, dtype=torch.int64)


def assert_alike(
    compute: Callable[[Elementwise], Tensor], clamped: ClampedGate | None = None
) -> None:
    assert_close(compute(in_triton(clamped)), compute(by_torch(clamped)))


def assert_close(got: Tensor, want: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def noise(seed: int, dtype: torch.dtype, *size: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).mul_(scale).to(DEVICE, dtype)


def expert(
    seed: int, dtype: torch.dtype, hidden: int, width: int, stored: Codes | None = None
) -> dict[str, Tensor | CodedMatrix]:
    sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    if stored is None:
        return {
            role: noise(seed * 3 + n, dtype, *size, scale=size[1] ** -0.5)
            for n, (role, size) in enumerate(sizes.items())
        }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {role: check.coded(stored, size, DEVICE) for role, size in sizes.items()}


def biases(
    seed: int, dtype: torch.dtype, matrices: Mapping[str, Tensor | CodedMatrix]
) -> dict[str, Tensor]:
    """Of every second place, as files have them in which gate and up take turns."""
    return {
        f"{role}_bias": noise(seed + n, dtype, 2 * matrix.shape[0])[n % 2 :: 2]
        for n, (role, matrix) in enumerate(matrices.items())
    }


def grouped(
    kernels: GroupedExperts,
    tokens: Mapping[int, ExpertTokens],
    matrices: Mapping[int, Mapping[str, Tensor | CodedMatrix]],
    dtype: torch.dtype,
) -> list[GroupedExpert]:
    found = []
    for number, chosen in tokens.items():
        taken = kernels.taken(matrices[number], dtype)
        assert taken is not None, "it suits"
        found.append(GroupedExpert(chosen, taken))
    return found


def compute_by_torch(
    routing: Routing,
    tokens: ExpertTokens,
    matrices: Mapping[str, Tensor | CodedMatrix],
    between: tuple[Middle, ClampedGate | None],
    out_TKD: Tensor,
) -> None:
    """One expert alone, from its matrices as torch decodes them."""
    dtype, (middle, clamped) = out_TKD.dtype, between

    def product(x: Tensor, role: str) -> Tensor:
        weight, bias = matrices[role], matrices.get(f"{role}_bias")
        if isinstance(weight, CodedMatrix):
            decoding.decode(weight, decoded := x.new_empty(weight.shape))
            weight = decoded
        made = x.float() @ weight.float().t()
        if isinstance(bias, Tensor):
            made += bias.to(dtype).float()
        return made.to(dtype)

    x_MD = routing.normed_TD[tokens.rows_M]
    inner_MF = product(x_MD, "gate" if "gate" in matrices else "up")
    if "gate" in matrices:
        by_torch(clamped=clamped).gate(inner_MF, product(x_MD, "up"))
    else:
        inner_MF = inner_MF.relu().pow(2 if middle == "relu2" else 1)
    weighed = product(inner_MF, "down") * routing.weights_TK[tokens][:, None]
    out_TKD[tokens] = weighed.to(dtype)


def routing_of(
    num_tokens: int, num_choices: int, width: int, dtype: torch.dtype, seed: int
) -> Routing:
    """Of tokens that choose among eight experts."""
    scores = noise(seed, torch.float32, num_tokens, 8)
    weights_TK, experts_TK = scores.topk(num_choices, dim=-1)
    everything = slice(0, num_tokens)
    return Routing(
        rows=(everything,),
        normed_TD=noise(seed, dtype, num_tokens, width),
        weights_TK=weights_TK,
        experts_TK=experts_TK,
        num_experts=8,
        tokens=group_by_expert(experts_TK, everything, 8),
        outputs_TKD=torch.empty(num_tokens, num_choices, width, dtype=dtype, device=DEVICE),
    )
