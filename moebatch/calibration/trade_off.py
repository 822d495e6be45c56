"""How much may be left out for a loss that somebody is ready to bear."""

from collections.abc import Callable

from moebatch.model.gating import GatingPoint

_SHARES = tuple(tenth / 10 for tenth in range(11))
_FINEST = 0.005
"""Shares are not told apart any finer."""


def trade_off(
    measure: Callable[[float], GatingPoint], *, wanted_loss: float
) -> tuple[tuple[GatingPoint, ...], GatingPoint]:
    """Points by ascending threshold, and the last of them before perplexity passes the exact one by
    more than `wanted_loss`, which is a share of it.

    `measure` says what the threshold does at which about such a share, 0..1, is left out of all
    choices that can be; with 0 it is exact.
    """
    points = {share: measure(share) for share in _SHARES}
    most = points[0.0].perplexity * (1 + wanted_loss)
    too_much = [share for share, point in points.items() if point.perplexity > most]
    bad = min(too_much, default=1.0)
    good = max(share for share in _SHARES if share < bad) if too_much else 1.0
    while too_much and bad - good > _FINEST:
        middle = (good + bad) / 2
        points[middle] = measure(middle)
        if points[middle].perplexity > most:
            bad = middle
        else:
            good = middle
    by_threshold = {point.threshold: point for point in points.values()}
    curve = tuple(by_threshold[threshold] for threshold in sorted(by_threshold))
    return curve, by_threshold[points[good].threshold]
