"""What computes at a level, measured as a whole: the same steps for a CPU and for a GPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moebatch.checkpoint.model_files import COMPUTE_DTYPES
from moebatch.formats.weight_format import WeightFormat
from moebatch.layout.scratch import rows_decoded_at_once
from moebatch.measure.attention import AttentionBench, AttentionRates, few_points
from moebatch.measure.between import between_passes
from moebatch.measure.contention import Patience
from moebatch.measure.elementwise import elementwise_bandwidth
from moebatch.measure.gemm import Points, decoding_points, expert_bytes, experts_in, gemm_curve
from moebatch.measure.launching import another_expert_s, launch_s, task_s
from moebatch.measure.sizes import Sizes
from moebatch.measure.timer import Allocate, CacheSweep, Timer
from moebatch.model.products import Products
from moebatch.spec.machine.hardware import Dtype, Processor, RateCurve
from moebatch.spec.model.cache_layout import CacheDtype, KvCache
from moebatch.units import format_flops, format_rate

Beside = Callable[[], AbstractContextManager[None]]
"""What goes on while something is measured."""
Log = Callable[[str], None]
"""Takes one line of text."""
T = TypeVar("T")
_SHARE_OF_MEMORY = 3
"""A measurement takes at most one part in so many of what is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorBench:
    """What computes at a level, and what it is measured with."""

    sizes: Sizes
    device: torch.device
    free_bytes: int
    allocate: Allocate
    """Nothing of what it gives is kept."""
    beside: Beside | None
    """Attention and what tokens go through beside it are measured while this is entered."""
    patience: Patience
    log: Log

    def rates(self) -> Processor:
        """Measures reading, matrix products, attention and the rest, one after the other."""
        sizes, timer, patience, log = self.sizes, self._timer, self.patience, self.log
        largest = max(expert_bytes(sizes.model, COMPUTE_DTYPES[dtype]) for dtype in sizes.dtypes)
        memory = self.allocate(max(min(sizes.buffer_bytes, self._share_bytes), largest))
        instruction_set = Products(self.device, torch.float32).instruction_set
        log(f"kernels: {instruction_set or 'none'}")
        bandwidth, gemm = self._weights_rates(memory)
        decoding = {}
        if self.device.type == "cpu" and instruction_set:
            decoding = self._decoding_rates(gemm, instruction_set, memory)
        between = patience.calmest(partial(between_passes, self.device, memory))
        log(
            f"between passes: {between.pass_s * 1e3:.1f} ms and {between.row_s * 1e6:.1f} µs a "
            "sequence"
        )
        task, launch = self._launching_s(memory)
        del memory
        with self.beside() if self.beside else nullcontext():
            attention, coded, elementwise = self._tokens_rates()
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

    def _launching_s(self, memory: Tensor) -> tuple[float, float]:
        """Of a task and of a launch. What a GPU computes sweeps no caches of the host."""
        sweep = CacheSweep(memory) if self.device.type == "cpu" else None
        calmest, timer = self.patience.calmest, self._timer
        return calmest(lambda: task_s(timer, sweep)), calmest(lambda: launch_s(timer, sweep))

    @property
    def _timer(self) -> Timer:
        return Timer(device=self.device, budget_s=self.sizes.point_s)

    @property
    def _share_bytes(self) -> int:
        return self.free_bytes // _SHARE_OF_MEMORY

    def _tokens_rates(self) -> tuple[AttentionRates, dict[CacheDtype, float], float]:
        """Of attention, of decoding by a cache in 8 bits, and of what norms, routing and sums
        move."""
        sizes, log, dtype = self.sizes, self.log, COMPUTE_DTYPES[self.sizes.attention_dtype]
        timer = replace(self._timer, beside_reading=self.beside is not None)
        # Our own readers hold threads up as well, which is no reason to measure again.
        calmest = self.patience.calmest if self.beside is None else _once

        def bench(sizes: Sizes, cached_in: KvCache) -> AttentionBench:
            return AttentionBench(sizes, dtype, timer, self._share_bytes, self.allocate, cached_in)

        def coded_rate(cached_in: CacheDtype) -> float:
            return bench(few_points(sizes), cached_in).decode_rates().bandwidth

        attention: AttentionRates = calmest(lambda: bench(sizes, "full").rates())
        log(
            f"attention {sizes.attention_dtype}: {format_rate(attention.decode.bandwidth)} and "
            f"{attention.decode.sequence_s * 1e6:.1f} µs a sequence in decoding, "
            f"{format_flops(attention.prompt_flops)} in prompts"
        )
        coded: dict[CacheDtype, float] = {}
        for cached_in in sizes.cache_dtypes:
            coded[cached_in] = calmest(partial(coded_rate, cached_in))
            log(f"attention to a cache in {cached_in}: {format_rate(coded[cached_in])} in decoding")
        elementwise: float = calmest(lambda: elementwise_bandwidth(sizes, dtype, timer))
        log(f"norms, routing and sums: {format_rate(elementwise)}")
        return attention, coded, elementwise

    def _weights_rates(self, memory: Tensor) -> tuple[float, dict[Dtype, RateCurve]]:
        """Bandwidth of reading `memory`, and curves of experts that lie in it."""
        sizes, timer = self.sizes, self._timer
        bandwidth = self.patience.calmest(lambda: read_bandwidth(memory, timer))
        self.log(f"memory: {format_rate(bandwidth)}")
        gemm = {}
        for dtype in sizes.dtypes:
            experts = experts_in(memory, sizes.model, COMPUTE_DTYPES[dtype])
            curve = self.patience.calmest(partial(curve_of, sizes, dtype, experts, timer))
            self.log(f"GEMM {dtype}: {curve_text(curve)}")
            gemm[dtype] = curve
            bandwidth = max(bandwidth, _weights_bandwidth(curve, dtype))
        return bandwidth, gemm

    def _decoding_rates(
        self, gemm: Mapping[Dtype, RateCurve], instruction_set: str, memory: Tensor
    ) -> dict[str, RateCurve]:
        """Of every format, by rows: plain numbers become float32, codes become numbers of the type
        that attention has."""
        sizes, timer = self.sizes, self._timer
        usual = next(dtype for dtype in (sizes.attention_dtype, *gemm) if dtype in gemm)
        into: list[tuple[WeightFormat, Dtype]] = [
            (stored, "float32" if stored.is_tiled else usual) for stored in sizes.formats
        ]

        def points(stored: WeightFormat, dtype: Dtype) -> Points:
            decoded_rows = rows_decoded_at_once(stored, dtype, instruction_set)
            plain, computed = gemm[dtype].points, COMPUTE_DTYPES[dtype]
            return decoding_points(
                sizes.model, plain, computed, stored, decoded_rows, memory, timer
            )

        curves = {
            stored.measured_as: RateCurve(self.patience.calmest(partial(points, stored, dtype)))
            for stored, dtype in into
            if dtype in gemm and not stored.is_computed_in(dtype)
        }
        if curves:
            rates = ", ".join(f"{name} {format_rate(each.peak)}" for name, each in curves.items())
            self.log(f"weights decoded: {rates}")
        return curves


def _once(step: Callable[[], T]) -> T:
    return step()


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
