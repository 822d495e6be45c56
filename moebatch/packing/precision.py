"""Which experts stay in eight bits where the mean may be a little more than four.

An expert that is chosen often, in a layer to which the loss is sensitive, whose weights four bits
hold badly, is worth its bytes most. What it saves is taken as

    gain(l, e) = popularity(l, e) * F(l) * |W4 - W|^2 / |W|^2

with popularity the share of the layer's choices that fall to the expert, and F the layer's Fisher
sum (AdapMoE, Eq. 6), the same for all layers where no calibration knows it: to second order the
loss grows by F times the squared error of what the layer's experts make, and that error is
proportional to the one of the weights. Eight bits leave a hundredth of it, which is not counted.

    maximise    sum gain(l, e) x(l, e)
    subject to  sum (bytes in int8 - bytes in int4) x(l, e) <= budget,  x binary

Beyond the papers.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import pulp

from moebatch.errors import StorageError
from moebatch.plan.search.milp import make_solver
from moebatch.schedule.slots.expert_load import ExpertKey

NARROW, WIDE = 4, 8
"""Bits."""
_CURVE = (4.25, 4.5, 5.0, 5.5, 6.0, 7.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TradeOffPoint:
    """What some bits for a weight in the mean are worth."""

    bits: float
    num_wide: int
    """Experts that are in eight bits then."""
    remaining: float
    """Of the gain of all experts, the share that is not had: 1 in four bits, 0 in eight."""


def choose_precisions(
    gains: Mapping[ExpertKey, float], bits: float
) -> tuple[frozenset[ExpertKey], list[TradeOffPoint]]:
    """Experts that stay wide, for so many bits in the mean, scales not counted; and what other
    numbers of bits would be worth. Experts are all of a size.

    Raises StorageError where the solver has no room for its files.
    """
    assert all(isfinite(gain) and gain >= 0 for gain in gains.values()), "gains are amounts"
    total = sum(gains.values()) or 1.0
    wide = {point: _knapsack(gains, point) for point in sorted({*_CURVE, bits})}
    curve = [TradeOffPoint(bits=NARROW, num_wide=0, remaining=1.0)]
    for point, chosen in wide.items():
        gain = sum(gains[key] for key in chosen)
        curve.append(TradeOffPoint(bits=point, num_wide=len(chosen), remaining=1 - gain / total))
    curve.append(TradeOffPoint(bits=WIDE, num_wide=len(gains), remaining=0.0))
    return wide[bits], curve


def _knapsack(gains: Mapping[ExpertKey, float], bits: float) -> frozenset[ExpertKey]:
    keys = sorted(gains)
    # Equal gains are told apart by number, so that the same experts are chosen everywhere.
    most = max(gains.values()) or 1.0
    values = _distinct([gains[key] / most for key in keys])
    program = pulp.LpProblem("precision", pulp.LpMaximize)
    chosen = [pulp.LpVariable(f"x_{number}", cat=pulp.LpBinary) for number in range(len(keys))]
    program += pulp.lpDot(values, chosen)
    room = (bits - NARROW) * len(keys)
    program += pulp.lpSum(chosen) * (WIDE - NARROW) <= room, "budget"
    try:
        program.solve(make_solver())
    except OSError as error:
        folder = tempfile.gettempdir()
        message = f"{folder}: the solver cannot write its files: {error.strerror}"
        raise StorageError(f"{message}; make room, or set TMPDIR to another folder") from error
    assert pulp.LpStatus[program.status] == "Optimal", "no expert wide is always possible"
    taken = zip(keys, chosen, strict=True)
    return frozenset(key for key, variable in taken if variable.value() > 0.5)


def _distinct(values: Sequence[float]) -> list[float]:
    return [value + 1e-9 * (1 - number / len(values)) for number, value in enumerate(values)]
