"""Reads a hardware profile from YAML, and collects all that is wrong with it."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from moebatch.quoting import shown
from moebatch.spec.hardware import LEVELS, LINKS, Dtype, LevelName, LinkName, RateCurve
from moebatch.spec.limits import whole
from moebatch.spec.profile_levels import (
    CAPACITIES,
    CURVES,
    DTYPES,
    PROCESSOR_FIGURES,
    LevelFigures,
    LinkFigures,
    ends_of,
)
from moebatch.spec.profile_values import (
    BASES,
    LINK_RATE,
    SPEED,
    CurveFigure,
    Figure,
    Quantity,
    level_curve,
)
from moebatch.spec.yaml_file import Place, YamlFile
from moebatch.spec.yaml_reader import YamlReader

INSTRUCTION_SET = "instruction_set"
TEXTS = ("name", "title", "date", "method", "source")
_MAX_DEVICES = 1024
_MAX_ROWS = 2**31
_GPU_LINKS: tuple[LinkName, LinkName] = ("dram->vram", "vram->dram")


class ProfileReader(YamlReader):
    """Gives the parts of a profile one by one; what cannot be read is a fault and left out."""

    def __init__(self, file: YamlFile) -> None:
        super().__init__(file)
        self._content = self._mapping((), file.content, (*TEXTS, "levels", "links"))
        self._source = self.text("source") or self.text("method")

    def text(self, key: str) -> str:
        """A text of the top level, in one line; empty where there is none."""
        return self._text((key,), self._content[key]) if key in self._content else ""

    def levels(self) -> dict[LevelName, LevelFigures]:
        """All levels that can be read."""
        entries = self._section("levels", LEVELS)
        if isinstance(self._content.get("levels"), Mapping) and "dram" not in entries:
            self._fault(("levels",), "needs dram, the main memory, where everything passes through")
        found = (self._level(name, entries[name]) for name in LEVELS if name in entries)
        return {level.name: level for level in found if level is not None}

    def links(self) -> dict[LinkName, LinkFigures]:
        """All links that can be read."""
        entries = self._section("links", LINKS) if "links" in self._content else {}
        levels, links = self._content.get("levels"), self._content.get("links", {})
        if isinstance(levels, Mapping) and isinstance(links, Mapping):
            self._check_ends(links, levels)
        found = (self._link(name, entries[name]) for name in LINKS if name in entries)
        return {link.name: link for link in found if link is not None}

    def _check_ends(self, links: Mapping[str, object], levels: Mapping[str, object]) -> None:
        for name in LINKS:
            missing = [level for level in ends_of(name) if level not in levels]
            if name in links and missing:
                message = (
                    f"leads nowhere, since levels.{missing[0]} is missing; add it or drop this"
                )
                self._fault(("links", name), message)
        needed: list[LinkName] = [*_GPU_LINKS] if "vram" in levels else []
        needed += ["disk->dram"] if "disk" in levels else []
        for name in needed:
            if name not in links:
                level = "disk" if "disk" in name else "vram"
                message = f"is missing; levels.{level} cannot be used without it"
                self._fault(("links", name), message)

    def _section(self, key: str, names: Iterable[str]) -> dict[str, object]:
        if key not in self._content:
            self._fault((key,), f"is missing; add it with {', '.join(names)}")
            return {}
        return self._mapping((key,), self._content[key], tuple(names))

    def _level(self, name: LevelName, value: object) -> LevelFigures | None:
        place: Place = ("levels", name)
        computes = name != "disk"
        processing = (INSTRUCTION_SET, *CURVES, *PROCESSOR_FIGURES) if computes else ()
        allowed = ("devices", "capacity", *processing)
        entries = self._mapping(place, value, allowed)
        if not isinstance(value, Mapping):
            return None
        needed = ("capacity", "bandwidth", "gemm") if computes else ("capacity",)
        for key in (key for key in needed if key not in entries):
            self._fault((*place, key), "is missing and has no default")
        capacity = self._figure((*place, "capacity"), entries, CAPACITIES[name])
        processor: dict[str, Any] = {
            key: self._figure((*place, key), entries, quantity)
            for key, quantity in PROCESSOR_FIGURES.items()
        }
        curves: dict[str, Any] = {
            key: self._gemm((*place, key), entries[key]) for key in CURVES if key in entries
        }
        if INSTRUCTION_SET in entries:
            text = self._text((*place, INSTRUCTION_SET), entries[INSTRUCTION_SET])
            processor[INSTRUCTION_SET] = text
        devices = self._devices((*place, "devices"), entries)
        if capacity is None:
            return None
        return LevelFigures(name=name, devices=devices, capacity=capacity, **curves, **processor)

    def _devices(self, place: Place, entries: Mapping[str, object]) -> int:
        devices = self._checked(
            place, entries.get("devices", 1), lambda value: whole(value, 1, _MAX_DEVICES)
        )
        return devices or 1

    def _gemm(self, place: Place, value: object) -> dict[Dtype, CurveFigure]:
        entries = self._mapping(place, value, DTYPES)
        if isinstance(value, Mapping) and not value:
            self._fault(place, f"needs at least one of {', '.join(DTYPES)}")
        found = {d: self._curve_figure((*place, d), entries) for d in DTYPES if d in entries}
        return {dtype: figure for dtype, figure in found.items() if figure is not None}

    def _link(self, name: LinkName, value: object) -> LinkFigures | None:
        place: Place = ("links", name)
        extra = ("staging",) if name in _GPU_LINKS else ()
        bandwidth = self._figure(place, {name: value}, LINK_RATE, extra)
        staging = None
        if extra and isinstance(value, Mapping) and "staging" in value:
            staging = self._number((*place, "staging"), value["staging"], LINK_RATE)
        if bandwidth is None:
            return None
        return LinkFigures(name=name, bandwidth=bandwidth, staging=staging)

    def _figure(
        self,
        place: Place,
        around: Mapping[str, object],
        quantity: Quantity,
        extra: tuple[str, ...] = (),
    ) -> Figure | None:
        if place[-1] not in around:
            return None
        entries = self._entries(place, around, quantity, extra)
        found = {
            basis: self._number((*place, basis), entries[basis], quantity)
            for basis in BASES
            if basis in entries
        }
        self._check_ratio(place, quantity, found.get("peak"), found.get("achieved"))
        if all(number is None for number in found.values()):
            return None
        return Figure(**found, source=self._source_of(place, entries))

    def _curve_figure(self, place: Place, around: Mapping[str, object]) -> CurveFigure | None:
        entries = self._entries(place, around, SPEED, ())
        peak, paper = (
            self._number((*place, basis), entries[basis], SPEED) if basis in entries else None
            for basis in ("peak", "paper")
        )
        curve = None
        if "achieved" in entries:
            curve = self._curve((*place, "achieved"), entries["achieved"])
        if peak is None and paper is None and curve is None:
            return None
        self._check_ratio(place, SPEED, peak, None if curve is None else curve.peak)
        source = self._source_of(place, entries)
        return CurveFigure(peak=peak, achieved=curve, paper=paper, source=source)

    def _curve(self, place: Place, value: object) -> RateCurve | None:
        if not isinstance(value, Mapping):
            speed = self._number(place, value, SPEED)
            return None if speed is None else level_curve(speed)
        rows = [_rows(key) for key in value]
        ascending = all(low < high for low, high in pairwise(rows))
        if not rows or rows[0] < 1 or not ascending:
            self._fault(
                place, "a table needs whole numbers of rows that ascend: {16: 0.25TFLOP/s, …}"
            )
            return None
        speeds = [self._number((*place, key), value[key], SPEED) for key in value]
        points = [(row, speed) for row, speed in zip(rows, speeds, strict=True) if speed]
        return RateCurve(points=tuple(points)) if len(points) == len(rows) else None

    def _entries(
        self,
        place: Place,
        around: Mapping[str, object],
        quantity: Quantity,
        extra: tuple[str, ...],
    ) -> dict[str, object]:
        value, example = around[str(place[-1])], quantity.example
        if not isinstance(value, Mapping):
            message = f"must be a mapping such as {{achieved: {example}, source: measured}}"
            self._fault(place, f"{message}, got {shown(value)}")
            return {}
        entries = self._mapping(place, value, (*BASES, *extra, "source"))
        if not any(basis in entries for basis in BASES):
            self._fault(place, f"has no figure; give {', '.join(BASES)} or some of them")
        if "source" not in entries and not self._source:
            self._fault(place, "has no source; say where the figure comes from, here or at the top")
        return entries

    def _source_of(self, place: Place, entries: Mapping[str, object]) -> str:
        if "source" not in entries:
            return self._source
        return self._text((*place, "source"), entries["source"])

    def _number(self, place: Place, value: object, quantity: Quantity) -> float | None:
        return self._checked(place, value, quantity.read)

    def _check_ratio(
        self, place: Place, quantity: Quantity, peak: float | None, achieved: float | None
    ) -> None:
        most = quantity.most_of_peak
        if most is None or peak is None or achieved is None or achieved <= most * peak:
            return
        message = f"is {quantity.write(achieved)}, more than {most:g} times the peak of"
        self._fault((*place, "achieved"), f"{message} {quantity.write(peak)}; one must be wrong")

    def _unknown(self, place: Place, key: str, allowed: tuple[str, ...]) -> str:
        if place == ("levels", "disk") and not get_close_matches(key, allowed, n=1):
            return "unknown key; how fast a disk is stands under links.disk->dram"
        return super()._unknown(place, key, allowed)


def _rows(key: str) -> int:
    """A number of rows, 0 where the key is none."""
    if not (key.isascii() and key.isdecimal() and len(key) < 12):
        return 0
    return int(key) if int(key) < _MAX_ROWS else 0
