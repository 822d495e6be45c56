"""The fit finds the rates from which timings were made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.measure.attention import DecodeSample, decode_rates

POSITION_BYTES = 2048
GRID = [(n, context) for n in (64, 256) for context in (16, 64, 256, 1024)]


def samples(
    sequence_s: float, bandwidth: float, noise: list[float] | None = None
) -> list[DecodeSample]:
    return [
        DecodeSample(
            n,
            n * context,
            (n * sequence_s + n * context * POSITION_BYTES / bandwidth) * factor,
        )
        for (n, context), factor in zip(GRID, noise or [1.0] * len(GRID), strict=True)
    ]


def predicted(timings: list[DecodeSample]) -> list[float]:
    rates = decode_rates(timings, POSITION_BYTES)
    return [
        s.num_sequences * rates.sequence_s + s.positions * POSITION_BYTES / rates.bandwidth
        for s in timings
    ]


@given(sequence_s=st.floats(1e-7, 1e-3), bandwidth=st.floats(1e9, 1e13))
def test_timings_that_follow_the_rates_are_explained(sequence_s: float, bandwidth: float) -> None:
    timings = samples(sequence_s, bandwidth)
    assert predicted(timings) == pytest.approx([s.seconds for s in timings], rel=1e-6)


@given(sequence_s=st.floats(1e-6, 1e-5), bandwidth=st.floats(3e9, 3e10))
def test_both_rates_are_found(sequence_s: float, bandwidth: float) -> None:
    rates = decode_rates(samples(sequence_s, bandwidth), POSITION_BYTES)
    assert rates.sequence_s == pytest.approx(sequence_s, rel=1e-4)
    assert rates.bandwidth == pytest.approx(bandwidth, rel=1e-4)


@given(
    noise=st.lists(st.floats(0.9, 1.1), min_size=len(GRID), max_size=len(GRID)),
    bandwidth=st.floats(1e9, 1e12),
)
def test_noise_of_a_tenth_moves_no_prediction_by_a_third(
    noise: list[float], bandwidth: float
) -> None:
    timings = samples(5e-6, bandwidth, noise)
    assert predicted(timings) == pytest.approx([s.seconds for s in timings], rel=0.33)


@pytest.mark.parametrize("position_s", [1e-12, 1e-16, 1e-20])
def test_however_little_time_positions_seem_to_take_their_rate_has_bounds(
    position_s: float,
) -> None:
    timings = [DecodeSample(n, n * c, n * 1e-3 + n * c * position_s) for n, c in GRID]
    fastest = max(POSITION_BYTES * sample.positions / sample.seconds for sample in timings)
    assert decode_rates(timings, POSITION_BYTES).bandwidth <= 1e5 * fastest


@given(
    seconds=st.lists(st.floats(1e-6, 1.0), min_size=len(GRID), max_size=len(GRID)),
)
def test_rates_are_never_negative(seconds: list[float]) -> None:
    noise = [DecodeSample(n, n * c, s) for (n, c), s in zip(GRID, seconds, strict=True)]
    rates = decode_rates(noise, POSITION_BYTES)
    assert rates.sequence_s >= 0
    assert rates.bandwidth > 0


@given(st.floats(1e-9, 1e-3))
def test_one_context_alone_gives_the_bandwidth_alone(position_s: float) -> None:
    one = [DecodeSample(n, n * 100, n * 100 * position_s) for n in (64, 256)]
    rates = decode_rates(one, POSITION_BYTES)
    assert rates.sequence_s == 0
    assert rates.bandwidth == pytest.approx(POSITION_BYTES / position_s)
