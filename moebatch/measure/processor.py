"""What computes at a level, measured as a whole: the same steps for a CPU and for a GPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from moebatch.checkpoint.model_files import COMPUTE_DTYPES
from moebatch.formats.weight_format import WeightFormat
from moebatch.layout.scratch import rows_decoded_at_once
from moebatch.measure.attention import AttentionRates, attention_rates, coded_rate
from moebatch.measure.between import between_passes
from moebatch.measure.contention import Patience
from moebatch.measure.elementwise import elementwise_bandwidth
from moebatch.measure.gemm import Points, decoding_points, expert_bytes, experts_in, gemm_curve
from moebatch.measure.launching import another_expert_s, launch_s, task_s
from moebatch.measure.sizes import Sizes
from moebatch.measure.timer import Allocate, Timer
from moebatch.model.products import Products
from moebatch.spec.machine.hardware import Dtype, Processor, RateCurve
from moebatch.spec.model.cache_layout import CacheDtype
from moebatch.units import format_flops, format_rate

Beside = Callable[[], AbstractContextManager[None]]
"""What goes on while something is measured."""
Log = Callable[[str], None]
"""Takes one line of text."""
T = TypeVar("T")
_SHARE_OF_MEMORY = 3
"""A measurement takes at most one part in so many of what is free."""


def processor_rates(
    sizes: Sizes,
    device: torch.device,
    *,
    free_bytes: int,
    allocate: Allocate,
    beside: Beside | None,
    patience: Patience,
    log: Log,
) -> Processor:
    """Measures reading, matrix products, attention and the rest, one after the other.

    Nothing of what `allocate` gives is kept. Attention and the rest are measured while `beside`
    is entered.
    """
    timer = Timer(device=device, budget_s=sizes.point_s)
    share = free_bytes // _SHARE_OF_MEMORY
    largest = max(expert_bytes(sizes.model, COMPUTE_DTYPES[dtype]) for dtype in sizes.dtypes)
    memory = allocate(max(min(sizes.buffer_bytes, share), largest))
    instruction_set = Products(device, torch.float32).instruction_set
    log(f"kernels: {instruction_set or 'none'}")
    bandwidth, gemm = _weights_rates(sizes, memory, timer, patience, log)
    decoding = {}
    if device.type == "cpu" and instruction_set:
        decoding = _decoding_rates(sizes, gemm, instruction_set, memory, timer, patience, log)
    between = patience.calmest(partial(between_passes, device, memory))
    log(
        f"between passes: {between.pass_s * 1e3:.1f} ms and {between.row_s * 1e6:.1f} µs a sequence"
    )
    del memory
    with beside() if beside else nullcontext():
        # Our own readers hold threads up as well, which is no reason to measure again.
        calmest = patience.calmest if beside is None else _once
        disturbed = replace(timer, beside_reading=beside is not None)
        attention, coded, elementwise = _tokens_rates(
            sizes, disturbed, share, allocate, calmest, log
        )
    task = patience.calmest(lambda: task_s(timer))
    launch = patience.calmest(lambda: launch_s(timer))
    another = patience.calmest(lambda: another_expert_s(timer, launch))
    log(
        f"{task * 1e6:.1f} µs to hand over a task, {another * 1e6:.1f} µs for one expert more, "
        f"{launch * 1e6:.1f} µs to launch an operator"
    )
    return Processor(
        bandwidth=bandwidth,
        gemm=gemm,
        attention_bandwidth=attention.decode.bandwidth,
        coded_attention=coded,
        attention_flops=attention.prompt_flops,
        sequence_s=attention.decode.sequence_s,
        elementwise_bandwidth=elementwise,
        decoding=decoding,
        launch_s=launch,
        task_s=task,
        another_expert_s=another,
        pass_s=between.pass_s,
        row_s=between.row_s,
        instruction_set=instruction_set,
    )


def _once(step: Callable[[], T]) -> T:
    return step()


def _tokens_rates(
    sizes: Sizes,
    timer: Timer,
    cache_bytes: int,
    allocate: Allocate,
    calmest: Callable[[Callable[[], Any]], Any],
    log: Log,
) -> tuple[AttentionRates, dict[CacheDtype, float], float]:
    """Of attention, of decoding by a cache in 8 bits, and of what norms, routing and sums move."""
    dtype = COMPUTE_DTYPES[sizes.attention_dtype]
    attention: AttentionRates = calmest(
        lambda: attention_rates(sizes, dtype, timer, cache_bytes=cache_bytes, allocate=allocate)
    )
    log(
        f"attention {sizes.attention_dtype}: {format_rate(attention.decode.bandwidth)} and "
        f"{attention.decode.sequence_s * 1e6:.1f} µs a sequence in decoding, "
        f"{format_flops(attention.prompt_flops)} in prompts"
    )
    coded: dict[CacheDtype, float] = {}
    for cached_in in sizes.cache_dtypes:
        measured = partial(coded_rate, sizes, dtype, cached_in, timer)
        coded[cached_in] = calmest(partial(measured, cache_bytes=cache_bytes, allocate=allocate))
        log(f"attention to a cache in {cached_in}: {format_rate(coded[cached_in])} in decoding")
    elementwise: float = calmest(lambda: elementwise_bandwidth(sizes, dtype, timer))
    log(f"norms, routing and sums: {format_rate(elementwise)}")
    return attention, coded, elementwise


def _weights_rates(
    sizes: Sizes, memory: Tensor, timer: Timer, patience: Patience, log: Log
) -> tuple[float, dict[Dtype, RateCurve]]:
    """Bandwidth of reading `memory`, and curves of experts that lie in it."""
    bandwidth = patience.calmest(lambda: read_bandwidth(memory, timer))
    log(f"memory: {format_rate(bandwidth)}")
    gemm = {}
    for dtype in sizes.dtypes:
        experts = experts_in(memory, sizes.model, COMPUTE_DTYPES[dtype])
        curve = patience.calmest(partial(curve_of, sizes, dtype, experts, timer))
        log(f"GEMM {dtype}: {curve_text(curve)}")
        gemm[dtype] = curve
        bandwidth = max(bandwidth, _weights_bandwidth(curve, dtype))
    return bandwidth, gemm


def _decoding_rates(
    sizes: Sizes,
    gemm: Mapping[Dtype, RateCurve],
    instruction_set: str,
    memory: Tensor,
    timer: Timer,
    patience: Patience,
    log: Log,
) -> dict[str, RateCurve]:
    """Of every format, by rows: plain numbers become float32, codes become numbers of the type that
    attention has."""
    usual = next(dtype for dtype in (sizes.attention_dtype, *gemm) if dtype in gemm)
    into: list[tuple[WeightFormat, Dtype]] = [
        (stored, "float32" if stored.is_tiled else usual) for stored in sizes.formats
    ]

    def points(stored: WeightFormat, dtype: Dtype) -> Points:
        decoded_rows = rows_decoded_at_once(stored, dtype, instruction_set)
        plain, computed = gemm[dtype].points, COMPUTE_DTYPES[dtype]
        return decoding_points(sizes.model, plain, computed, stored, decoded_rows, memory, timer)

    curves = {
        stored.measured_as: RateCurve(patience.calmest(partial(points, stored, dtype)))
        for stored, dtype in into
        if dtype in gemm and not stored.is_computed_in(dtype)
    }
    if curves:
        rates = ", ".join(f"{name} {format_rate(each.peak)}" for name, each in curves.items())
        log(f"weights decoded: {rates}")
    return curves


def curve_of(sizes: Sizes, dtype: Dtype, experts: Iterator[Tensor], timer: Timer) -> RateCurve:
    """FLOP/s by rows of the experts (uint8) that are given one by one."""
    points = gemm_curve(
        sizes.model,
        sizes.gemm_rows,
        COMPUTE_DTYPES[dtype],
        experts,
        timer,
        longest_s=sizes.longest_s,
    )
    return RateCurve(points=points)


def curve_text(curve: RateCurve) -> str:
    """``0.30 TFLOP/s at 16, … rows``."""
    rates = ", ".join(f"{format_flops(rate)} at {rows}" for rows, rate in curve.points)
    return f"{rates} rows"


def _weights_bandwidth(curve: RateCurve, dtype: Dtype) -> float:
    """Bytes of weights per second at the fewest rows: memory is at least as fast."""
    rows, flop_per_s = curve.points[0]
    return flop_per_s / (2 * rows) * COMPUTE_DTYPES[dtype].itemsize


def read_bandwidth(memory: Tensor, timer: Timer) -> float:
    """Bytes per second at which all threads add up `memory` (uint8, far larger than a cache)."""
    numbers = memory.view(torch.int64)  # no rounding, no NaN, and a sum that uses all threads
    return memory.nbytes / timer.seconds(numbers.sum)
