"""What the machine gives in these minutes: the disk as jobs read it, and matrix products."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import harmonic_mean

import torch
from torch import Tensor
from torch.nn.functional import linear

from moebatch.measure.disk import read_rates
from moebatch.measure.sizes import DiskSizes
from moebatch.model.products import Products

Product = Callable[[Tensor, Tensor], Tensor]
_ROWS, _HIDDEN, _WIDTH = 1024, 2048, 7168
_MATRICES = 4
"""More than any cache holds."""
_GEMM_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Rates of one moment."""

    disk_rate: float
    """Bytes per second past the page cache, through the store's own readers."""
    gemm_rate: float
    """FLOP/s of products of 1,024 rows with matrices of 2,048 x 7,168: the best of torch's in
    bfloat16 and in float32, and of our own."""

    def with_disk_of(self, rate: float) -> "Probe":
        """The same if the disk has given more in between than when it was probed."""
        return replace(self, disk_rate=max(self.disk_rate, rate))


def probe(files: Sequence[Path], *, read_s: float) -> Probe:
    """Reads the files for so long, then computes for a while."""
    rates = read_rates(files, DiskSizes(read_s=read_s))
    return Probe(disk_rate=rates.mean, gemm_rate=_gemm_rate())


def between(before: Probe, after: Probe) -> Probe:
    """The rate over both times: each weighs by how long its bytes took."""
    return Probe(
        disk_rate=harmonic_mean([before.disk_rate, after.disk_rate]),
        gemm_rate=harmonic_mean([before.gemm_rate, after.gemm_rate]),
    )


def _gemm_rate() -> float:
    own = Products(torch.device("cpu"), torch.bfloat16)
    out = torch.empty(_ROWS, _WIDTH, dtype=torch.bfloat16)
    ways: dict[torch.dtype, list[Product]] = {
        torch.bfloat16: [linear, lambda rows, weight: own.linear(rows, weight, None, out)],
        torch.float32: [linear],
    }
    with torch.inference_mode():
        return max(_rate_of(way, dtype) for dtype, some in ways.items() for way in some)


def _rate_of(multiply: Product, dtype: torch.dtype) -> float:
    rows = torch.randn(_ROWS, _HIDDEN).to(dtype)
    weights = [torch.randn(_WIDTH, _HIDDEN).to(dtype) for _ in range(_MATRICES)]
    multiply(rows, weights[0])
    best, end = 0.0, time.perf_counter() + _GEMM_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        for weight in weights:
            multiply(rows, weight)
        seconds = time.perf_counter() - start
        best = max(best, _MATRICES * 2 * _ROWS * _HIDDEN * _WIDTH / seconds)
    return best
