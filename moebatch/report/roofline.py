"""The Hierarchical Roofline Model as a picture, in the manner of MoE-Lightning's Figures 4 and 5.

Performance is drawn over operational intensity, both logarithmic: the roofs of both levels of
memory, the roof of the link between them, the turning points, and where the operations of a policy
lie. Where a label would lie on something else it is left out: the legend beside the plot has every
figure. The same figures give the same text.
"""

from collections.abc import Sequence
from math import ceil

from moebatch.report.log_axes import Box
from moebatch.report.roofline_legend import legend, legend_height
from moebatch.report.roofline_panel import Mark, Panel
from moebatch.report.roofline_plot import PALE, RooflinePlot, panel_axes
from moebatch.report.svg import svg, text

__all__ = ["Mark", "Panel", "roofline_svg"]

WIDTH = 980
_HEADER, _PANEL, _GAP = 62, 470, 24
_PLOT = Box(left=74, top=44, width=568, height=358)
_LEGEND = Box(left=668, top=40, width=300, height=420)


def roofline_svg(panels: Sequence[Panel], *, title: str, subtitle: str = "") -> str:
    """The picture: a panel for each pair of levels, one below the other.

    Args:
        title: what is shown, such as the model and the machine.
        subtitle: a second line, such as the policy.
    """
    assert panels, "a picture needs a panel"
    elements = [
        text((24, 30), title, size=17, weight="bold", room=WIDTH - 48),
        text((24, 51), subtitle, fill=PALE, room=WIDTH - 48),
    ]
    top = _HEADER
    for panel in panels:
        plot = RooflinePlot(panel=panel, axes=panel_axes(panel, _PLOT))
        elements.append(f'<g transform="translate(0 {top})">')
        elements += [*plot.elements(), *legend(panel, _LEGEND), "</g>"]
        top += max(_PANEL, ceil(_LEGEND.top + legend_height(panel)) + _GAP)
    return svg(elements, title=title, width=WIDTH, height=top)
