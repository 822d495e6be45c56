"""A machine in figures: levels of memory with their processors, and links between them.

Planning works on these; where they come from (a profile file, a measurement, a data sheet) is the
business of `spec/machine/profile.py`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from moebatch.formats.weight_format import WeightFormat
from moebatch.spec.model.cache_layout import CacheDtype

LevelName = Literal["vram", "dram", "disk"]
DeviceKind = Literal["cpu", "cuda", "emulate"]
"""Where a run computes: in main memory, on a GPU, or on one that main memory stands in for."""
LEVELS: tuple[LevelName, ...] = get_args(LevelName)
LinkName = Literal["disk->dram", "dram->disk", "dram->vram", "vram->dram"]
LINKS: tuple[LinkName, ...] = get_args(LinkName)
GPU_LINKS: tuple[LinkName, ...] = ("dram->vram", "vram->dram")
Basis = Literal["achieved", "peak", "paper"]
"""Which figures of a profile are meant: measured ones, those of data sheets, MoE-Lightning's."""
Dtype = Literal["float32", "bfloat16", "float16"]
CONTEXT_BYTES = 2**28
"""Of a GPU that are gone before it says how much of it is free: the context of this process, which
plans count as a part of the program. An estimate: 0.1 GiB on a T4, 0.5 GiB on an H100."""
_NEAREST: Mapping[Dtype, tuple[Dtype, ...]] = {
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "float32": ("float32", "bfloat16", "float16"),
}
"""Itself first, then those whose rates are most like its own."""


@dataclass(frozen=True, slots=True)
class RateCurve:
    """A rate by the number of rows of a matrix product whose weights are read from memory: FLOP/s,
    or bytes per second of stored weights that are decoded."""

    points: tuple[tuple[int, float], ...]
    """(rows, rate), ascending in rows."""

    def at(self, rows: float) -> float:
        """The rate at `rows`: between points by the logarithms, below the first one in proportion
        to the rows (reading the weights takes all the time), above the last one as there."""
        above = bisect_left(self.points, (rows, 0.0))
        if above == len(self.points):
            return self.points[-1][1]
        high, high_rate = self.points[above]
        if not above:
            return high_rate * rows / high
        low, low_rate = self.points[above - 1]
        share = math.log(rows / low) / math.log(high / low)
        return math.exp(math.log(low_rate) * (1 - share) + math.log(high_rate) * share)

    def scaled(self, factor: float) -> "RateCurve":
        """The same curve, higher or lower everywhere."""
        return RateCurve(tuple((rows, rate * factor) for rows, rate in self.points))

    @property
    def peak(self) -> float:
        return max(rate for _, rate in self.points)


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """What computes at a level: all of its devices together."""

    gemm: Mapping[Dtype, RateCurve]
    """By data type; at least one."""
    gemm_streamed: Mapping[Dtype, RateCurve] = field(default_factory=dict)
    """The same for experts that have just arrived from the level below; where a data type is
    missing, as ``gemm``."""
    bandwidth: float
    """Bytes per second read from the level's memory by matrix products."""
    attention_bandwidth: float
    """Bytes of keys and values per second that decode attention goes through."""
    coded_attention: Mapping[CacheDtype, float] = field(default_factory=dict)
    """The same of those that are cached in 8 bits; of others as many."""
    attention_flops: float
    """FLOP/s of attention among the tokens of a prompt."""
    elementwise_bandwidth: float
    """Bytes per second of norms, gathering and adding."""
    sequence_s: float = 0.0
    """Fixed seconds of decode attention per sequence and layer."""
    decoding: Mapping[str, RateCurve] = field(default_factory=dict)
    """Bytes per second of stored weights that become numbers to be multiplied, by the name of their
    format; of others as many as are read."""
    launch_s: float = 0.0
    """Seconds of a launch: of a kernel, or of a copy to or from the level, its work left out."""
    task_s: float = 0.0
    """Seconds that the engine takes to hand a task to its lane and to note its end."""
    another_expert_s: float = 0.0
    """Seconds that it takes for each expert of a task after the first: its slot, its tokens, and
    where its matrices lie."""
    pass_s: float = 0.0
    """Seconds between a pass and the next, in which nothing is computed: tokens are chosen, and
    what is attended to is worked out."""
    row_s: float = 0.0
    """The same for each sequence whose next token is chosen."""
    instruction_set: str = ""
    """What the kernels of a CPU use; empty where none are known of."""

    @property
    def without_host(self) -> "Processor":
        """The same, where nobody waits for the host."""
        return replace(self, launch_s=0.0, task_s=0.0, another_expert_s=0.0, pass_s=0.0, row_s=0.0)

    def attention_rate(self, cached_in: CacheDtype | None) -> float:
        """Bytes of keys and values per second, as they are cached."""
        if cached_in is None:
            return self.attention_bandwidth
        return self.coded_attention.get(cached_in, self.attention_bandwidth)

    def decoding_rate(self, stored: WeightFormat, rows: float = math.inf) -> float:
        """Bytes per second of a format that become numbers to be multiplied by so many rows; of
        fewer than were measured as many as of those."""
        seconds = 0.0
        for each, share in stored.shares:
            rate, curve = self.bandwidth, self.decoding.get(each.measured_as)
            if curve is not None:
                (fewest, _), *_ = curve.points
                rate = curve.at(max(fewest, rows))
            seconds += share / rate
        return 1 / seconds

    def gemm_for(self, dtype: Dtype, *, streamed: bool = False) -> RateCurve:
        """The curve of `dtype`; where it has none, of the nearest that the processor can do."""
        name = dtype
        if name not in self.gemm:
            name = next(name for name in _NEAREST[dtype] if name in self.gemm)
        return self.gemm_streamed.get(name, self.gemm[name]) if streamed else self.gemm[name]

    def scaled(self, factor: float) -> "Processor":
        """So many times as fast in everything but launches, which wait for the host."""
        return replace(
            self,
            gemm={dtype: curve.scaled(factor) for dtype, curve in self.gemm.items()},
            gemm_streamed={d: curve.scaled(factor) for d, curve in self.gemm_streamed.items()},
            bandwidth=self.bandwidth * factor,
            attention_bandwidth=self.attention_bandwidth * factor,
            coded_attention={name: rate * factor for name, rate in self.coded_attention.items()},
            attention_flops=self.attention_flops * factor,
            elementwise_bandwidth=self.elementwise_bandwidth * factor,
            sequence_s=self.sequence_s / factor,
            decoding={name: curve.scaled(factor) for name, curve in self.decoding.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A memory, and what computes on it."""

    name: LevelName
    capacity_bytes: int
    """What a job may take of it, all devices together."""
    num_devices: int = 1
    processor: Processor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A directed path between two levels."""

    name: LinkName
    bandwidth: float
    """Bytes per second."""
    staging_bandwidth: float | None = None
    """Bytes per second of the copy into pinned buffers that comes before the link itself; a lane
    of its own. None where data lies ready."""
    operation_s: float = 0.0
    """Seconds of a read or a write of a disk, its bytes left out, where pieces lie apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine: ``dram`` is always there, ``vram`` and ``disk`` may be."""

    name: str
    title: str
    levels: Mapping[LevelName, Level]
    links: Mapping[LinkName, Link]

    def without(self, name: LevelName) -> "Hardware":
        """The same machine without one of its levels."""
        levels = {level: figures for level, figures in self.levels.items() if level != name}
        links = {link: figures for link, figures in self.links.items() if name not in link}
        return replace(self, levels=levels, links=links)

    @property
    def without_host(self) -> "Hardware":
        """The same machine, where nobody waits for the host: to prepare a pass, to hand over a task
        or to launch."""
        return self.with_processors(lambda processor: processor.without_host)

    def with_processors(self, change: Callable[[Processor], Processor]) -> "Hardware":
        """The same machine with that change to each processor."""
        levels = {
            name: replace(level, processor=level.processor and change(level.processor))
            for name, level in self.levels.items()
        }
        return replace(self, levels=levels)

    @property
    def has_staging(self) -> bool:
        """Whether it is known how fast weights are copied into pinned buffers on their way up."""
        link = self.links.get("dram->vram")
        return link is not None and link.staging_bandwidth is not None

    @property
    def dram(self) -> Level:
        """Main memory."""
        return self.levels["dram"]

    @property
    def vram(self) -> Level | None:
        """GPU memory."""
        return self.levels.get("vram")

    @property
    def disk(self) -> Level | None:
        """What lies on files."""
        return self.levels.get("disk")
