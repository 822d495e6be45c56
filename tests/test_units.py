"""Quantities are read as people write them, and nonsense is refused with what is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.units import format_bytes, format_duration, format_rate, parse_bytes


@pytest.mark.parametrize(
    "text, expected",
    [
        ("12GiB", 12 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("800MiB", 800 * 2**20),
        ("4096", 4096),
        (4096, 4096),
        ("2.5gib", 5 * 2**29),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "12 GiBs", "-1GiB", "1e9", "nan", "inf", "12G", True, None, 1.5, "0GiB", 0]
)
def test_nonsense_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.integers(1, 2**50))
def test_what_is_shown_is_near_what_is_meant(num_bytes: int) -> None:
    shown = parse_bytes(format_bytes(num_bytes).replace(" ", ""))
    assert abs(shown - num_bytes) <= 0.006 * num_bytes


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0.0032, "3ms"),
        (12.34, "12.3s"),
        (247, "4m07s"),
        (3 * 3600 + 55 * 60, "3h55m"),
        (90000, "1d01h"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_bandwidths_are_decimal() -> None:
    assert format_rate(1.62e9) == "1.62 GB/s"
