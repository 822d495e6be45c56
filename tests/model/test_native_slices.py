"""Compiled attention of prompt slices: equal to torch within rounding, whatever lies around."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moebatch.layout.scratch import Limits
from moebatch.model.attention.by_torch import Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.model.native import loader
from moebatch.model.native.attention_work import Cached, QuerySlices, work_of
from moebatch.model.native.kernels import Kernels
from moebatch.model.native.scoring import Scoring
from moebatch.spec.model.cache_layout import CacheDtype
from moebatch.spec.model.shape_reader import read_shape
from tests.few import examples
from tests.model.test_native_attention import KERNELS, Cache, room_for
from tests.model.test_parts import planner

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of outputs around one, as for single queries."""
CPU = torch.device("cpu")

needs_kernel = pytest.mark.skipif(
    not isinstance(KERNELS, Kernels) or not KERNELS.attends_slices(torch.float32),
    reason=f"no kernel for slices: {KERNELS}",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Slices of (tokens, context) of a sequence each."""

    slices: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    value_dim: int | None = None
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    cached_in: CacheDtype | None = None
    seed: int = 0
    cache: Cache = field(init=False)
    q_THC: Tensor = field(init=False)

    def __post_init__(self) -> None:
        lengths = [sum(each) for each in self.slices]
        cache_dtype = self.cache_dtype or self.dtype
        sizes = lengths, self.heads[1], self.head_dim
        cache = Cache(*sizes, cache_dtype, self.seed, self.cached_in, self.value_dim)
        num_tokens = sum(num for num, _ in self.slices)
        q_THC = cache.noise(num_tokens, self.heads[0], self.head_dim).to(self.dtype)
        object.__setattr__(self, "cache", cache)
        object.__setattr__(self, "q_THC", q_THC)

    def seen(self, index: int) -> Tensor:
        """Cache rows that the tokens of a slice see."""
        context = self.slices[index][1]
        first = 0 if self.window is None else max(0, context - self.window + 1)
        return self.cache.rows[index][first:]

    def firsts(self) -> list[int]:
        """Row of the first token of each slice, and the end."""
        counts = [0, *(num for num, _ in self.slices)]
        return torch.tensor(counts).cumsum(0).tolist()

    def attended(
        self,
        num_threads: int = 1,
        *,
        rows_per_item: int | None = None,
        q_THC: Tensor | None = None,
        out_THV: Tensor | None = None,
        sink_scores_H: Tensor | None = None,
    ) -> Tensor:
        """By the kernel."""
        assert isinstance(KERNELS, Kernels)
        seen = [self.seen(i) for i in range(len(self.slices))]
        slices = QuerySlices(
            tokens_B=torch.tensor(self.firsts()[:-1]),
            counts_B=torch.tensor([num for num, _ in self.slices]),
            starts_B=torch.tensor([0, *map(len, seen)]).cumsum(0),
            rows_N=torch.cat(seen),
            num_pairs=0,
            window=self.window,
        )
        q_THC = self.q_THC if q_THC is None else q_THC
        out_THV = room_for(self.q_THC, self.cache) if out_THV is None else out_THV
        cached = Cached(*self.cache.stored, self.cached_in)  # only pointers go to the kernel
        work = work_of(
            slices,
            q_THC,
            cached,
            out_THV,
            Scoring(self.head_dim**-0.5, sink_scores_H=sink_scores_H),
            num_threads=num_threads,
        )
        if rows_per_item is not None:
            work.rows_per_item = rows_per_item
        KERNELS.attend_slices(work, num_threads)
        assert not work.has_failed
        return out_THV

    def reference(self) -> Tensor:
        """By torch, in float64, rounded at the end."""
        out_THV, firsts = room_for(self.q_THC, self.cache), self.firsts()
        numbers = self.cache.numbers
        for i, (num_tokens, context) in enumerate(self.slices):
            rows, tokens = self.cache.rows[i], slice(firsts[i], firsts[i + 1])
            queries = torch.arange(context, context + num_tokens)[:, None]
            keys = torch.arange(len(rows))
            mask = keys <= queries
            if self.window is not None:
                mask &= keys > queries - self.window
            k_GSC, v_GSC = (kv[rows].double().transpose(0, 1) for kv in numbers)
            q_HTC = self.q_THC[tokens].double().transpose(0, 1)
            out = F.scaled_dot_product_attention(
                q_HTC[None], k_GSC[None], v_GSC[None], attn_mask=mask, enable_gqa=True
            )
            out_THV[tokens] = out[0].transpose(0, 1).to(self.dtype)
        return out_THV


def assert_close(case: Case, got: Tensor) -> None:
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got, case.reference(), rtol=tolerance, atol=tolerance)


@needs_kernel
@examples(80)
@given(
    slices=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 400)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (8, 2), (8, 1), (6, 2), (5, 1), (28, 4)]),
    head_dim=st.sampled_from([8, 20, 48, 64, 80, 128]),
    value_dim=st.sampled_from([None, 9, 64, 100]),
    window=st.one_of(st.none(), st.integers(1, 200)),
    dtype=st.sampled_from(DTYPES),
    cached_in=st.sampled_from([None, *get_args(CacheDtype)]),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equal_to_torch_within_rounding(
    slices: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    value_dim: int | None,
    window: int | None,
    dtype: torch.dtype,
    cached_in: CacheDtype | None,
    num_threads: int,
    seed: int,
) -> None:
    case = Case(
        slices=slices,
        heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=window,
        dtype=dtype,
        cached_in=cached_in,
        seed=seed,
    )
    assert_close(case, case.attended(num_threads))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_longer_than_what_is_copied_at_a_time(dtype: torch.dtype, window: int | None) -> None:
    case = Case(slices=[(700, 0), (65, 900)], heads=(4, 1), window=window, dtype=dtype)
    assert_close(case, case.attended(2))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_cache_of_another_dtype(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = Case(slices=[(70, 33), (5, 0)], head_dim=80, dtype=dtype, cache_dtype=cache_dtype)
    assert_close(case, case.attended())


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_may_lie_apart(dtype: torch.dtype) -> None:
    """As where queries, keys and values come out of one product; what lies between stays."""
    case = Case(slices=[(40, 7), (33, 0)], dtype=dtype)
    (num_tokens, num_heads, head_dim) = case.q_THC.shape
    q_THC = torch.full((num_tokens, num_heads + 3, head_dim), torch.nan, dtype=dtype)
    q_THC[:, :num_heads] = case.q_THC
    out_THC = torch.full((num_tokens, num_heads + 1, head_dim), 7.0, dtype=dtype)
    out, beside = out_THC[:, :num_heads], out_THC[:, num_heads:]
    case.attended(q_THC=q_THC[:, :num_heads], out_THV=out)
    assert_close(case, out)
    assert (beside == 7).all()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_how_work_is_divided_changes_no_bit(dtype: torch.dtype, window: int | None) -> None:
    case = Case(slices=[(200, 90), (9, 0), (77, 0)], window=window, dtype=dtype, heads=(6, 2))
    want = case.attended(rows_per_item=512)
    for rows in (32, 64, 256):
        assert torch.equal(case.attended(2, rows_per_item=rows), want)


@needs_kernel
@pytest.mark.parametrize("factor", [1e-20, 30.0, 1e4])
def test_scores_of_any_size(factor: float) -> None:
    case = Case(slices=[(90, 100), (17, 0)], dtype=torch.float32)
    case.q_THC.mul_(factor)
    tolerance = 1e-3 if factor > 100 else 1e-5
    torch.testing.assert_close(case.attended(), case.reference(), rtol=1e-3, atol=tolerance)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_rising", [True, False])
def test_scores_that_rise_or_fall_along_the_sequence(dtype: torch.dtype, is_rising: bool) -> None:
    case = Case(slices=[(60, 500)], dtype=dtype)
    case.q_THC[..., 0] = 8.0
    steps = (torch.arange(560) // 4 * 0.5).to(dtype)[:, None]
    case.cache.keys_RGC[case.cache.rows[0], :, 0] = steps if is_rising else steps.flip(0)
    # Products of queries and keys go up to 560, with a last place of 6e-5: torch is no closer.
    tolerance = max(TOLERANCE[dtype], 1e-4)
    torch.testing.assert_close(case.attended(), case.reference(), rtol=tolerance, atol=tolerance)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_broken_numbers_stay_broken_and_with_their_sequence(
    dtype: torch.dtype, what: float
) -> None:
    case = Case(slices=[(20, 20), (20, 20), (20, 20)], heads=(4, 2), dtype=dtype)
    case.q_THC[20:40, :, 5] = 1.0
    case.cache.keys_RGC[case.cache.rows[1][10], 0, 5] = what
    got = case.attended()
    assert not got[20:40, :2].isfinite().any(), "the heads that see it"
    assert got[:20].isfinite().all() and got[40:].isfinite().all()
    assert got[20:40, 2:].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", [-torch.inf, torch.finfo(torch.bfloat16).min, -1e4])
def test_sink_scores_may_weigh_nothing(dtype: torch.dtype, score: float) -> None:
    """Also for tokens whose window begins behind all that is met first."""
    case = Case(slices=[(130, 40)], window=50, dtype=dtype)
    assert_close(case, case.attended(sink_scores_H=torch.full((8,), score)))


@needs_kernel
def test_the_plan_lists_what_slices_see_and_the_most_work_first() -> None:
    slices = micro_batch([(9, 0), (40, 30), (1, 3)], window=16).by_window[16].plans[0].slices
    assert slices is not None
    assert slices.tokens_B.tolist() == [9, 0]
    assert slices.counts_B.tolist() == [40, 9]
    assert slices.starts_B.tolist() == [0, 55, 64]
    assert slices.rows_N.tolist() == [*range(115, 170), *range(9)]
    assert slices.num_pairs == 40 * 55 + 9 * 9


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 25])
def test_as_torch_does_it_where_there_is_no_kernel(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, spans = (8, 2, 16), [(30, 40), (50, 0), (6, 1), (1, 12)]
    with_kernel = micro_batch(spans, window, dtype)
    monkeypatch.setenv(loader.SWITCH, "0")
    with_torch = micro_batch(spans, window, dtype)
    (by_torch,), (by_kernel,) = (
        batch.by_window[window].plans for batch in (with_torch, with_kernel)
    )
    assert len(by_torch.prompts) == 3 and not by_kernel.prompts
    monkeypatch.delenv(loader.SWITCH)
    torch.manual_seed(0)
    kv, num_tokens = torch.randn(2, 400, *heads[1:]).to(dtype), with_kernel.num_tokens
    q_THC = torch.randn(num_tokens, heads[0], heads[2]).to(dtype)
    qkv = Qkv(q_THC, tuple(torch.randn(2, num_tokens, *heads[1:]).to(dtype)))
    outs = [torch.full_like(q_THC, torch.nan) for _ in range(2)]
    for micro, out_THC in zip((with_kernel, with_torch), outs, strict=True):
        core_of(heads, window, dtype).attend(0, qkv, micro, tuple(kv.clone()), out_THC)
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)


# --- helpers --------------------------------------------------------------------------------------


def micro_batch(
    slices: Sequence[tuple[int, int]], window: int | None, dtype: torch.dtype = torch.float32
) -> MicroBatch:
    """Of spans of (new tokens, context), whose rows begin at 0, 100, 200, …"""
    spans, start = [], 0
    for i, (num_tokens, context) in enumerate(slices):
        rows_S = 100 * i + np.arange(context + num_tokens)
        span = Span(
            start=start, num_tokens=num_tokens, context=context, rows_S=rows_S, rope_length=1
        )
        spans.append(span)
        start += num_tokens
    return planner(window, dtype=dtype).plan(spans)


def core_of(heads: tuple[int, int, int], window: int | None, dtype: torch.dtype) -> AttentionCore:
    num_heads, num_kv_heads, head_dim = heads
    config = {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 8,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 100,
        "sliding_window": window,
    }
    limits = Limits(pass_tokens=100, micro_batch_tokens=100, context_tokens=100)
    return AttentionCore(read_shape(config, "synthetic"), limits, dtype=dtype, device=CPU)
