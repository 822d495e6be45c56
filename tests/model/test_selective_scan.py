"""The selective scan of Mamba-1: by compiled kernels, by torch and by Triton, what transformers
computes token by token, wherever sequences lie and however they are cut."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

from moebatch.model.gpu.scan_steps import take_scan_steps
from moebatch.model.native import loader
from moebatch.model.native.delta_rule import StateSpans
from moebatch.model.native.selective_scan import ScanInput
from moebatch.model.recurrence.plan import RecurrentPlan, StateSpan
from moebatch.model.recurrence.selective_scan import ScanRule
from moebatch.model.scratch import Scratch
from moebatch.spec.model.cache_layout import StateDtype
from moebatch.spec.model.recurrence import SelectiveScan
from tests.gpu_kernels import DEVICE, use_gpu_kernels
from tests.model import oracle
from tests.model.driver import Driver
from tests.model.test_oracle import assert_as_transformers
from tests.native import kernels

CPU = torch.device("cpu")
KERNELS = [*(["1"] if kernels() else []), "triton"]
SIZES = [(16, 64), (12, 300), (7, 33), (1, 1)]
"""Of keys, and how many channels there are."""
Run = Callable[[SelectiveScan, Sequence[StateSpan], ScanInput, Tensor], Tensor]


def scan(keys: int, channels: int, state_dtype: StateDtype = "float32") -> SelectiveScan:
    return SelectiveScan(
        key_head_dim=keys, value_head_dim=channels, rank=3, conv_width=4, state_dtype=state_dtype
    )


def given_of(keys: int, channels: int, num_tokens: int, seed: int = 1) -> ScanInput:
    """Among lengths of steps are such as nothing is left behind, and such as change nothing."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    lengths_TV = torch.nn.functional.softplus(3 * noise(num_tokens, channels))
    for length in (0.0, 1e-6, 40.0):
        lengths_TV[torch.rand(lengths_TV.shape, generator=generator) < 0.03] = length
    return ScanInput(
        q_TK=noise(num_tokens, keys),
        k_TK=noise(num_tokens, keys),
        v_TV=noise(num_tokens, channels),
        lengths_TV=lengths_TV,
        decays_KV=-noise(keys, channels).exp(),
    )


def spans_of(lengths: Sequence[int], num_before: int = 9) -> list[StateSpan]:
    """In rows that are neighbours, and rows that are not."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        StateSpan(start=start, num_tokens=length, row=2 * i - i // 3, num_before=num_before)
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def run(
    rule: SelectiveScan, spans: Sequence[StateSpan], given: ScanInput, matrices: Tensor
) -> Tensor:
    """What comes out, on a CPU; matrices are changed."""
    plan = RecurrentPlan.of(spans, rule, torch.float32, CPU)
    out, frame = torch.full_like(given.v_TV, 7), Scratch(10**6, device=CPU, dtype=torch.float32)
    ScanRule(rule, CPU).run(frame.frame(), plan, given, matrices, out)
    return out


def run_in_triton(
    rule: SelectiveScan, spans: Sequence[StateSpan], given: ScanInput, matrices: Tensor
) -> Tensor:
    table = [(span.row, span.start, span.num_tokens, span.num_before) for span in spans]
    moved, there = ScanInput(*(each.to(DEVICE) for each in given)), matrices.to(DEVICE)
    out = torch.full_like(moved.v_TV, 7)
    columns = torch.tensor(table, dtype=torch.int64, device=DEVICE).t().contiguous()
    take_scan_steps(StateSpans(*columns), moved, there, out)
    matrices.copy_(there)
    return out.cpu()


def by_transformers(given: ScanInput, span: StateSpan, matrix_KV: Tensor) -> tuple[Tensor, Tensor]:
    """What comes out of one sequence, [N, V], and its matrix."""
    state_1VK, outs = matrix_KV.t()[None].clone(), []
    for token in range(span.start, span.start + span.num_tokens):
        q_K, k_K, v_V, lengths_V = (each[token] for each in given[:4])
        update = (v_V[None], lengths_V[None], given.decays_KV.t(), k_K[None], q_K[None])
        outs.append(mamba_selective_state_update(state_1VK, *update))
    return torch.cat(outs), state_1VK[0].t()


@pytest.fixture(params=["0", *KERNELS])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """By compiled kernels, by torch, or by Triton."""
    if request.param == "triton":
        return run_in_triton
    monkeypatch.setenv(loader.SWITCH, request.param)
    return run


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 1, 20), (33, 16, 15, 17, 2, 3)])
def test_it_is_what_transformers_computes(
    taken: Run, sizes: tuple[int, int], lengths: tuple[int, ...]
) -> None:
    given, spans = given_of(*sizes, sum(lengths)), spans_of(lengths)
    matrices = torch.randn(2 * len(lengths) + 1, 1, *sizes)
    before = matrices.clone()
    out = taken(scan(*sizes), spans, given, matrices)
    for span in spans:
        tokens = slice(span.start, span.start + span.num_tokens)
        expected, matrix_KV = by_transformers(given, span, before[span.row, 0])
        torch.testing.assert_close(out[tokens], expected, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(matrices[span.row, 0], matrix_KV, rtol=1e-4, atol=2e-4)
    others = [row for row in range(len(before)) if row not in {span.row for span in spans}]
    assert torch.equal(matrices[others], before[others])


@pytest.mark.parametrize("sizes", SIZES[:3])
def test_states_in_float16_are_rounded_as_torch_rounds_them(
    taken: Run, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    """One step each, behind which torch rounds as well; too large ones become the largest."""
    spans = [StateSpan(start=i, num_tokens=1, row=i, num_before=10**i) for i in range(6)]
    given = given_of(*sizes, len(spans))
    begin = torch.randn(len(spans), 1, *sizes)
    begin[0], begin[1] = 9e4, 0
    states = [begin.clamp(-65504, 65504).half() for _ in "ot"]
    out = taken(scan(*sizes, "float16"), spans, given, states[0])
    monkeypatch.setenv(loader.SWITCH, "0")
    expected = run(scan(*sizes, "float16"), spans, given, states[1])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    assert (states[0] == states[1]).float().mean() > 0.99, "but where sums run otherwise"
    torch.testing.assert_close(states[0].float(), states[1].float(), rtol=2**-9, atol=1e-6)


@pytest.mark.parametrize("state_dtype", ["float32", "float16"])
@pytest.mark.parametrize("taken", KERNELS, indirect=True)
def test_kernels_keep_the_same_states_however_prompts_are_cut(
    taken: Run, state_dtype: StateDtype
) -> None:
    """torch rounds where prompts are cut, and sums up chunks."""
    sizes, found = (12, 40), []
    given = given_of(*sizes, 50)
    for cuts in ((50,), (1, 49), (20, 7, 23)):
        state = torch.ones(1, 1, *sizes, dtype=getattr(torch, state_dtype))
        outs, start = [], 0
        for num in cuts:
            span = StateSpan(start=0, num_tokens=num, row=0, num_before=3 + start)
            part = given.of_tokens(slice(start, start + num))
            outs.append(taken(scan(*sizes, state_dtype), [span], part, state))
            start += num
        found.append((state, torch.cat(outs)))
    for state, out in found[1:]:
        assert torch.equal(state, found[0][0]) and torch.equal(out, found[0][1])


def test_what_fades_by_less_than_a_step_of_float16_fades_all_the_same(taken: Run) -> None:
    """Rounded to the nearest, such numbers would stay as they are."""
    sizes, num_steps = (16, 64), 500
    given = ScanInput(*(torch.zeros_like(each) for each in given_of(*sizes, num_steps)))
    given.lengths_TV.fill_(1.0)
    given.decays_KV.fill_(-1e-4)
    state = torch.randn(1, 1, *sizes, generator=torch.Generator().manual_seed(1)).half()
    expected = state.double() * math.exp(-1e-4 * num_steps)
    assert torch.equal((state.float() * math.exp(-1e-4)).half(), state)
    for step in range(num_steps):
        span = StateSpan(start=0, num_tokens=1, row=0, num_before=step)
        taken(scan(*sizes, "float16"), [span], given.of_tokens(slice(step, step + 1)), state)
    torch.testing.assert_close(state.double(), expected, rtol=0.01, atol=1e-5)
    left = (state.double() * expected).sum() / expected.square().sum()
    assert left == pytest.approx(1, abs=1e-3)


def test_a_gpu_scans_slices_of_prompts_beside_tokens_of_answers(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    """In one launch for all sequences of a layer, and no operator of torch."""
    monkeypatch.setenv(loader.SWITCH, "0")
    monkeypatch.setattr(ScanRule, "_take_chunk", None)
    monkeypatch.setattr(ScanRule, "_step", None)
    launched = use_gpu_kernels(monkeypatch)
    folder = tiny_checkpoint("jamba")
    model = oracle.load(folder)
    prompts = oracle.prompts(lengths=(1, 5, 12))
    assert_as_transformers(
        Driver(folder), 3, model=model, prompts=prompts, slice_tokens=4, stagger=1
    )
    assert launched["scan_steps"] > 0
