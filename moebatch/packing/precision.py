"""Which experts stay in eight bits where the mean may be a little more than four.

An expert that is chosen often, in a layer to which the loss is sensitive, whose weights four bits
hold badly, is worth its bytes most. What it saves is taken as

    gain(l, e) = popularity(l, e) * F(l) * |W4 - W|^2 / |W|^2

with popularity the share of the layer's choices that fall to the expert, and F the layer's Fisher
sum (AdapMoE, Eq. 6), the same for all layers where no calibration knows it: to second order the
loss grows by F times the squared error of what the layer's experts make, and that error is
proportional to the one of the weights. Eight bits leave a hundredth of it, which is not counted.

Experts are all of a size, so that those whose gain is largest are the best choice within a budget.
Beyond the papers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.policy.policy import whole

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
    numbers of bits would be worth. Of equal gains the first ones count."""
    assert all(isfinite(gain) and gain >= 0 for gain in gains.values()), "gains are amounts"
    total = sum(gains.values()) or 1.0
    best = sorted(gains, key=lambda key: (-gains[key], key))
    wide = {
        point: best[: whole((point - NARROW) / (WIDE - NARROW), len(best))]
        for point in sorted({*_CURVE, bits})
    }
    curve = [TradeOffPoint(bits=NARROW, num_wide=0, remaining=1.0)]
    for point, chosen in wide.items():
        gain = sum(gains[key] for key in chosen)
        curve.append(TradeOffPoint(bits=point, num_wide=len(chosen), remaining=1 - gain / total))
    curve.append(TradeOffPoint(bits=WIDE, num_wide=len(gains), remaining=0.0))
    return frozenset(wide[bits]), curve
