"""What states in float16 cost: how far what a matrix puts out is off after some thousand tokens,
beside the same rule in float64.

    python -m tests.benchmarks.half_states

States as moebatch keeps them, and ones that are rounded to the nearest float16 or bfloat16. Numbers
are random: each token has a key, a value and a query; `writes` says how much of them learn, each by
a rate from 0 to 1, where the others learn by a thousandth of that.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.recurrence.delta_rule import DeltaRule
from moebatch.model.recurrence.plan import RecurrentPlan, StateSpan
from moebatch.model.scratch import Scratch
from moebatch.spec.model.cache_layout import StateDtype
from moebatch.spec.model.recurrence import GatedDelta

_HEADS, _SIZE, _TOKENS, _LAST = 4, 64, 4000, 1000
_FADING = (0.9, 0.99, 0.999, 0.9999)
_WRITES = {"all": 1, "one of 50": 50}
Kept = Callable[[Tensor], Tensor]


def main() -> None:
    ways: dict[str, Kept] = {
        "nearest float16": lambda state: state.half().float(),
        "nearest bfloat16": lambda state: state.bfloat16().float(),
    }
    print("| left of a state after a token | tokens that write | float32 | `float16` | ", end="")
    print(" | ".join(ways), "|")
    print("| --- " * (4 + len(ways)) + "|")
    for left in _FADING:
        for name, every in _WRITES.items():
            given = _given(left, every)
            exact = _stepwise(given, lambda state: state, torch.float64)
            outs = [_ours(given, "float32"), _ours(given, "float16")]
            outs += [_stepwise(given, kept, torch.float32) for kept in ways.values()]
            errors = (float((out - exact).norm() / exact.norm()) for out in outs)
            cells = " | ".join(f"{error:.2g}" for error in errors)
            print(f"| {left} | {name} | {cells} |", flush=True)


def _given(left: float, every: int) -> DeltaInput:
    torch.manual_seed(0)
    q, k = (
        torch.nn.functional.normalize(torch.randn(_TOKENS, _HEADS, _SIZE), dim=-1) for _ in "qk"
    )
    rates = torch.rand(_TOKENS, _HEADS)
    rates[torch.arange(_TOKENS) % every != 0] *= 1e-3
    fading = torch.full((_TOKENS, _HEADS, 1), left).log()
    return DeltaInput(q, k, torch.randn(_TOKENS, _HEADS, _SIZE), rates, fading)


def _ours(given: DeltaInput, state_dtype: StateDtype) -> Tensor:
    delta = GatedDelta(
        num_key_heads=_HEADS,
        num_value_heads=_HEADS,
        key_head_dim=_SIZE,
        value_head_dim=_SIZE,
        conv_width=4,
        state_dtype=state_dtype,
    )
    cpu, out = torch.device("cpu"), torch.empty_like(given.v_THV)
    state = torch.zeros(1, _HEADS, _SIZE, _SIZE, dtype=getattr(torch, state_dtype))
    rule = DeltaRule(delta, cpu)
    scratch = Scratch(10**6, device=cpu, dtype=torch.float32)
    for token in range(_TOKENS):
        span = StateSpan(start=0, num_tokens=1, row=0, num_before=token)
        plan = RecurrentPlan.of([span], delta, torch.float32, cpu)
        one = DeltaInput(*(each[token : token + 1] for each in given))
        rule.run(scratch.frame(), plan, one, state, out[token : token + 1])
    return out[-_LAST:].double()


def _stepwise(given: DeltaInput, kept: Kept, dtype: torch.dtype) -> Tensor:
    """By torch, with a state that is rounded behind each token."""
    state = torch.zeros(_HEADS, _SIZE, _SIZE, dtype=dtype)
    out = []
    for token in range(_TOKENS):
        q, k, v, rates, fading = (each[token].to(dtype) for each in given)
        state *= fading.exp()[..., None]
        found = (k[:, None] @ state)[:, 0]
        state += k[..., None] * ((v - found) * rates[:, None])[:, None]
        out.append((q[:, None] @ state)[:, 0])
        state = kept(state)
    return torch.stack(out[-_LAST:]).double()


if __name__ == "__main__":
    main()
