"""The roofline picture: every figure in it, nothing outside of it or on top of it."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from moebatch.plan.roofline import Operation, Roofline
from moebatch.plan.roofs import PlacedOperation
from moebatch.report.pictures.figure import Picture, text_width
from moebatch.report.pictures.label_room import Points_N, dotted
from moebatch.report.pictures.roofline import roofline_picture
from moebatch.report.pictures.roofline_panel import Panel
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Placement
from tests.few import examples
from tests.report.pictures import notes, svg, texts

GPU = Roofline(
    level_i="vram",
    level_j="dram",
    peak_i=121e12,
    peak_j=1.3e12,
    bandwidth_i=300e9,
    bandwidth_j=100e9,
    cross_bandwidth=16e9,
)
DISK = Roofline(
    level_i="dram",
    level_j="disk",
    peak_i=1.3e12,
    peak_j=0,
    bandwidth_i=100e9,
    bandwidth_j=2e9,
    cross_bandwidth=2e9,
)
ATTENTION = Operation(name="attention", flops=4e9, bytes_i=1e9, bytes_j=1e9)
FFN = Operation(name="expert FFN", flops=32e9, bytes_i=1e9, bytes_j=1e8)


def mark(operation: Operation, level: LevelName) -> PlacedOperation:
    return PlacedOperation(operation=operation, level=level, data=Placement(dram=1.0))


ON_GPU = Panel(roofline=GPU, marks=(mark(ATTENTION, "dram"), mark(FFN, "vram")))
ON_CPU = Panel(
    roofline=DISK, marks=(mark(replace(ATTENTION, bytes_j=0), "dram"), mark(FFN, "dram"))
)


def drawn(*panels: Panel) -> Picture:
    return roofline_picture(panels, title="title", subtitle="subtitle")


def plots(picture: Picture) -> list[Axes]:
    """The axes of the panels; between them are those of their legends."""
    return picture.figure.axes[::2]


def lines(axes: Axes, kind: str) -> list[Line2D]:
    return [line for line in axes.lines if (line.get_gid() or "").startswith(kind)]


def corners(text: Annotation) -> Points_N:
    """Points of a text that may be turned, in pixels."""
    box = [complex(x, y) for x in np.linspace(0, text_width(text.get_text()), 40) for y in (-2, 9)]
    return complex(*text.xy) + np.array(box) * np.exp(1j * np.radians(text.get_rotation()))


def test_labels_and_figures_are_there() -> None:
    picture = drawn(ON_GPU)
    picture.figure.draw_without_rendering()
    for label in (
        "title",
        "subtitle",
        "operational intensity, FLOP/byte",
        "attainable performance, FLOP/s",
        "P1 = 81.2",
        "P2 = 600",
        "attention",
        "expert FFN",
        "VRAM: 300 GB/s, 121 TFLOP/s",
        "DRAM: 100 GB/s, 1.30 TFLOP/s",
        "DRAM to VRAM: 16.0 GB/s",
        "attention on DRAM",
        "4.0 FLOP/byte, 400 GFLOP/s",
        "bound by reading DRAM",
        "expert FFN on VRAM",
        "320 FLOP/byte, 5.12 TFLOP/s",
        "bound by the link from DRAM",
        "VRAM, 300 GB/s",
        "121 TFLOP/s",
        "1.30 TFLOP/s",
        "10 T",
        "100",
    ):
        assert label in texts(picture)


def test_every_panel_is_drawn() -> None:
    picture = drawn(ON_GPU, ON_CPU)
    gpu, cpu = plots(picture)
    for kind, of_gpu, of_cpu in (
        ("roof", 3, 2),
        ("mark", 2, 2),
        ("alternative", 2, 0),
        ("turning-point", 2, 1),
    ):
        assert len(lines(gpu, kind)) == of_gpu, kind
        assert len(lines(cpu, kind)) == of_cpu, kind
    assert "P1: none" in texts(picture)
    assert "data always moves: disk does not compute" in texts(picture)


def test_symbols_say_what_they_are_when_pointed_at() -> None:
    assert notes(svg(lambda: drawn(ON_GPU))) == [
        "attention, not chosen",
        "attention: 4.0 FLOP/byte, 400 GFLOP/s",
        "expert FFN, not chosen",
        "expert FFN: 320 FLOP/byte, 5.12 TFLOP/s",
    ]


def test_turning_points_close_to_each_other_have_names_in_rows() -> None:
    both = replace(ON_GPU, marks=tuple(replace(mark, level="vram") for mark in ON_GPU.marks))
    (axes,) = plots(drawn(both))
    names = {text.get_text(): text.xy[1] for text in axes.texts if isinstance(text, Annotation)}
    names = {name: y for name, y in names.items() if name.startswith("P")}
    assert set(names) == {"P1 = 81.2", "P2 attention = 75.0", "P2 expert FFN = 600"}
    assert abs(names["P1 = 81.2"] - names["P2 attention = 75.0"]) == 17


@pytest.mark.parametrize("panel", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_labels_lie_neither_on_each_other_nor_on_roofs(panel: Panel) -> None:
    (axes,) = plots(drawn(panel))
    roofs = [axes.transData.transform(roof.get_xydata()) @ (1, 1j) for roof in lines(axes, "roof")]
    drawn_N = np.concatenate([dotted(roof, 1.0) for roof in roofs])
    labels = [corners(text) for text in axes.texts if isinstance(text, Annotation)]
    assert len(labels) >= 6
    for label_N in labels:
        assert np.abs(label_N[:, None] - drawn_N).min() > 2
    for one_N, other_N in combinations(labels, 2):
        assert np.abs(one_N[:, None] - other_N).min() > 2


def test_an_operation_on_a_foreign_level_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="attention is on neither level"):
        Panel(roofline=GPU, marks=(mark(ATTENTION, "disk"),))


rates = st.floats(1e8, 1e13)
peaks = st.floats(1e10, 1e16)
sizes = st.floats(1e5, 1e12)


@examples(60)
@given(
    st.builds(
        Roofline,
        level_i=st.just("vram"),
        level_j=st.just("dram"),
        peak_i=peaks,
        peak_j=st.one_of(st.just(0.0), peaks),
        bandwidth_i=rates,
        bandwidth_j=rates,
        cross_bandwidth=rates,
    ),
    st.lists(
        st.builds(
            Operation,
            name=st.sampled_from(["attention", "expert FFN", "a & b"]),
            flops=st.floats(1e9, 1e13),
            bytes_i=sizes,
            bytes_j=st.one_of(st.just(0.0), sizes),
        ),
        max_size=5,
    ),
)
def test_any_roofline_is_a_picture(roofline: Roofline, operations: list[Operation]) -> None:
    marks = tuple(mark(operation, "vram") for operation in operations)
    picture = drawn(Panel(roofline=roofline, marks=marks))
    box = picture.figure.get_tightbbox()
    assert 0 <= box.x0 <= box.x1 <= picture.width / 72
    assert 0 <= box.y0 <= box.y1 <= picture.height / 72
    (axes,) = plots(picture)
    for roof in lines(axes, "roof"):
        for corner, following in pairwise(roof.get_xydata()):
            assert (following >= corner * (1 - 1e-9)).all()
