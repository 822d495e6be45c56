"""Quantities are read as people write them, and nonsense is refused with what is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.units import (
    count_of,
    format_bytes,
    format_duration,
    format_flops,
    format_number,
    format_rate,
    format_unlike,
    named_layers,
    parse_bytes,
    parse_duration,
    parse_flops,
    parse_rate,
)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("12GiB", 12 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("800MiB", 800 * 2**20),
        ("4096B", 4096),
        ("4194304", 2**22),
        (2**22, 2**22),
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


@pytest.mark.parametrize(
    ("text", "guess"), [(8, "8GiB"), ("8", "8GiB"), ("1.5", "1.5GiB"), (16384, "16384MiB")]
)
def test_a_number_of_few_bytes_has_lost_its_unit(text: str | int, guess: str) -> None:
    with pytest.raises(ValueError, match=f"{text} has no unit, .* did you mean {guess}\\?"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_what_is_shown_is_near_what_is_meant(num_bytes: int) -> None:
    shown = parse_bytes(format_bytes(num_bytes).replace(" ", ""))
    assert abs(shown - num_bytes) <= 0.006 * num_bytes


@given(st.integers(1, 2**60), st.integers(-(2**30), 2**30))
def test_sizes_that_differ_read_differently_in_a_message(one: int, by: int) -> None:
    other = max(1, one + by)
    shown = format_unlike(one, other)
    assert (shown[0] == shown[1]) == (one == other)


def test_sizes_that_differ_enough_are_shown_as_ever() -> None:
    assert format_unlike(3 * 2**30, 2**31) == ("3.00 GiB", "2.00 GiB")
    assert format_unlike(2872 * 2**20, 2870 * 2**20) == ("2.805 GiB", "2.803 GiB")


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (4e-5, "40us"),
        (0.0032, "3.2ms"),
        (0.032, "32ms"),
        (12.34, "12.3s"),
        (59.96, "1m00s"),
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


@pytest.mark.parametrize(
    "text, expected",
    [
        ("12.9 GB/s", 12.9e9),
        ("16GiB/s", 16 * 2.0**30),
        (" 15.75GB/s ", 15.75e9),
        ("800kB/s", 8e5),
        ("800KB/s", 8e5),
        ("3.35TB/s", 3.35e12),
        ("1B/s", 1.0),
    ],
)
def test_rates_are_read_exactly(text: str, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "25", 25, 25.0, None, True, "GB/s", "-1GB/s", "0GB/s", "0.0 GB/s", "nan GB/s"),
        *("inf GB/s", "1e3GB/s", "10Gb/s", "10gb/s", "10Gbit/s", "10GBps", "10GB", "65TFLOP/s"),
        *("1000001TB/s", "9" * 400 + "GB/s"),
    ],
)
def test_nonsense_is_no_rate(text: object) -> None:
    with pytest.raises(ValueError, match=r"expected a rate such as 12\.9GB/s.*, got "):
        parse_rate(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("65 TFLOP/s", 65e12),
        ("0.8TFLOP/s", 0.8e12),
        ("1.2PFLOP/s", 1.2e15),
        ("5GFLOP/s", 5e9),
        ("7FLOP/s", 7.0),
        ("3 MFLOP/s", 3e6),
    ],
)
def test_speeds_are_read_exactly(text: str, expected: float) -> None:
    assert parse_flops(text) == expected


@pytest.mark.parametrize(
    "text", ["", "65", 65e12, None, "0TFLOP/s", "-1TFLOP/s", "65TB/s", "65TFLOPS", "2000000PFLOP/s"]
)
def test_nonsense_is_no_speed(text: object) -> None:
    with pytest.raises(ValueError, match=r"expected a speed such as 65TFLOP/s.*, got "):
        parse_flops(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text, expected", [("45us", 45e-6), ("1.2 ms", 1.2e-3), ("3s", 3.0), ("20ns", 20e-9)]
)
def test_durations_are_read_exactly(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "45", 45, None, "0us", "-1s", "1h", "45 GB/s", "2000000000s"])
def test_nonsense_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match=r"expected a duration such as 45us.*, got "):
        parse_duration(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flops, expected",
    [
        (2.3e12, "2.30 TFLOP/s"),
        (65e12, "65.0 TFLOP/s"),
        (5e9, "5.00 GFLOP/s"),
        (9.996e9, "10.0 GFLOP/s"),
        (99.96e9, "100 GFLOP/s"),
        (999.6e9, "1.00 TFLOP/s"),
        (1.2e19, "12000 PFLOP/s"),
        (1e4, "0.01 MFLOP/s"),
    ],
)
def test_speeds_are_shown(flops: float, expected: str) -> None:
    assert format_flops(flops) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (143_412, "143,400"),
        (4201.5, "4,202"),
        (999.95, "1,000"),
        (258.34, "258.3"),
        (0.021_34, "0.02134"),
        (0.000_012_3, "0.0000123"),
        (20, "20"),
        (0, "0"),
        (float("nan"), "?"),
    ],
)
def test_numbers_have_four_figures_and_no_exponent(value: float, text: str) -> None:
    assert format_number(value) == text


def test_fewer_figures_have_no_exponent_either() -> None:
    assert [format_number(value, figures=3) for value in (57.76, 1234.5)] == ["57.8", "1,230"]


def test_one_is_not_several() -> None:
    assert [count_of(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert count_of(2, "pass", "passes") == "2 passes"


@pytest.mark.parametrize(
    "numbers, expected",
    [([3], "layer 3"), ([5, 0, 2, 3, 4, 3], "layers 0, 2 to 5"), ([1, 0], "layers 0 to 1")],
)
def test_neighbours_are_named_as_one(numbers: list[int], expected: str) -> None:
    assert named_layers(numbers) == expected
