"""The gated delta rule, by heads and by channels, Mamba-2 and their convolution: by compiled
kernels and by torch, what transformers computes; and tokens that do not depend on how prompts are
cut."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    mamba2_selective_state_update,
)
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from moebatch.layout.scratch import Limits
from moebatch.model.native import loader
from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.recurrence.delta_rule import DeltaRule
from moebatch.model.recurrence.plan import RecurrentPlan, StateSpan
from moebatch.model.scratch import Scratch
from moebatch.spec.model.cache_layout import StateDtype
from moebatch.spec.model.recurrence import (
    ChannelDelta,
    GatedDelta,
    MatrixRecurrence,
    StateSpace,
)
from tests.model import oracle
from tests.model.driver import Driver, read_tensors
from tests.model.test_oracle import assert_as_transformers
from tests.native import kernels
from tests.tiny import write_checkpoint

CPU = torch.device("cpu")
WAYS = ["1", "0"] if kernels() else ["0"]
Heads = tuple[int, int, int, int]
MakeRule = Callable[..., MatrixRecurrence]
Stepped = tuple[torch.Tensor, torch.Tensor]
"""What comes out, [1, T, H, V], and the state, [1, H, K, V]."""


def _rule(
    kind: type[MatrixRecurrence], heads: Heads, state_dtype: StateDtype = "float32"
) -> MatrixRecurrence:
    ranks = {"rank": heads[2]} if kind is ChannelDelta else {}
    return kind(
        **ranks,
        num_key_heads=heads[0],
        num_value_heads=heads[1],
        key_head_dim=heads[2],
        value_head_dim=heads[3],
        conv_width=4,
        state_dtype=state_dtype,
    )


KINDS = [partial(_rule, kind) for kind in (GatedDelta, ChannelDelta, StateSpace)]


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("heads", [(2, 2, 16, 16), (2, 4, 24, 40), (1, 3, 7, 33)])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 1, 70), (130, 64, 63, 65, 2, 3, 17)])
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_is_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
    kind: MakeRule,
    native: str,
    heads: Heads,
    lengths: tuple[int, ...],
    forgets: bool,
) -> None:
    monkeypatch.setenv(loader.SWITCH, native)
    (G, H, K, V), T, generator = heads, sum(lengths), torch.Generator().manual_seed(1)
    rows = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)].tolist()

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    q, k, v, matrices = (
        noise(T, G, K),
        noise(T, G, K),
        noise(T, H, V),
        noise(len(rows) + 3, H, K, V),
    )
    rule = kind(heads)
    rates, fading = noise(T, H).sigmoid(), -3 * noise(T, H, rule.fading_dim).sigmoid()
    if forgets:
        for strength in (-torch.inf, -1e9, -50):
            fading[torch.rand(fading.shape, generator=generator) < 0.1] = strength
    spans, start = [], 0
    for row, num_tokens in zip(rows, lengths, strict=True):
        spans.append(StateSpan(start=start, num_tokens=num_tokens, row=row, num_before=9))
        start += num_tokens
    given = DeltaInput(_unit(q) * K**-0.5, _unit(k), v, rates, fading)
    before, out = matrices.clone(), torch.empty(T, H, V)
    plan = RecurrentPlan.of(spans, rule, torch.float32, CPU)
    frame = Scratch(10**6, device=CPU, dtype=torch.float32).frame()
    DeltaRule(rule, CPU).run(frame, plan, given, matrices, out)
    for span in spans:
        tokens = slice(span.start, span.start + span.num_tokens)
        if rule.corrects:
            of_head = isinstance(rule, GatedDelta)
            step = torch_recurrent_gated_delta_rule if of_head else recurrent_kimi_delta_attention
            q_TXK, k_TXK = (x if of_head else x.repeat_interleave(H // G, 1) for x in (q, k))
            left = fading[..., 0] if of_head else fading
            expected, matrix = step(
                *(x[None, tokens] for x in (q_TXK, k_TXK, v, left, rates)),
                initial_state=before[span.row][None],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        else:
            expected, matrix = of_state_space(given, tokens, before[span.row][None])
        torch.testing.assert_close(out[tokens], expected[0], rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(matrices[span.row], matrix[0], rtol=1e-4, atol=2e-4)
    others = [row for row in range(len(before)) if row not in rows]
    assert torch.equal(matrices[others], before[others])


def of_state_space(given: DeltaInput, tokens: slice, before_1HKV: torch.Tensor) -> Stepped:
    """By the recurrence that transformers takes single tokens with."""
    state_1HVK, outs = before_1HKV.mT.clone(), []
    num_heads, value_dim = given.v_THV.shape[1:]
    ones_HV = torch.ones(num_heads, value_dim)
    for at in range(tokens.start, tokens.stop):
        q_GK, k_GK, v_HV, lengths_H, fading_H1 = (x[at] for x in given)
        # Fading is the length of a step times A there, whatever each of them is.
        decay_H = (fading_H1 / lengths_H[:, None])[..., None].expand(*state_1HVK.shape[1:])
        out_1HV = mamba2_selective_state_update(
            state_1HVK,
            v_HV[None],
            (ones_HV * lengths_H[:, None])[None],
            decay_H,
            k_GK[None],
            q_GK[None],
        )
        outs.append(out_1HV[0])
    return torch.stack(outs)[None], state_1HVK.mT


@pytest.mark.skipif(not kernels(), reason="there is no compiler")
@pytest.mark.parametrize("heads", [(2, 4, 24, 40), (1, 3, 7, 33), (1, 1, 128, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_float16_are_rounded_alike_by_kernels_and_torch(
    monkeypatch: pytest.MonkeyPatch, kind: MakeRule, heads: Heads
) -> None:
    """One step each, so that torch rounds behind it as well; too large ones become the largest, and
    none at all stays none."""
    spans = [StateSpan(start=i, num_tokens=1, row=i, num_before=10**i) for i in range(6)]
    given = _given(kind(heads), len(spans))
    begin = _noise(len(spans), *heads[1:])
    begin[0], begin[1], given.v_THV[1] = 9e4, 0, 0
    states, outs = [], []
    for native in ("1", "0"):
        monkeypatch.setenv(loader.SWITCH, native)
        state = begin.clamp(-65504, 65504).half()
        outs.append(_run(kind(heads, "float16"), spans, given, state))
        states.append(state.float())
    assert states[0].abs().max() <= 65504
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-3)
    assert (states[0] == states[1]).float().mean() > 0.99, "but where sums run otherwise"
    torch.testing.assert_close(states[0], states[1], rtol=2**-9, atol=1e-6)


@pytest.mark.skipif(not kernels(), reason="there is no compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_keep_the_same_states_however_prompts_are_cut(kind: MakeRule) -> None:
    heads = (2, 4, 24, 40)
    given = _given(kind(heads), 50)
    found = []
    for cuts in ((50,), (1, 49), (20, 7, 23)):
        state, outs, start = torch.ones(1, *heads[1:]).half(), [], 0
        for num in cuts:
            span = StateSpan(start=0, num_tokens=num, row=0, num_before=3 + start)
            tokens = slice(start, start + num)
            part = DeltaInput(*(each[tokens].contiguous() for each in given))
            outs.append(_run(kind(heads, "float16"), [span], part, state))
            start += num
        found.append((state, torch.cat(outs)))
    for state, outs_T in found[1:]:
        assert torch.equal(state, found[0][0]) and torch.equal(outs_T, found[0][1])


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_fades_by_less_than_a_step_of_float16_fades_all_the_same(
    monkeypatch: pytest.MonkeyPatch, kind: MakeRule, native: str
) -> None:
    """Rounded to the nearest, such numbers would stay as they are."""
    monkeypatch.setenv(loader.SWITCH, native)
    heads, num_steps = (1, 2, 16, 64), 500
    given = DeltaInput(*(torch.zeros_like(each) for each in _given(kind(heads), 1)))
    given.fading_THF.fill_(-1e-4)
    state = _noise(1, *heads[1:]).half()
    expected = state.double() * math.exp(-1e-4 * num_steps)
    assert torch.equal((state.float() * math.exp(-1e-4)).half(), state)
    for step in range(num_steps):
        span = StateSpan(start=0, num_tokens=1, row=0, num_before=step)
        _run(kind(heads, "float16"), [span], given, state)
    torch.testing.assert_close(state.double(), expected, rtol=0.01, atol=1e-5)
    left = (state.double() * expected).sum() / expected.square().sum()
    assert left == pytest.approx(1, abs=1e-3)


def _run(
    shape: MatrixRecurrence,
    spans: Sequence[StateSpan],
    given: DeltaInput,
    state: torch.Tensor,
) -> torch.Tensor:
    """What comes out of a state in float16."""
    plan = RecurrentPlan.of(spans, shape, torch.float32, CPU)
    out = torch.empty_like(given.v_THV)
    frame = Scratch(10**6, device=CPU, dtype=torch.float32).frame()
    DeltaRule(shape, CPU).run(frame, plan, given, state, out)
    return out


def _given(rule: MatrixRecurrence, num_tokens: int) -> DeltaInput:
    (G, H, K, V), T = (
        (rule.num_key_heads, rule.num_value_heads, rule.key_head_dim, rule.value_head_dim),
        num_tokens,
    )
    q, k = (_unit(_noise(T, G, K, seed=seed)) for seed in (1, 2))
    rates, fading = _noise(T, H, seed=3).sigmoid(), _noise(T, H, rule.fading_dim, seed=4).sigmoid()
    return DeltaInput(q * K**-0.5, k, _noise(T, H, V, seed=5), rates, -0.1 * fading)


def _noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.few(7, family=("qwen3_next", "kimi_linear", "minimax", "jamba"))
@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("slice_tokens", [1, 2, 3, 63, 64, 65, 1000])
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_next", "kimi_linear", "bailing_hybrid", "lfm2_moe", "granitemoehybrid"),
        *("minimax", "lara_mini", "jamba"),
    ],
)
def test_prompts_may_be_cut_anywhere(
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Callable[..., Path],
    native: str,
    family: str,
    slice_tokens: int,
) -> None:
    monkeypatch.setenv(loader.SWITCH, native)
    folder = tiny_checkpoint(family)
    assert_as_transformers(
        Driver(folder), 5, prompts=oracle.prompts(lengths=(1, 2, 3, 100)), slice_tokens=slice_tokens
    )


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("slice_tokens", [1000, 130])
def test_channels_that_fade_by_all_they_are_stay_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native: str, slice_tokens: int
) -> None:
    """Over hundreds of tokens, in some heads by e^-100 each, in others by next to nothing."""
    monkeypatch.setenv(loader.SWITCH, native)
    folder = write_checkpoint(
        tmp_path, "kimi_linear", max_position_embeddings=1024, linear_num_heads=4
    )
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor += torch.tensor([-6.0, 0.0, 3.0, 5.0]).view(tensor.shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_long_prompts_are_answered_as_by_transformers(folder, slice_tokens)


def assert_long_prompts_are_answered_as_by_transformers(folder: Path, slice_tokens: int) -> None:
    limits = Limits(pass_tokens=1213, micro_batch_tokens=1213, context_tokens=703, gather_rows=64)
    prompts, driver = oracle.prompts(lengths=(600, 333)), Driver(folder, limits=limits)
    assert_as_transformers(driver, prompts=prompts, slice_tokens=slice_tokens)
