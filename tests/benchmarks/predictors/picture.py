"""How well each predictor has foreseen experts, as a picture: a panel for each figure, in it a line
of points over the layers for each predictor."""

from collections.abc import Mapping
from itertools import cycle

from matplotlib.ticker import PercentFormatter

from moebatch.report.pictures.figure import PALE, Picture
from tests.benchmarks.predictors.table import FIGURES, ByLayer

WIDTH = 980
_HEADER, _PANEL, _LEGEND = 62, 170, 40
_LEFT, _PLOT_WIDTH, _PLOT_HEIGHT = 74, 880, 110
_COLOURS = ("#999999", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7")
"""People who see few colours distinguish these, too."""
_MOST_NAMES = 32
"""Of layers."""


def picture(found: Mapping[str, ByLayer], *, title: str, subtitle: str) -> Picture:
    """A picture of predictors by name."""
    height = _HEADER + _LEGEND + _PANEL * len(FIGURES)
    drawn = Picture(title=title, subtitle=subtitle, width=WIDTH, height=height)
    for number, (name, figure) in enumerate(FIGURES.items()):
        top = _HEADER + _LEGEND + number * _PANEL + 24
        axes = drawn.axes(_LEFT, top, _PLOT_WIDTH, _PLOT_HEIGHT)
        axes.set_title(name, loc="left", size=12, weight="bold")
        axes.set(ylim=(-0.04, 1.04), yticks=[0, 0.25, 0.5, 0.75, 1], facecolor="#fcfcfc")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.tick_params(length=0, labelcolor=PALE)
        axes.grid(axis="y", color="#e4e4e4")
        for (predictor, by_layer), colour in zip(found.items(), cycle(_COLOURS), strict=False):
            shares = [figure(counts) for counts in by_layer.values()]
            axes.plot(shares, "o-", color=colour, linewidth=1.6, markersize=8, label=predictor)
        layers = list(next(iter(found.values())))
        shown = range(0, len(layers), -(-len(layers) // _MOST_NAMES))
        axes.set_xticks(shown, [f"layer {layers[number]}" for number in shown])
    handles, names = axes.get_legend_handles_labels()
    corner = _LEFT / WIDTH, 1 - _HEADER / height
    drawn.figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=corner, ncols=len(names), frameon=False
    )
    return drawn
