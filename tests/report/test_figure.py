"""Pictures as files: four kinds by their suffix, the same bytes every time, any text."""

from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.plan.roofline import Roofline
from moebatch.report.pictures.figure import Picture, fitted, rendered, text_width, write_picture
from moebatch.report.pictures.gantt import gantt_picture
from moebatch.report.pictures.roofline import roofline_picture
from moebatch.report.pictures.roofline_panel import Panel
from tests.few import examples
from tests.report.pictures import svg, svg_texts
from tests.report.timelines import cgopipe

ROOFS = Roofline(
    level_i="vram",
    level_j="dram",
    peak_i=121e12,
    peak_j=1.3e12,
    bandwidth_i=300e9,
    bandwidth_j=100e9,
    cross_bandwidth=16e9,
)


def gantt() -> Picture:
    return gantt_picture({"cgopipe": cgopipe()}, title="lanes")


def roofline() -> Picture:
    return roofline_picture([Panel(roofline=ROOFS)], title="roofs")


@pytest.mark.parametrize("draw", [gantt, roofline])
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("out.svg", b"<svg "),
        ("out.HTML", b"<!doctype html>\n"),
        ("out.png", b"\x89PNG\r\n"),
        ("out.Pdf", b"%PDF-"),
    ],
)
def test_a_file_is_what_its_name_says_and_has_the_same_bytes_every_time(
    tmp_path: Path, draw: Callable[[], Picture], name: str, head: bytes
) -> None:
    first, second = tmp_path / name, tmp_path / f"again {name}"
    write_picture(first, draw)
    write_picture(second, draw)
    assert first.read_bytes().startswith(head)
    assert first.read_bytes() == second.read_bytes()


def test_settings_of_a_user_are_neither_used_nor_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = rendered(gantt)
    settings = {"font.size": 40, "axes.grid": True, "svg.fonttype": "path", "svg.hashsalt": "x"}
    for name, value in settings.items():
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    assert rendered(gantt) == usual
    assert {name: matplotlib.rcParams[name] for name in settings} == settings


def test_any_title_is_shown_as_far_as_there_is_room() -> None:
    title = "<b>&\x00\ud800 \"'$x_1$ 漢 " + "long " * 60
    root = svg(lambda: gantt_picture({title: cgopipe()}, title=title))
    shown = next(text for text in svg_texts(root) if text.startswith("<b>"))
    assert shown.startswith("<b>&   \"'$x_1$ 漢 long")
    assert shown.endswith("…")
    assert not list(root.iter("b"))
    assert float(root.get("width", "")) == 1120


@examples(60)
@given(st.text(max_size=60), st.floats(0, 300), st.booleans())
def test_a_text_is_cut_to_its_room(text: str, room: float, bold: bool) -> None:
    shown = fitted(text, 12, room, bold=bold)
    assert len(shown) <= len(text)
    if shown.endswith("…") and len(shown) > 2:
        assert text_width(shown, 12, bold=bold) <= room
