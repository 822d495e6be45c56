"""Keys and values in 8 bits: what is stored, what it is read as, and that transformers with the
same rounding says the same tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moebatch.model.attention.cached_numbers import decode, encode
from moebatch.model.native import loader
from moebatch.model.native.kernels import Kernels
from moebatch.spec.model.cache_layout import SCALE_BYTES, CacheDtype
from tests.model.driver import Driver
from tests.model.oracle import greedy, load, prompts, rounding_cache
from tests.model.ways import ApartDriver
from tests.tiny import GROUPED

CACHE_DTYPES: Sequence[CacheDtype] = get_args(CacheDtype)
WORST = {"int8": 0.5 / 127 * 1.02, "fp8": 2**-4}
"""Error of a number: as a share of the largest one of its head, and of its own."""
NEW_TOKENS = 4
LENGTHS = (1, 17, 40)


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def round_trip(x_TGC: Tensor, dtype: CacheDtype) -> Tensor:
    return decode(encode(x_TGC, dtype), dtype, torch.empty_like(x_TGC))


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@given(
    seed=st.integers(0, 999), exponent=st.integers(-30, 30), head_dim=st.sampled_from([2, 8, 80])
)
def test_a_number_is_off_by_half_a_step_at_most(
    dtype: CacheDtype, seed: int, exponent: int, head_dim: int
) -> None:
    x_TGC = noise(5, 3, head_dim, seed=seed) * 2.0**exponent
    coded_TGB = encode(x_TGC, dtype)
    assert coded_TGB.shape == (5, 3, head_dim + SCALE_BYTES) and coded_TGB.dtype == torch.uint8
    error = (round_trip(x_TGC, dtype) - x_TGC).abs()
    largest = x_TGC.abs().amax(-1, keepdim=True).expand_as(x_TGC)
    if dtype == "int8":
        assert (error <= WORST[dtype] * largest).all()
    else:  # the last term is half of the smallest number that is not zero
        assert (error <= torch.maximum(WORST[dtype] * x_TGC.abs() * 1.02, largest * 2**-18)).all()


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_what_is_stored_of_a_token_depends_on_that_token_and_head_alone(dtype: CacheDtype) -> None:
    x_TGC = noise(40, 2, 16) * torch.logspace(-3, 3, 40)[:, None, None]
    alone = torch.cat([encode(part, dtype) for part in x_TGC.split(1)])
    by_head = torch.cat([encode(part, dtype) for part in x_TGC.split(1, dim=1)], dim=1)
    assert torch.equal(encode(x_TGC, dtype), alone) and torch.equal(by_head, alone)
    again = round_trip(x_TGC, dtype)
    assert torch.equal(round_trip(again, dtype), again), "nothing is lost a second time"


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_zeros_stay_zeros_and_broken_heads_stay_broken(dtype: CacheDtype) -> None:
    x_TGC = noise(4, 2, 8)
    x_TGC[0], x_TGC[1, 0] = 0, 1e-43
    x_TGC[2, 0, 3], x_TGC[3, 1, 5] = torch.nan, torch.inf
    got = round_trip(x_TGC, dtype)
    assert not got[0].any() and not got[1, 0].any()
    assert not got[2, 0].isfinite().any() and not got[3, 1].isfinite().any()
    assert got[2, 1].isfinite().all() and got[3, 0].isfinite().all()


@pytest.fixture(params=["kernels", "torch"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiled kernels, and without them."""
    if request.param == "torch":
        monkeypatch.setenv(loader.SWITCH, "0")
    elif not isinstance(loader.kernels(), Kernels):
        pytest.skip("no kernels")


@pytest.mark.few
@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("family", GROUPED)
def test_tokens_are_those_of_transformers_with_rounded_keys_and_values(
    tiny_checkpoint: Callable[..., Path], family: str, dtype: CacheDtype
) -> None:
    folder = tiny_checkpoint(family)
    texts = prompts(lengths=LENGTHS)
    expected = expected_tokens(folder, dtype, texts)
    cuts = {}, {"slice_tokens": 7, "micro_batch": 2}, {"span_tokens": 11, "stagger": 1}
    for make, cut in zip((Driver, Driver, ApartDriver), cuts, strict=True):
        seqs = make(folder, cached_in=dtype).generate(texts, NEW_TOKENS, **cut)
        assert [seq.answer for seq in seqs] == expected, cut


@pytest.mark.few
@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("options", [{"sliding_window": 16}, {"head_dim": 12}])
def test_windows_and_odd_head_sizes(
    tiny_checkpoint: Callable[..., Path], options: dict[str, Any]
) -> None:
    folder, texts = tiny_checkpoint("mixtral", **options), prompts(lengths=LENGTHS)
    expected = expected_tokens(folder, "int8", texts)
    seqs = Driver(folder, cached_in="int8").generate(texts, NEW_TOKENS, slice_tokens=13)
    assert [seq.answer for seq in seqs] == expected


def expected_tokens(
    folder: Path, dtype: CacheDtype, texts: Sequence[Sequence[int]]
) -> list[list[int]]:
    def tokens(text: Sequence[int]) -> list[int]:
        cache = rounding_cache(lambda x: round_trip(x, dtype))
        return greedy(model, text, NEW_TOKENS, cache=cache)[0]

    model = load(folder)
    return list(map(tokens, texts))
