"""Levels and links of a hardware profile, each with figures for every basis."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from moebatch.spec.machine.hardware import Basis, Dtype, Level, LevelName, Link, LinkName, Processor
from moebatch.spec.machine.values import (
    DISK_SIZE,
    DRAM_SIZE,
    DURATION,
    LINK_RATE,
    MEMORY_RATE,
    SPEED,
    VRAM_SIZE,
    CurveFigure,
    Figure,
    Quantity,
    supposed,
    supposed_speed,
)
from moebatch.spec.model.cache_layout import CacheDtype

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
CAPACITIES: Mapping[LevelName, Quantity] = {"vram": VRAM_SIZE, "dram": DRAM_SIZE, "disk": DISK_SIZE}
PROCESSOR_FIGURES: Mapping[str, Quantity] = {
    "bandwidth": MEMORY_RATE,
    "attention_bandwidth": MEMORY_RATE,
    "attention_bandwidth_int8": MEMORY_RATE,
    "attention_bandwidth_fp8": MEMORY_RATE,
    "attention_flops": SPEED,
    "elementwise_bandwidth": MEMORY_RATE,
    "sequence_time": DURATION,
    "launch_time": DURATION,
    "task_time": DURATION,
    "expert_time": DURATION,
    "pass_time": DURATION,
    "row_time": DURATION,
}
"""Figures of a level that computes, beside ``gemm``; only ``bandwidth`` has to be there."""


CURVES: Mapping[str, Quantity] = {"gemm": SPEED, "gemm_streamed": SPEED, "decoding": MEMORY_RATE}
"""Figures of data types, or of formats of weights, that may be tables by rows."""
_GPU_LAUNCH_S, _GPU_TASK_S = 10e-6, 40e-6
"""A GPU whose profile says nothing. Estimates: torch issues an operator in some 10 us, and a copy
alike; an expert of 11 kernels with its way through the lanes was estimated at 150 us."""
_EXPERT_OF_TASK = 0.25
"""Of the time of a task what the host takes for one expert more, where a profile does not say. Of
10 us, for the 40 of a task where none is measured, 9 were seen on a Zen 4 without a GPU, with 128
experts in tasks of 16."""
_PASS_S, _ROW_S = 1e-3, 13e-6
"""A machine whose profile says nothing: as measured on a core of an AMD EPYC (Zen 4)."""
_PASSES_OF_CODES = 7
"""On a GPU: torch gathers codes, a byte read and written, makes numbers of 2 bytes of them, and
reads these."""
_OPERATION_S = 1e-4
"""A disk whose profile says nothing: a measured one took 118 us to read and 124 us to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelFigures:
    """A memory and its processor; all devices of it together."""

    name: LevelName
    devices: int = 1
    capacity: Figure
    """Bytes that a job may take."""
    bandwidth: Figure | None = None
    """Bytes per second; None where nothing computes, as on disk."""
    gemm: Mapping[Dtype, CurveFigure] = field(default_factory=dict)
    """FLOP/s of matrix products."""
    gemm_streamed: Mapping[Dtype, CurveFigure] = field(default_factory=dict)
    """The same of experts that have just arrived from the level below; where there is none, as
    ``gemm``."""
    attention_bandwidth: Figure | None = None
    """Bytes per second of decode attention; None is the bandwidth."""
    attention_bandwidth_int8: Figure | None = None
    """The same where keys and values are cached in 8 bits. None is all of it on a CPU, which is so
    where enough cores wait for memory, and a seventh of it on a GPU."""
    attention_bandwidth_fp8: Figure | None = None
    attention_flops: Figure | None = None
    """FLOP/s of attention among the tokens of a prompt; None is the highest of gemm."""
    elementwise_bandwidth: Figure | None = None
    """Bytes per second of norms and the like; None is the bandwidth."""
    decoding: Mapping[str, CurveFigure] = field(default_factory=dict)
    """Bytes per second of stored weights that become numbers to be multiplied, by the name of their
    format; where there is none, the bandwidth."""
    sequence_time: Figure | None = None
    """Seconds of decode attention per sequence and layer; None is none."""
    launch_time: Figure | None = None
    """Seconds of a launch of a kernel or a copy; None is 10 us on a GPU and nothing on a CPU, whose
    other figures were measured with it."""
    task_time: Figure | None = None
    """Seconds of handing a task to its lane; None is 40 us with a GPU and nothing without."""
    expert_time: Figure | None = None
    """Seconds of the host for each expert of a task after the first; None is a quarter of
    `task_time`."""
    pass_time: Figure | None = None
    """Seconds between a pass and the next; None is 1 ms."""
    row_time: Figure | None = None
    """Seconds there for each sequence whose next token is chosen; None is 13 us."""
    instruction_set: str = ""
    """What the kernels of a CPU use; empty where none are known of."""

    def level(self, basis: Basis) -> Level:
        """The level in figures of one basis."""
        return Level(
            name=self.name,
            capacity_bytes=round(self.capacity.on(basis)),
            num_devices=self.devices,
            processor=self._processor(basis),
        )

    def _processor(self, basis: Basis) -> Processor | None:
        if self.bandwidth is None:
            return None
        assert self.gemm, f"{self.name} has a bandwidth and nothing to compute with"
        gemm = {dtype: figure.on(basis) for dtype, figure in self.gemm.items()}
        bandwidth = self.bandwidth.on(basis)
        fastest = max(curve.peak for curve in gemm.values())
        has_passes = basis != "paper"
        has_launches = self.name == "vram" and has_passes
        streamed = {dtype: figure.on(basis) for dtype, figure in self.gemm_streamed.items()}
        task_s = _on(self.task_time, basis, _GPU_TASK_S * has_launches)
        attention = _on(self.attention_bandwidth, basis, bandwidth)
        return Processor(
            gemm=gemm,
            gemm_streamed={**gemm, **streamed},
            bandwidth=bandwidth,
            attention_bandwidth=attention,
            coded_attention=self._coded_attention(basis, attention),
            attention_flops=_on(self.attention_flops, basis, fastest),
            elementwise_bandwidth=_on(self.elementwise_bandwidth, basis, bandwidth),
            sequence_s=_on(self.sequence_time, basis, 0.0),
            decoding={name: figure.on(basis) for name, figure in self.decoding.items()},
            launch_s=_on(self.launch_time, basis, _GPU_LAUNCH_S * has_launches),
            task_s=task_s,
            another_expert_s=_on(self.expert_time, basis, _EXPERT_OF_TASK * task_s),
            pass_s=_on(self.pass_time, basis, _PASS_S * has_passes),
            row_s=_on(self.row_time, basis, _ROW_S * has_passes),
            instruction_set=self.instruction_set,
        )

    def _coded_attention(self, basis: Basis, attention: float) -> dict[CacheDtype, float]:
        usual = attention / (_PASSES_OF_CODES if self.name == "vram" else 1)
        return {
            "int8": _on(self.attention_bandwidth_int8, basis, usual),
            "fp8": _on(self.attention_bandwidth_fp8, basis, usual),
        }

    def figures(self) -> Iterator[tuple[str, Quantity, Figure | CurveFigure]]:
        """All that are there, by their dotted names in the profile."""
        yield "capacity", CAPACITIES[self.name], self.capacity
        for name, quantity in CURVES.items():
            for key, curve in getattr(self, name).items():
                yield f"{name}.{key}", quantity, curve
        for name, quantity in PROCESSOR_FIGURES.items():
            figure = getattr(self, name)
            if figure is not None:
                yield name, quantity, figure

    def plain(self, source: str) -> dict[str, object]:
        """The keys of the level in a profile whose figures come from `source`."""
        content: dict[str, Any] = {} if self.devices == 1 else {"devices": self.devices}
        for path, quantity, figure in self.figures():
            name, _, dtype = path.partition(".")
            keys = figure.plain(quantity, source)
            content[name] = {**content.get(name, {}), dtype: keys} if dtype else keys
        named = {"instruction_set": self.instruction_set} if self.instruction_set else {}
        return {**content, **named}

    def quantities(self) -> dict[str, Quantity]:
        """What a what-if may set."""
        if self.bandwidth is None:
            return {"capacity": CAPACITIES[self.name]}
        return {"capacity": CAPACITIES[self.name], "gemm": SPEED, **PROCESSOR_FIGURES}

    def with_figure(self, name: str, number: float) -> "LevelFigures":
        """The level with one of its `quantities` set."""
        if name == "gemm":
            gemm = {dtype: supposed_speed(self.gemm[dtype], number) for dtype in self.gemm}
            return replace(self, gemm=gemm, gemm_streamed={})
        # mypy cannot see that the name is one of a Figure.
        return replace(self, **{name: supposed(number)})  # type: ignore[arg-type]

    def scaled(self, factor: float, source: str) -> "LevelFigures":
        """The level with a processor that achieves `factor` times as much of everything."""
        changed: dict[str, Any] = {
            name: _scaled(figure, quantity, factor, source)
            for name, quantity in PROCESSOR_FIGURES.items()
            if (figure := getattr(self, name)) is not None
        }
        for name in CURVES:
            curves = getattr(self, name).items()
            changed[name] = {key: curve.scaled(factor, source) for key, curve in curves}
        return replace(self, **changed)


def _scaled(figure: Figure, quantity: Quantity, factor: float, source: str) -> Figure:
    """A figure that cannot be told from nothing stays the least that a profile may say."""
    scaled = figure.scaled(1 / factor if quantity is DURATION else factor, source)
    return Figure(
        achieved=quantity.nearest(scaled.on("achieved")), paper=scaled.paper, source=source
    )


def beside_rate(name: LinkName) -> tuple[str, Quantity]:
    """What the figures of a link may say beside its rate: key and kind of number."""
    return ("staging", LINK_RATE) if "vram" in name else ("operation_time", DURATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFigures:
    """A directed path between two levels."""

    name: LinkName
    bandwidth: Figure
    """Bytes per second."""
    staging: float | None = None
    """Bytes per second, as measured, of copying into pinned buffers before the link."""
    operation_time: float | None = None
    """Seconds, as measured, of a read or a write, its bytes left out."""
    is_supposed: bool = False
    """Whether a user asks what staging or operations would do, whatever the basis."""

    def plain(self, source: str) -> dict[str, object]:
        """The keys of the link in a profile whose figures come from `source`."""
        figures = self.bandwidth.plain(LINK_RATE, source)
        own_source = {"source": figures.pop("source")} if "source" in figures else {}
        key, quantity = beside_rate(self.name)
        number = getattr(self, key)
        beside = {} if number is None else {key: quantity.write(number)}
        return {**figures, **beside, **own_source}

    def with_beside_rate(self, number: float) -> "LinkFigures":
        """With the figure that stands beside the rate, whose consequences a user asks for."""
        key, _ = beside_rate(self.name)
        beside: dict[str, Any] = {key: number}
        return replace(self, is_supposed=True, **beside)

    def link(self, basis: Basis) -> Link:
        """The link in figures of one basis. Data sheets and MoE-Lightning know no staging, and no
        operations, unless a user supposes them."""
        counts = basis == "achieved" or self.is_supposed
        usual_s = _OPERATION_S * ("disk" in self.name)
        return Link(
            name=self.name,
            bandwidth=self.bandwidth.on(basis),
            staging_bandwidth=self.staging if counts else None,
            operation_s=(usual_s if self.operation_time is None else self.operation_time) * counts,
        )


def ends_of(name: LinkName) -> tuple[str, str]:
    """``("dram", "vram")`` of ``dram->vram``."""
    start, _, end = name.partition("->")
    return start, end


def _on(figure: Figure | None, basis: Basis, otherwise: float) -> float:
    return otherwise if figure is None else figure.on(basis)
