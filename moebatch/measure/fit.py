"""From seconds of several sizes to rates: least squares on relative errors."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_LEAST_DETERMINANT = 1e-9
"""Below it samples are alike up to a factor, and two rates cannot be told apart."""

_LEAST_SHARE = 1e-5
"""Of the time of positions when sequences take none. Below it, other programs have disturbed the
samples so much that positions seem to take nothing, which is a rate without bounds."""


class DecodeSample(NamedTuple):
    """Seconds of one layer's decode attention, projections left out."""

    num_sequences: int
    positions: int
    """Positions that they see, all sequences together."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRates:
    """Seconds of decode attention per layer are ``sequences * sequence_s + bytes / bandwidth``."""

    sequence_s: float
    bandwidth: float
    """Bytes of keys and values per second."""


def decode_rates(samples: Iterable[DecodeSample], position_bytes: int) -> DecodeRates:
    """The rates that explain `samples` best, neither of them below nothing.

    Samples of one context only are explained by the bandwidth alone. `position_bytes` are the
    keys and values of one position in the layer.
    """
    # Divided by its seconds, a sample says: sequence_s * x + position_s * y = 1.
    rows = [(s.num_sequences / s.seconds, s.positions / s.seconds) for s in samples]
    assert rows, "a fit needs samples"
    x, y = sum(x for x, _ in rows), sum(y for _, y in rows)
    xx, xy, yy = (
        sum(x * x for x, _ in rows),
        sum(x * y for x, y in rows),
        sum(y * y for _, y in rows),
    )
    sequence_s, position_s = 0.0, y / yy
    determinant = xx * yy - xy * xy
    if determinant > _LEAST_DETERMINANT * xx * yy:
        both = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if both[0] >= 0 and both[1] > _LEAST_SHARE * position_s:
            sequence_s, position_s = both
    return DecodeRates(sequence_s=sequence_s, bandwidth=position_bytes / position_s)
