"""A profile with what a run has shown of its machine."""

from dataclasses import replace
from typing import Any

from moebatch.spec.hardware import LevelName, LinkName
from moebatch.spec.profile import HardwareProfile
from moebatch.spec.profile_levels import CURVES, PROCESSOR_FIGURES, LevelFigures, LinkFigures
from moebatch.spec.profile_values import DURATION, Figure


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
    changed: dict[str, Any] = {
        name: figure.scaled(1 / factor if quantity is DURATION else factor, source)
        for name, quantity in PROCESSOR_FIGURES.items()
        if (figure := getattr(level, name)) is not None
    }
    for name in CURVES:
        curves = getattr(level, name).items()
        changed[name] = {dtype: curve.scaled(factor, source) for dtype, curve in curves}
    return replace(level, **changed)
