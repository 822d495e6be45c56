"""The parts of a measurement do the work that they count."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from moebatch.formats.registry import measured_formats
from moebatch.measure import gemm, processor
from moebatch.measure.attention import AttentionBench, nothing_to_attend
from moebatch.measure.contention import Patience
from moebatch.measure.elementwise import elementwise_bandwidth
from moebatch.measure.gemm import Points, experts_in, gemm_curve
from moebatch.measure.gpu import gpu_rates, supported
from moebatch.measure.launching import another_expert_s, launch_s, task_s
from moebatch.measure.processor import read_bandwidth
from moebatch.measure.sizes import Sizes, gpu_sizes
from moebatch.measure.timer import CacheSweep, Timer
from moebatch.spec.machine.hardware import Dtype, RateCurve
from moebatch.store.memory import Arena
from tests.measure.sizes import TINY

TIMER = Timer(device=torch.device("cpu"), budget_s=0.0, least_repeats=1)


def allocate(num_bytes: int) -> torch.Tensor:
    return Arena(num_bytes).bytes


def test_handing_over_and_launching_take_some_time() -> None:
    for sweep in (None, CacheSweep(torch.zeros(2**16, dtype=torch.uint8))):
        assert 0 < task_s(TIMER, sweep) < 1
        with torch.inference_mode():
            assert 0 < launch_s(TIMER, sweep) < 1
    assert 0 <= another_expert_s(TIMER, 0.0) < 1


def test_one_expert_more_takes_the_driver_and_the_decoder_but_no_launch() -> None:
    """Of passes of four layers, and of one call, with one expert and with sixteen."""
    driver_s, decoder_s, launched_s = 3e-6, 5e-6, 2e-6
    launches_s = 15 * 11 * launched_s
    rounds = iter([(1.0, 1.0 + 4 * 15 * driver_s), (2.0, 2.0 + 15 * decoder_s + launches_s)] * 2)

    class Known(Timer):
        def seconds_of_each(self, *calls: object, **_: object) -> tuple[float, ...]:
            assert len(calls) == 2
            return next(rounds)

    timer = Known(device=TIMER.device, budget_s=0.0)
    assert another_expert_s(timer, launched_s) == pytest.approx(driver_s + decoder_s)
    assert another_expert_s(timer, 2 * launched_s) == pytest.approx(driver_s), (
        "never less than none"
    )


def curve(rows: tuple[int, ...], longest_s: float) -> list[int]:
    experts = experts_in(Arena(2**18).bytes, TINY.model, torch.float32)
    points = gemm_curve(TINY.model, rows, torch.float32, experts, TIMER, longest_s=longest_s)
    assert all(rate > 0 for _, rate in points)
    return [rows for rows, _ in points]


def test_a_curve_has_a_point_for_every_number_of_rows() -> None:
    assert curve((24, 1, 8), longest_s=60.0) == [1, 8, 24]


def test_points_that_take_too_long_are_left_out_but_never_the_first() -> None:
    assert curve((1, 8, 24), longest_s=0.0) == [1]


def test_a_rate_that_falls_with_the_rows_is_measured_again() -> None:
    seconds = iter([1.0, 8.0, 4.0, 12.0, 9.0])

    class Disturbed(Timer):
        def seconds(self, *_: object, **__: object) -> float:
            return next(seconds)

    timer = Disturbed(device=TIMER.device, budget_s=0.0)
    experts = experts_in(Arena(2**18).bytes, TINY.model, torch.float32)
    points = gemm_curve(TINY.model, (1, 4, 8), torch.float32, experts, timer, longest_s=60.0)
    rates = {rows: rate / points[0][1] for rows, rate in points}
    assert rates == pytest.approx({1: 1.0, 4: 1.0, 8: 8 / 9})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_can_be_measured(dtype: torch.dtype) -> None:
    rates = AttentionBench(TINY, dtype, TIMER, 2**20, allocate).rates()
    assert rates.decode.bandwidth > 0
    assert rates.prompt_flops > 0
    assert elementwise_bandwidth(TINY, dtype, TIMER) > 0


def test_memory_is_read() -> None:
    assert read_bandwidth(torch.zeros(2**16, dtype=torch.uint8), TIMER) > 0


def test_memory_is_as_fast_as_weights_are_read_from_it_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curves: dict[Dtype, RateCurve] = {
        "bfloat16": RateCurve(points=((2, 80.0), (8, 4000.0))),  # 20 numbers of a weight a second
        "float32": RateCurve(points=((2, 60.0), (8, 9000.0))),
    }
    monkeypatch.setattr(processor, "curve_of", lambda _, dtype, *__: curves[dtype])
    bench = processor.ProcessorBench(
        sizes=replace(TINY, dtypes=tuple(curves)),
        device=TIMER.device,
        free_bytes=0,
        allocate=allocate,
        beside=None,
        patience=Patience(1, 0.0),
        log=lambda line: None,
    )
    for found, expected in ((50.0, 60.0), (70.0, 70.0)):
        monkeypatch.setattr(processor, "read_bandwidth", lambda *_, found=found: found)
        assert bench._weights_rates(Arena(2**18).bytes) == (expected, curves)


PLAIN = ((1, 50.0), (100, 400.0), (128, 200.0), (512, 300.0))
"""FLOP/s, by rows, of an expert whose weights need no decoding."""
EXPERT_FLOP = 2 * 3 * TINY.model.hidden_size * TINY.model.expert_width


def decoded(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], decoded_rows: int
) -> dict[int, float]:
    """Points of decoding, in experts a second, where one takes so long for so many rows."""
    (stored, *_) = measured_formats()
    size = gemm._expert_parts_bytes(TINY.model, stored)

    def curve(_: object, counts: Sequence[int], *__: object, **___: object) -> Points:
        return tuple((rows, rows * EXPERT_FLOP / seconds[rows]) for rows in counts)

    monkeypatch.setattr(gemm, "gemm_curve", curve)
    points = gemm.decoding_points(
        TINY.model, PLAIN, torch.float32, stored, decoded_rows, Arena(4 * size).bytes, TIMER
    )
    return {rows: rate / size for rows, rate in points}


def test_decoding_takes_what_is_beyond_arithmetic_at_its_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arithmetic_s = EXPERT_FLOP / 400
    seconds = {1: arithmetic_s + 200, 5: 5 * arithmetic_s + 400}
    found = decoded(monkeypatch, seconds, decoded_rows=4)
    assert found == pytest.approx({1: 1 / 200, 5: 2 / 400}), "five rows decode twice"


def test_the_least_that_decoding_takes_is_a_hundredth_of_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arithmetic_s = EXPERT_FLOP / 400
    found = decoded(monkeypatch, {1: arithmetic_s, 5: arithmetic_s}, decoded_rows=5)
    assert found == pytest.approx({1: 100 / arithmetic_s, 5: 20 / arithmetic_s})


def test_where_a_whole_matrix_is_decoded_the_rate_of_many_rows_is_that_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {128: 128 * EXPERT_FLOP / 200 + 500}
    assert decoded(monkeypatch, seconds, decoded_rows=10**6) == pytest.approx({1: 1 / 500})


def test_pages_of_sequences_are_their_own_and_scattered() -> None:
    bench = AttentionBench(TINY, torch.float32, TIMER, 2**20, allocate)
    rows = [bench._span(i, 1, 40, 3 * i).rows_S for i in range(5)]
    assert len(set(np.concatenate(rows).tolist())) == 5 * 41
    assert any((np.diff(span) != 1).any() for span in rows)


def test_work_is_counted_in_positions_that_are_seen() -> None:
    bench = AttentionBench(TINY, torch.float32, TIMER, 2**20, allocate)
    sample = bench.decode(5, 40)
    assert (sample.num_sequences, sample.positions) == (5, 5 * 41)
    assert bench.prompt(3, 10)[0] == 11 + 12 + 13


def test_a_small_cache_makes_smaller_batches() -> None:
    bench = AttentionBench(TINY, torch.float32, TIMER, 1, allocate)
    assert bench.decode(5, 40).num_sequences == 1
    assert bench.prompt(20, 30)[0] > 0


def test_attending_to_nothing_still_writes_new_keys() -> None:
    bench = AttentionBench(TINY, torch.float32, TIMER, 2**20, allocate)
    span = bench._span(0, 1, 40, 0)
    x_TD = bench.layer.hidden_states(1)
    before = x_TD.clone()
    bench._attend(x_TD, nothing_to_attend(bench.layer.decoder.planner.plan([span])))
    assert bench.keys_RGC[span.rows_S[-1]].abs().sum() > 0
    assert bench.keys_RGC[span.rows_S[:-1]].abs().sum() == 0
    assert torch.equal(x_TD, before), "the layer may be applied for ever"


# --- GPUs -------------------------------------------------------------------------------------


def test_a_gpu_without_bfloat16_is_measured_in_float16() -> None:
    sizes = supported(Sizes(), has_bfloat16=False)
    assert sizes.dtypes == ("float16", "float32")
    assert sizes.attention_dtype == "float16"
    assert supported(Sizes(), has_bfloat16=True) == Sizes()


def test_a_gpu_gets_more_rows_and_no_float32_unless_nothing_else_is_wanted() -> None:
    assert gpu_sizes(Sizes()).gemm_rows[-1] > Sizes().gemm_rows[-1]
    assert gpu_sizes(Sizes()).dtypes == ("bfloat16", "float16")
    assert gpu_sizes(replace(Sizes(), dtypes=("float32",))).dtypes == ("float32",)


@pytest.mark.gpu
def test_a_gpu_and_its_links_are_measured() -> None:
    lines: list[str] = []
    rates = gpu_rates(TINY, Patience(1, 0.0), lines.append)
    assert rates is not None
    assert min(rates.upload, rates.download, rates.staging, rates.free_bytes) > 0
    assert any(line.startswith("dram->vram: ") for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_nothing_said() -> None:
    lines: list[str] = []
    assert gpu_rates(TINY, Patience(1, 0.0), lines.append) is None
    assert lines == []
