"""Shares of whole things."""

ROUNDING = 1e-6
"""Half of eight layers is four, whatever floating point says."""


def whole(share: float, count: int) -> int:
    """As many whole things as a share of so many makes, rounded down."""
    return int(share * count + ROUNDING)
