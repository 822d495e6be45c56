"""How well each predictor has foreseen experts, as a picture: a panel for each figure, in it a line
of points over the layers for each predictor."""

from collections.abc import Iterator, Mapping
from itertools import cycle

from moebatch.report.log_axes import Box
from moebatch.report.svg import Point, circle, line, polyline, rectangle, svg, text
from tests.benchmarks.predictors.table import FIGURES, ByLayer, Figure

WIDTH = 980
_HEADER, _PANEL, _LEGEND = 62, 170, 40
_LEFT, _PLOT_WIDTH, _PLOT_HEIGHT = 74, 880, 110
_PALE, _GRID = "#555555", "#e4e4e4"
_COLOURS = ("#999999", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7")
"""All told apart by people who see few colours, too."""
_MOST_NAMES = 32
"""Of layers."""


def picture(found: Mapping[str, ByLayer], *, title: str, subtitle: str) -> str:
    """An SVG picture of predictors by name."""
    height = _HEADER + _LEGEND + _PANEL * len(FIGURES)
    elements = [
        text((24, 30), title, size=17, weight="bold", room=WIDTH - 48),
        text((24, 51), subtitle, fill=_PALE, room=WIDTH - 48),
        *_legend(list(found)),
    ]
    for number, (name, figure) in enumerate(FIGURES.items()):
        top = _HEADER + _LEGEND + number * _PANEL + 24
        box = Box(left=_LEFT, top=top, width=_PLOT_WIDTH, height=_PLOT_HEIGHT)
        elements += _panel(name, figure, found, box)
    return svg(elements, title=title, width=WIDTH, height=height)


def _legend(names: list[str]) -> Iterator[str]:
    for number, (name, colour) in enumerate(zip(names, cycle(_COLOURS), strict=False)):
        left = _LEFT + number * 150
        yield circle((left, _HEADER + 16), 5, fill=colour, stroke=colour)
        yield text((left + 10, _HEADER + 20), name)


def _panel(name: str, figure: Figure, found: Mapping[str, ByLayer], box: Box) -> Iterator[str]:
    yield rectangle((box.left, box.top), box.width, box.height, fill="#fcfcfc", stroke=_PALE)
    yield text((box.left, box.top - 7), name, weight="bold")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = box.bottom - share * box.height
        yield line((box.left, y), (box.right, y), _GRID)
        yield text((box.left - 8, y + 4), f"{share:.0%}", anchor="end", fill=_PALE)
    layers = list(next(iter(found.values())))
    for number, layer in enumerate(layers):
        if number % -(-len(layers) // _MOST_NAMES) == 0:
            x = _across(number, len(layers), box)
            yield text((x, box.bottom + 16), f"layer {layer}", anchor="middle", fill=_PALE)
    for (predictor, by_layer), colour in zip(found.items(), cycle(_COLOURS), strict=False):
        yield from _line(predictor, [figure(counts) for counts in by_layer.values()], colour, box)


def _line(predictor: str, shares: list[float], colour: str, box: Box) -> Iterator[str]:
    points: list[Point] = [
        (_across(number, len(shares), box), box.bottom - share * box.height)
        for number, share in enumerate(shares)
    ]
    yield polyline(points, colour, width=1.6)
    for point, share in zip(points, shares, strict=True):
        yield circle(point, 4, fill=colour, stroke=colour, note=f"{predictor}: {share:.1%}")


def _across(number: int, count: int, box: Box) -> float:
    return box.left + (number + 0.5) / count * box.width
