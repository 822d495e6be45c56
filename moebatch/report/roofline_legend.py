"""The legend of a roofline picture: every figure of the plot in words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moebatch.plan.roofline import Roof
from moebatch.report.log_axes import Box
from moebatch.report.roofline_panel import (
    CEILING_DASH,
    COLOURS,
    NAMES,
    Mark,
    Panel,
    number_text,
    symbol,
)
from moebatch.report.svg import Point, line, text

PALE = "#555555"
_HEADING, _ROW, _NOTE, _INDENT = 12, 24, 15, 34


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A sign, what it stands for, and notes below."""

    sign: Callable[[Point], str]
    title: str
    notes: tuple[str, ...] = ()


def legend(panel: Panel, box: Box) -> Iterator[str]:
    """SVG elements, from the top of the box down, within its width."""
    upper, lower = NAMES[panel.roofline.level_i], NAMES[panel.roofline.level_j]
    y, room = box.top + _HEADING, box.width - _INDENT
    yield text((box.left, y), f"{upper} over {lower}", size=13, weight="bold", room=box.width)
    for row in _rows(panel):
        y += _ROW
        yield row.sign((box.left + 12, y - 4))
        yield text((box.left + _INDENT, y), row.title, room=room)
        for note in row.notes:
            y += _NOTE
            yield text((box.left + _INDENT, y), note, fill=PALE, size=11, room=room)


def legend_height(panel: Panel) -> float:
    """Height that the legend takes."""
    return _HEADING + sum(_ROW + _NOTE * len(row.notes) for row in _rows(panel))


def _rows(panel: Panel) -> Iterator[_Row]:
    for roof in panel.roofs:
        yield _Row(sign=_stroke(roof.colour), title=f"{roof.name}: {roof.figures}")
    yield from _turning_rows(panel)
    if any(True for _ in panel.ceilings):
        upper = panel.roofline.level_i
        title = f"dotted: what {NAMES[upper]} allows at mu"
        yield _Row(sign=_stroke(COLOURS[upper], dash=CEILING_DASH, width=1.6), title=title)
    for k, mark in enumerate(panel.marks):
        yield _Row(
            sign=lambda at, k=k: symbol(k, at),  # type: ignore[misc]
            title=f"{mark.operation.name} on {NAMES[mark.level]}",
            notes=(panel.place_text(mark), f"bound by {_binding(panel, mark)}"),
        )
    if any(map(panel.other, panel.marks)):
        yield _Row(sign=lambda at: symbol(0, at, hollow=True), title="hollow: on the other level")


def _turning_rows(panel: Panel) -> Iterator[_Row]:
    upper, lower = NAMES[panel.roofline.level_i], NAMES[panel.roofline.level_j]
    notes = {
        "P1": f"below it, better computed on {lower}",
        "P2": f"from there on {upper} binds, not the link",
    }
    for name, intensity in panel.turning_points:
        title = f"{name}: {number_text(intensity)} FLOP/byte"
        yield _Row(sign=_stroke(PALE, dash="5 4", width=1), title=title, notes=(notes[name[:2]],))
    if not panel.roofline.p1:
        why = "the link is as fast" if panel.roofline.peak_j else f"{lower} does not compute"
        yield _Row(sign=lambda at: "", title="P1: none", notes=(f"data always moves: {why}",))


def _binding(panel: Panel, mark: Mark) -> str:
    names: dict[Roof, str] = {
        "compute": "arithmetic",
        "memory": f"reading {NAMES[mark.level]}",
        "link": f"the link from {NAMES[panel.roofline.level_j]}",
    }
    return names[panel.bound(mark)]


def _stroke(colour: str, *, width: float = 2.4, dash: str = "") -> Callable[[Point], str]:
    return lambda at: line((at[0] - 12, at[1]), (at[0] + 12, at[1]), colour, width=width, dash=dash)
