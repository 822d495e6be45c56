"""The gated delta rule and its convolution: by compiled kernels and by torch, what transformers
computes; and tokens that do not depend on how prompts are cut."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from moebatch.model.native import loader
from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.recurrence.delta_plan import DeltaPlan, StateSpan
from moebatch.model.recurrence.delta_rule import DeltaRule
from moebatch.model.scratch import Scratch
from tests.model import oracle
from tests.model.driver import Driver
from tests.model.test_oracle import assert_same
from tests.native import kernels

CPU = torch.device("cpu")
WAYS = ["1", "0"] if kernels() else ["0"]


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("heads", [(2, 2, 16, 16), (2, 4, 24, 40), (1, 3, 7, 33)])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 1, 70), (130, 64, 63, 65, 2, 3, 17)])
def test_the_rule_is_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
    native: str,
    heads: tuple[int, int, int, int],
    lengths: tuple[int, ...],
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
    rates, fading = noise(T, H).sigmoid(), -3 * noise(T, H).sigmoid()
    spans, start = [], 0
    for row, num_tokens in zip(rows, lengths, strict=True):
        spans.append(StateSpan(start=start, num_tokens=num_tokens, row=row, begins=False))
        start += num_tokens
    given = DeltaInput(_unit(q) * K**-0.5, _unit(k), v, rates, fading)
    before, out = matrices.clone(), torch.empty(T, H, V)
    plan = DeltaPlan.of(spans, torch.float32, CPU)
    frame = Scratch(10**6, device=CPU, dtype=torch.float32).frame()
    DeltaRule(CPU).run(frame, plan, given, matrices, out)
    for span in spans:
        tokens = slice(span.start, span.start + span.num_tokens)
        expected, matrix = torch_recurrent_gated_delta_rule(
            *(x[None, tokens] for x in (q, k, v, fading, rates)),
            initial_state=before[span.row][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[tokens], expected[0], rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(matrices[span.row], matrix[0], rtol=1e-4, atol=2e-4)
    others = [row for row in range(len(before)) if row not in rows]
    assert torch.equal(matrices[others], before[others])


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.few(7)
@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("slice_tokens", [1, 2, 3, 63, 64, 65, 1000])
def test_prompts_may_be_cut_anywhere(
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Callable[..., Path],
    native: str,
    slice_tokens: int,
) -> None:
    monkeypatch.setenv(loader.SWITCH, native)
    folder = tiny_checkpoint("qwen3_next")
    model = oracle.load(folder)
    for seq in Driver(folder).generate(
        oracle.prompts(lengths=(1, 2, 3, 100)), 5, slice_tokens=slice_tokens
    ):
        assert_same(seq, *oracle.greedy(model, seq.prompt, 5))
