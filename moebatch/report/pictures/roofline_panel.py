"""What one panel of a roofline picture shows: a pair of levels, its roofs, and operations on it."""

from collections.abc import Iterator
from dataclasses import dataclass

from moebatch.plan.roofline import Roof, Roofline
from moebatch.plan.roofs import PlacedOperation
from moebatch.report.pictures.figure import BLUE, GREEN, ORANGE, PALE
from moebatch.spec.machine.hardware import LevelName
from moebatch.units import format_flops, format_rate

COLOURS: dict[LevelName, str] = {"vram": BLUE, "dram": ORANGE, "disk": PALE}
NAMES: dict[LevelName, str] = {"vram": "VRAM", "dram": "DRAM", "disk": "disk"}
Value = tuple[float, float]
"""FLOP per byte, and FLOP/s."""
Limits = tuple[Value, Value]
"""Both ends of the axis of FLOP per byte, then of the axis of FLOP/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of levels, with the operations that are shown on it."""

    roofline: Roofline
    marks: tuple[PlacedOperation, ...] = ()

    def __post_init__(self) -> None:
        levels = (self.roofline.level_i, self.roofline.level_j)
        for mark in self.marks:
            assert mark.level in levels, f"{mark.operation.name} is on neither level of the panel"

    def place(self, mark: PlacedOperation) -> Value:
        """Where an operation lies on the level on which the policy computes it."""
        place = self._place_on(mark, mark.level)
        assert place is not None, f"{mark.operation.name} cannot be computed on {mark.level}"
        return place

    def other(self, mark: PlacedOperation) -> Value | None:
        """Where it lies on the level that the policy has not chosen; None without a choice."""
        i, j = self.roofline.level_i, self.roofline.level_j
        return self._place_on(mark, j if mark.level == i else i)

    def _place_on(self, mark: PlacedOperation, level: LevelName) -> Value | None:
        roofline, operation = self.roofline, mark.operation
        i, j = operation.intensity_i, operation.intensity_j
        if level == roofline.level_i:
            return j if operation.bytes_j else i, roofline.attainable_i(i, j)
        if not (operation.bytes_j and roofline.peak_j):
            return None
        return j, roofline.local_j(j)

    @property
    def places(self) -> list[Value]:
        others = [place for mark in self.marks if (place := self.other(mark))]
        return [*map(self.place, self.marks), *others]

    def bound(self, mark: PlacedOperation) -> Roof:
        """What binds an operation where the policy computes it."""
        operation = mark.operation
        if mark.level == self.roofline.level_i:
            return self.roofline.bound_i(operation.intensity_i, operation.intensity_j)
        return self.roofline.bound_j(operation.intensity_j)

    @property
    def moving(self) -> dict[str, float]:
        """P2, FLOP per byte, of operations whose data is moved up, by name."""
        return {
            mark.operation.name: self.roofline.p2(mark.operation.intensity_i)
            for mark in self.marks
            if mark.level == self.roofline.level_i and mark.operation.bytes_j
        }

    @property
    def turning_points(self) -> dict[str, float]:
        """FLOP per byte of P1, if there is one, and of P2 of each operation that is moved; with
        the operation's name only where there are several."""
        p1 = {"P1": self.roofline.p1} if self.roofline.p1 else {}
        is_one = len(self.moving) == 1
        return p1 | {"P2" if is_one else f"P2 {name}": p2 for name, p2 in self.moving.items()}

    @property
    def ceilings(self) -> list[Value]:
        """P2 of operations that the memory of the upper level binds, not its arithmetic, and the
        FLOP/s that it allows from there on."""
        flops = {p2: p2 * self.roofline.cross_bandwidth for p2 in self.moving.values()}
        return [pair for pair in flops.items() if pair[1] < self.roofline.peak_i * (1 - 1e-9)]

    @property
    def roofs(self) -> list["RoofLine"]:
        """The roofs that are drawn: none for a level where nothing computes."""
        one = self.roofline
        upper, lower = NAMES[one.level_i], NAMES[one.level_j]
        roofs = [RoofLine(upper, COLOURS[one.level_i], one.bandwidth_i, one.peak_i)]
        if one.peak_j:
            roofs.append(RoofLine(lower, COLOURS[one.level_j], one.bandwidth_j, one.peak_j))
        link = RoofLine(f"{lower} to {upper}", GREEN, one.cross_bandwidth, one.peak_i, is_link=True)
        return [*roofs, link]


@dataclass(frozen=True, slots=True)
class RoofLine:
    """A memory roof up to the ridge, then a compute roof."""

    name: str
    colour: str
    bandwidth: float
    peak: float
    is_link: bool = False
    """The roof of a link ends below the compute roof, which is its upper level's."""

    @property
    def figures(self) -> str:
        """Its bandwidth and peak."""
        rate = format_rate(self.bandwidth)
        return rate if self.is_link else f"{rate}, {format_flops(self.peak)}"

    def pieces(self, limits: Limits) -> Iterator[tuple[str, tuple[Value, Value]]]:
        """The memory roof and the compute roof as far as they lie within the axes, each with what
        is written on it."""
        (left, right), (bottom, top) = limits
        start = max(left, bottom / self.bandwidth)
        end = min(right, min(self.peak, top) / self.bandwidth)
        if start < end:
            slanted = (start, self.bandwidth * start), (end, self.bandwidth * end)
            yield f"{self.name}, {format_rate(self.bandwidth)}", slanted
        ridge = max(left, self.peak / self.bandwidth)
        if not self.is_link and ridge < right:
            yield format_flops(self.peak), ((ridge, self.peak), (right, self.peak))


def number_text(number: float) -> str:
    """``0.25``, ``4.0``, ``81.3``, ``599``, ``12 k``: what fits beside a line."""
    if number >= 10_000:
        return f"{number / 1000:,.0f} k"
    return f"{number:.3g}" if number < 1 else f"{number:.1f}" if number < 100 else f"{number:.0f}"
