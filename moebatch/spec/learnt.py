"""A profile with what a run has shown of its machine."""

from dataclasses import replace
from typing import Any

from moebatch.spec.hardware import LevelName, LinkName
from moebatch.spec.profile import HardwareProfile
from moebatch.spec.profile_levels import LevelFigures, LinkFigures
from moebatch.spec.profile_values import CurveFigure, Figure

_RATES = (
    "bandwidth",
    "attention_bandwidth",
    "attention_flops",
    "elementwise_bandwidth",
    "widening_bandwidth",
)


def with_link_rate(
    profile: HardwareProfile, name: LinkName, bytes_per_s: float, source: str
) -> HardwareProfile:
    """The profile with the rate that a link has been seen to achieve."""
    before = profile.links.get(name)
    peak = before.bandwidth.peak if before else None
    # A data sheet that has been beaten is wrong.
    peak = peak if peak is not None and peak >= bytes_per_s else None
    figure = Figure(
        peak=peak,
        achieved=bytes_per_s,
        paper=before.bandwidth.paper if before else None,
        source=source,
    )
    after = (
        replace(before, bandwidth=figure) if before else LinkFigures(name=name, bandwidth=figure)
    )
    return replace(profile, links={**profile.links, name: after})


def with_level_speed(
    profile: HardwareProfile, name: LevelName, factor: float, source: str
) -> HardwareProfile:
    """The profile with a processor that achieves `factor` times as much of everything."""
    level = profile.levels[name]
    return replace(profile, levels={**profile.levels, name: _scaled(level, factor, source)})


def _scaled(level: LevelFigures, factor: float, source: str) -> LevelFigures:
    rates: dict[str, Any] = {
        name: _figure(getattr(level, name), factor, source)
        for name in _RATES
        if getattr(level, name) is not None
    }
    if level.sequence_time is not None:
        rates["sequence_time"] = _figure(level.sequence_time, 1 / factor, source)
    return replace(
        level,
        gemm={dtype: _curve(figure, factor, source) for dtype, figure in level.gemm.items()},
        gemm_streamed={
            dtype: _curve(figure, factor, source) for dtype, figure in level.gemm_streamed.items()
        },
        **rates,
    )


def _figure(figure: Figure, factor: float, source: str) -> Figure:
    return replace(figure, peak=None, achieved=figure.on("achieved") * factor, source=source)


def _curve(figure: CurveFigure, factor: float, source: str) -> CurveFigure:
    curve = figure.on("achieved").scaled(factor)
    return replace(figure, peak=None, achieved=curve, source=source)
