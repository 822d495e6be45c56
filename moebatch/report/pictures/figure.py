"""Figures measured in pixels, and the files they are written to: SVG, HTML, PNG and PDF.

matplotlib is imported with this module: only what draws imports it. Its settings hold while a
figure is drawn, whatever a user's matplotlibrc says, and the same figure gives the same bytes.
"""

import re
import warnings
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from moebatch.spec.files.text_file import write_bytes

INK, PALE, FRAME = "#1a1a1a", "#555555", "#d8d8d8"
Style = dict[str, Any]
"""Keywords of matplotlib."""
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#00805e"
"""Distinct for colour-blind readers, too."""
BARS = "bars"
"""Kind of artists whose shapes touch each other."""
MARGIN = 24.0
_TITLE_SIZE, TEXT_SIZE = 17.0, 12.0
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT_SIZE,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "xtick.labelcolor": INK,
    "lines.solid_capstyle": "butt",
    "svg.fonttype": "none",
    "svg.hashsalt": "moebatch",
}
_PIXELS_PER_INCH = 72
"""A pixel is a point, so that sizes of letters are pixels, too."""
_FORMATS = {".html": "svg", ".png": "png", ".pdf": "pdf"}
"""By suffix; SVG otherwise."""
_FINENESS = {"png": 2}
"""Dots per pixel."""
_UNDATED = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_SVG = "http://www.w3.org/2000/svg"
_HTML_HEAD = b'<!doctype html>\n<meta charset="utf-8">\n'
_LONGEST_TEXT = 1000
ElementTree.register_namespace("", _SVG)


class Picture:
    """A figure with a title, and notes that a viewer of SVG shows of its shapes."""

    def __init__(self, *, title: str, subtitle: str = "", width: float, height: float) -> None:
        """Width and height are in pixels."""
        self.title, self.width, self.height = title, width, height
        size = (width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
        self.figure = Figure(figsize=size, dpi=_PIXELS_PER_INCH)
        self.notes: dict[str, Sequence[str]] = {}
        """By the gid of an artist: a note for each of its shapes."""
        self._draw_titles(title, subtitle)

    def _draw_titles(self, title: str, subtitle: str) -> None:
        room = self.width - 2 * MARGIN
        x, y = MARGIN / self.width, 1 - 30 / self.height
        shown = fitted(title, _TITLE_SIZE, room, bold=True)
        self.figure.text(x, y, shown, size=_TITLE_SIZE, weight="bold")
        self.figure.text(x, y - 21 / self.height, fitted(subtitle, TEXT_SIZE, room), color=PALE)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at pixels from the upper left corner."""
        bottom = 1 - (top + height) / self.height
        shares = left / self.width, bottom, width / self.width, height / self.height
        return self.figure.add_axes(shares)

    def note(self, kind: str, notes: Sequence[str]) -> str:
        """A gid for an artist of a kind, so that its shapes have these notes."""
        gid = f"{kind}-{len(self.notes)}"
        self.notes[gid] = notes
        return gid


def write_picture(path: Path, draw: Callable[[], Picture]) -> None:
    """Writes what `draw` draws, as SVG, as a page with it, as PNG or as PDF by the suffix of the
    file. Raises StorageError."""
    suffix = path.suffix.lower()
    data = rendered(draw, _FORMATS.get(suffix, "svg"))
    write_bytes(path, _HTML_HEAD + data if suffix == ".html" else data)


def rendered(draw: Callable[[], Picture], file_format: str = "svg") -> bytes:
    """What `draw` draws as the content of a file: svg, png or pdf."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks; viewers have others
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        picture, content = draw(), BytesIO()
        picture.figure.savefig(
            content,
            format=file_format,
            dpi=_PIXELS_PER_INCH * _FINENESS.get(file_format, 1),
            metadata={"Title": _printable(picture.title), **_UNDATED[file_format]},
        )
    data = content.getvalue()
    return _noted(data, picture.notes) if file_format == "svg" else data


@lru_cache(4096)
def text_width(content: str, size: float = TEXT_SIZE, *, bold: bool = False) -> float:
    """Pixels that a line of text takes."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as where it is drawn
        return float(text_to_path.get_text_width_height_descent(content, font, ismath=False)[0])


def fitted(content: str, size: float, room: float, *, bold: bool = False) -> str:
    """The text as a picture can show it: without control characters, and its end cut off if it is
    wider than `room` pixels."""
    shown = _printable(content)[:_LONGEST_TEXT]
    if text_width(shown, size, bold=bold) <= room:
        return shown
    ends = range(1, len(shown))
    end = bisect(ends, room, key=lambda end: text_width(shown[:end] + "…", size, bold=bold))
    return shown[:end].rstrip() + "…"


def _printable(content: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in content)


def _noted(data: bytes, notes: Mapping[str, Sequence[str]]) -> bytes:
    """An SVG with its notes, its size in pixels, and bars with sharp edges."""
    root = ElementTree.fromstring(data)
    root.set("role", "img")
    for side in ("width", "height"):
        root.set(side, re.sub(r"pt$", "", root.get(side, "")))
    for group in root.iter(f"{{{_SVG}}}g"):
        gid = group.get("id", "")
        if gid.startswith(BARS):
            # Smoothed edges of neighbours would look like gaps.
            group.set("shape-rendering", "crispEdges")
        shapes = (child for child in group if child.tag != f"{{{_SVG}}}defs")
        for shape, note in zip(shapes, notes.get(gid, ()), strict=False):
            if note:
                ElementTree.SubElement(shape, f"{{{_SVG}}}title").text = note
    return ElementTree.tostring(root, encoding="unicode").encode() + b"\n"
