"""The roofline picture: valid SVG, every figure in it, nothing outside of it or on top of it."""

import re
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.plan.roofline import Operation, Roofline
from moebatch.report.log_axes import Box
from moebatch.report.roofline import Mark, Panel, roofline_svg
from moebatch.report.svg import text_width
from tests.few import examples

SVG = "{http://www.w3.org/2000/svg}"
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
ON_GPU = Panel(
    roofline=GPU,
    marks=(Mark(operation=ATTENTION, level="dram"), Mark(operation=FFN, level="vram")),
)
ON_CPU = Panel(
    roofline=DISK,
    marks=(
        Mark(operation=replace(ATTENTION, bytes_j=0), level="dram"),
        Mark(operation=FFN, level="dram"),
    ),
)


def parse(*panels: Panel, title: str = "title") -> ElementTree.Element:
    return ElementTree.fromstring(roofline_svg(panels, title=title, subtitle="subtitle"))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def of_kind(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if element.get("class") == kind]


def in_plots(elements: list[ElementTree.Element]) -> list[ElementTree.Element]:
    """Those that are not signs of the legend: they say what they stand for."""
    return [element for element in elements if element.find(f"{SVG}title") is not None]


def corners(element: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (element.get("points") or "").split()
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]


def panel_points(group: ElementTree.Element) -> list[tuple[float, float]]:
    points = [point for element in group.iter() for point in corners(element)]
    for element in group.iter():
        for x, y in (("x", "y"), ("x1", "y1"), ("x2", "y2"), ("cx", "cy")):
            if element.get(x) is not None:
                points.append((float(element.get(x) or ""), float(element.get(y) or "")))
    return points


def test_labels_and_figures_are_there():
    shown = texts(parse(ON_GPU, title="Mixtral on an L4"))

    for label in (
        "Mixtral on an L4",
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
        assert label in shown


def test_every_panel_is_drawn():
    root = parse(ON_GPU, ON_CPU)

    assert len(of_kind(root, "roof")) == 3 + 2
    assert len(in_plots(of_kind(root, "mark"))) == 4
    assert len(in_plots(of_kind(root, "alternative"))) == 2
    assert len(of_kind(root, "turning-point")) == 2 + 1
    assert "P1: none" in texts(root)
    assert "data always moves: disk does not compute" in texts(root)


def test_turning_points_close_to_each_other_have_names_in_rows():
    both = replace(
        ON_GPU, marks=tuple(Mark(operation=m.operation, level="vram") for m in ON_GPU.marks)
    )
    root = parse(both)

    names = {
        element.text: float(element.get("y") or "")
        for element in root.iter(f"{SVG}text")
        if (element.text or "").startswith("P") and "=" in (element.text or "")
    }
    assert set(names) == {"P1 = 81.2", "P2 attention = 75.0", "P2 expert FFN = 600"}
    assert names["P1 = 81.2"] != names["P2 attention = 75.0"]


@pytest.mark.parametrize("panel", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_level_labels_do_not_overlap(panel):
    root = parse(panel)
    (group,) = root.findall(f"{SVG}g")
    boxes = {}
    for element in group.iter(f"{SVG}text"):
        if element.get("transform") is None:
            size = float(element.get("font-size") or "")
            bold = element.get("font-weight") == "bold"
            width = text_width(element.text or "", size, bold=bold)
            shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor") or ""]
            left, y = float(element.get("x") or "") - shift * width, float(element.get("y") or "")
            boxes[element.text, left, y] = Box(
                left=left, top=y - 0.75 * size, width=width, height=0.95 * size
            )

    assert len(boxes) > 20
    overlapping = [(a, b) for a, b in combinations(boxes, 2) if boxes[a].meets(boxes[b])]
    assert overlapping == []


def test_the_same_figures_give_the_same_text():
    assert roofline_svg([ON_GPU], title="a") == roofline_svg([ON_GPU], title="a")


def test_text_is_escaped_and_cut_to_the_picture():
    root = parse(ON_GPU, title="<b>&\x00\ud800 \"'" + "long " * 60)

    assert root.find(f"{SVG}b") is None
    shown = texts(root)[0]
    assert shown.startswith("<b>&   \"'long")
    assert shown.endswith("…")
    assert text_width(shown, 17) < 980


def test_background_is_white_and_whole():
    root = parse(ON_GPU)
    first = next(root.iter(f"{SVG}rect"))

    assert first.get("fill") == "#ffffff"
    assert (first.get("width"), first.get("height")) == (root.get("width"), root.get("height"))


def test_an_operation_on_a_foreign_level_is_our_mistake():
    with pytest.raises(AssertionError, match="attention is on neither level"):
        Panel(roofline=GPU, marks=(Mark(operation=ATTENTION, level="disk"),))


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
def test_any_roofline_is_a_picture(roofline, operations):
    marks = tuple(Mark(operation=operation, level="vram") for operation in operations)
    root = parse(Panel(roofline=roofline, marks=marks))

    _, _, width, height = map(float, (root.get("viewBox") or "").split())
    (group,) = root.findall(f"{SVG}g")
    left, top = map(float, re.findall(r"\d+", group.get("transform") or ""))
    for x, y in panel_points(group):
        assert 0 <= left + x <= width
        assert 0 <= top + y <= height
    for roof in of_kind(root, "roof"):
        for (x, y), (next_x, next_y) in pairwise(corners(roof)):
            assert next_x >= x
            assert next_y <= y  # up on the screen
