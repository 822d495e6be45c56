"""Compiled elementwise kernels: equal to torch, bit for bit where nothing is summed differently."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moebatch.model.elementwise import Elementwise
from moebatch.model.native import loader
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import ExpertTokens, group_by_expert
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate
from tests.native import kernels

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BROKEN = [torch.nan, torch.inf, -torch.inf]

needs_kernels = pytest.mark.skipif(kernels() is None, reason=f"no kernels: {loader.prepare()}")

sizes = settings(max_examples=40)
rows = st.integers(0, 70)
widths = st.sampled_from([1, 7, 16, 31, 32, 33, 64, 100, 257, 2048])
dtypes = st.sampled_from(DTYPES)
added = st.sampled_from([0.0, 0.5, 1.0])
"""Numbers of bfloat16: torch rounds others before it adds them."""
seeds = st.integers(0, 99)
scales = st.sampled_from([1.0, 0.22, 3.7])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_number_is_gated_alike(dtype: torch.dtype) -> None:
    """Among them all that are broken, tiny or so large that the exponential overflows."""
    x = torch.arange(2**16).to(torch.int32).sub(2**15).to(torch.int16).view(torch.bfloat16)
    x = x.to(dtype)[None]
    up = torch.ones_like(x)
    assert_alike(lambda elementwise: gated(elementwise, x, up))


@needs_kernels
@sizes
@given(rows, widths, dtypes, seeds)
def test_gating(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    gate, up = noise(seed, dtype, num_rows, width, scale=4.0), noise(seed + 1, dtype, 70, width)
    assert_alike(lambda elementwise: gated(elementwise, gate, up[:num_rows]))


@needs_kernels
@sizes
@given(rows, widths, dtypes, seeds, st.floats(0.1, 9.0), st.floats(0.5, 3.0), added)
def test_clamped_gating(
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    limit: float,
    alpha: float,
    added: float,
) -> None:
    """As torch has it, and as transformers has it within rounding."""
    gate, up = (noise(seed + i, dtype, num_rows, width, scale=4.0) for i in range(2))
    clamped = ClampedGate(limit=limit, alpha=alpha, added=added)
    assert_alike(lambda elementwise: gated(elementwise, gate, up), clamped=clamped)
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(
        gated(native(clamped=clamped), gate, up).float(),
        (u + added) * g * torch.sigmoid(alpha * g),
        rtol=tolerance,
        atol=tolerance,
    )


@needs_kernels
@sizes
@given(rows, widths, dtypes, seeds, st.floats(0.1, 9.0))
def test_gating_that_clamps_what_is_activated(
    num_rows: int, width: int, dtype: torch.dtype, seed: int, limit: float
) -> None:
    gate, up = (noise(seed + i, dtype, num_rows, width, scale=4.0) for i in range(2))
    clamped = ClampedGate(limit=limit, clamps_activated=True)
    assert_alike(lambda elementwise: gated(elementwise, gate, up), clamped=clamped)
    want = F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    got = gated(native(clamped=clamped), gate, up)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@needs_kernels
@sizes
@given(rows, st.integers(1, 8), widths, dtypes, seeds)
def test_placing(
    num_rows: int, num_choices: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    routing = routing_of(num_rows, num_choices, width, dtype, seed)
    for tokens in routing.tokens.values():
        y_MD = noise(seed, dtype, len(tokens.rows_M), width)

        def placed(elementwise: Elementwise, tokens=tokens, y_MD=y_MD) -> Tensor:
            routing.outputs_TKD.fill_(7)
            elementwise.place(y_MD.clone(), tokens, routing.outputs_TKD, routing.weights_TK)
            return routing.outputs_TKD.clone()

        assert_equal(placed(native()), placed(by_torch()))


@needs_kernels
@sizes
@given(rows, st.integers(1, 8), st.booleans(), widths, dtypes, seeds, scales)
def test_adding_what_experts_made(
    num_rows: int,
    num_choices: int,
    is_shared: bool,
    width: int,
    dtype: torch.dtype,
    seed: int,
    scale: float,
) -> None:
    x = noise(seed, dtype, num_rows, width)
    parts = [noise(seed + 1, dtype, num_rows, num_choices, width)]
    if is_shared:
        parts.append(noise(seed + 2, dtype, num_rows, width))

    def added(elementwise: Elementwise) -> Tensor:
        out = x.clone()
        elementwise.add(room(num_rows * width, dtype), out, *parts, scale=scale)
        return out

    # In float32 torch groups more than four terms otherwise, here and there.
    sums = [parts[0].abs().sum(1), *(part.abs() for part in parts[1:])]
    unsigned = x.abs() + scale * torch.stack(sums).sum(0)
    largest = max([1.0, *unsigned[unsigned.isfinite()].tolist()])
    assert_alike(added, exact=dtype == torch.bfloat16, added=largest)


@needs_kernels
@sizes
@given(rows, widths, dtypes, seeds, scales)
def test_adding_one_part(
    num_rows: int, width: int, dtype: torch.dtype, seed: int, scale: float
) -> None:
    x, part = noise(seed, dtype, num_rows, width), noise(seed + 1, dtype, num_rows, width)

    def added(elementwise: Elementwise) -> Tensor:
        out = x.clone()
        elementwise.add(room(0, dtype), out, part, scale=scale)
        return out

    assert_alike(added)
    if dtype == torch.bfloat16:
        assert_equal(added(native()), x + part * scale)


@needs_kernels
@sizes
@given(rows, st.sampled_from([(), (3,)]), widths, dtypes, st.booleans(), st.booleans(), seeds)
def test_norms(
    num_rows: int,
    heads: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    in_place: bool,
    has_exact_weight: bool,
    seed: int,
) -> None:
    x, weight = noise(seed, dtype, num_rows, *heads, width), noise(seed + 1, dtype, width)
    weight = weight.float() if has_exact_weight else weight

    def normed(elementwise: Elementwise) -> Tensor:
        source = x.clone()
        out = source if in_place else torch.empty_like(x)
        room_32 = torch.empty(x.numel(), dtype=torch.float32)
        return elementwise.rms_norm(source, weight, 1e-5, room_32, out)

    assert_alike(normed, exact=False)


@needs_kernels
@sizes
@given(rows, st.integers(1, 5), widths, st.integers(0, 9), dtypes, seeds)
def test_gated_norms(
    num_rows: int, heads: int, width: int, gap: int, dtype: torch.dtype, seed: int
) -> None:
    x, weight = noise(seed, torch.float32, num_rows, heads, width), noise(seed + 1, dtype, width)
    wide = noise(seed + 2, dtype, num_rows, heads * width + gap)
    z = wide[:, gap:].view(num_rows, heads, width)

    def normed(elementwise: Elementwise) -> Tensor:
        out = torch.full((num_rows, heads, width), torch.nan, dtype=dtype)
        elementwise.norm_gated(x.clone(), weight, 1e-5, z, out)
        return out

    assert_alike(normed, exact=False)


@needs_kernels
@sizes
@given(
    rows,
    st.integers(1, 5),
    st.sampled_from([2, 6, 16, 64, 80, 128]),
    st.sampled_from([(0, 0), (0, 5), (3, 0), (32, 64)]),
    dtypes,
    seeds,
)
def test_rotation(
    num_tokens: int,
    num_heads: int,
    rotary_dim: int,
    others: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Others, in front and behind, stay as they are."""
    x = noise(seed, dtype, num_tokens, num_heads, rotary_dim + sum(others))
    angles = noise(seed + 1, torch.float32, num_tokens, rotary_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, stop = others[0], others[0] + rotary_dim

    def rotated(elementwise: Elementwise) -> Tensor:
        out = x.clone()
        elementwise.rotate(out[..., first:], cos, sin)
        assert torch.equal(out[..., :first], x[..., :first])
        assert torch.equal(out[..., stop:], x[..., stop:])
        return out

    assert_alike(rotated, exact=dtype == torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", BROKEN)
def test_broken_numbers_pass_as_with_torch(dtype: torch.dtype, what: float) -> None:
    x, y = noise(1, dtype, 3, 64), noise(2, dtype, 3, 64)
    x[1, 5] = y[2, 6] = what
    room_32 = torch.empty(x.numel(), dtype=torch.float32)

    def normed(elementwise: Elementwise) -> Tensor:
        return elementwise.rms_norm(x, y[0], 1e-5, room_32, torch.empty_like(x))

    def added(elementwise: Elementwise) -> Tensor:
        out = x.clone()
        elementwise.add(room(0, dtype), out, y)
        return out

    assert_alike(lambda elementwise: gated(elementwise, x, y))
    assert_alike(normed, exact=False)
    assert_alike(added)
    assert not gated(native(), x, y)[2, 6].isfinite() and normed(native())[1, 5].isnan()


@needs_kernels
def test_many_rows_are_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    gate, up = (noise(seed, torch.bfloat16, 300, 512) for seed in (1, 2))
    want = gated(by_torch(), gate, up)
    assert torch.equal(gated(native(), gate, up), want)


@needs_kernels
@pytest.mark.parametrize("case", ["float16", "gaps", "mixed"])
def test_what_does_not_suit_is_left_to_torch(case: str) -> None:
    gate, up = noise(1, torch.bfloat16, 6, 64), noise(2, torch.bfloat16, 6, 64)
    if case == "float16":
        gate, up = gate.half(), up.half()
    elif case == "mixed":
        up = up.float()
    else:
        up = up.repeat(1, 2)[:, ::2]
    assert_alike(lambda elementwise: gated(elementwise, gate, up))


@needs_kernels
def test_other_activations_are_left_to_torch() -> None:
    gate, up = noise(1, torch.bfloat16, 6, 64), noise(2, torch.bfloat16, 6, 64)
    got = gated(Elementwise("gelu", CPU), gate, up)
    assert torch.equal(got, torch.nn.functional.gelu(gate) * up)


# --- helpers --------------------------------------------------------------------------------------


def native(clamped: ClampedGate | None = None) -> Elementwise:
    elementwise = Elementwise("silu", CPU).clamping(clamped)
    assert elementwise._kernels is not None
    return elementwise


def by_torch(clamped: ClampedGate | None = None) -> Elementwise:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(loader.SWITCH, "0")
        elementwise = Elementwise("silu", CPU).clamping(clamped)
    assert elementwise._kernels is None
    return elementwise


def gated(elementwise: Elementwise, gate: Tensor, up: Tensor) -> Tensor:
    out = gate.clone()
    elementwise.gate(out, up.clone(memory_format=torch.preserve_format))
    return out


def assert_alike(
    compute: Callable[[Elementwise], Tensor],
    *,
    exact: bool = True,
    added: float = 1.0,
    clamped: ClampedGate | None = None,
) -> None:
    """`exact` means bit by bit in bfloat16, but some units in the last place in float32: of what is
    `added` without signs at most, where sums may be small."""
    got, want = compute(native(clamped)), compute(by_torch(clamped))
    if exact and got.dtype != torch.float32:
        assert_equal(got, want)
    else:
        tolerance = 1e-6 if got.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=added * tolerance, equal_nan=True
        )


def assert_equal(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def noise(seed: int, dtype: torch.dtype, *size: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).mul_(scale).to(dtype)


def room(num_floats: int, dtype: torch.dtype) -> Frame:
    return Frame(torch.empty(2 * num_floats, dtype=dtype))


def routing_of(
    num_tokens: int, num_choices: int, width: int, dtype: torch.dtype, seed: int
) -> Routing:
    """Of tokens that choose among eight experts."""
    scores = noise(seed, torch.float32, num_tokens, 8)
    weights_TK, experts_TK = scores.topk(num_choices, dim=-1)
    everything = slice(0, num_tokens)
    tokens: dict[int, ExpertTokens] = group_by_expert(experts_TK, everything, 8)
    return Routing(
        rows=(everything,),
        normed_TD=noise(seed, dtype, num_tokens, width),
        weights_TK=weights_TK,
        experts_TK=experts_TK,
        num_experts=8,
        tokens=tokens,
        outputs_TKD=torch.empty(num_tokens, num_choices, width, dtype=dtype),
    )
