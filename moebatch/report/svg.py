"""Elements of a drawing as SVG text: no scripts, no fonts of its own, no links."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from moebatch.spec.text_file import write_text

Point = tuple[float, float]
"""Across and down, in units of the drawing."""
FONT_SIZE = 12.0
FONTS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK = "#1a1a1a"
_GLYPH_WIDTH = 0.56
"""Mean width of a letter by font size: rather more than sans-serif fonts have."""
_BOLDER = 1.12


def write_picture(path: Path, svg: str) -> None:
    """Writes a picture, as a page of its own where the name ends in ``.html``. Raises
    StorageError."""
    is_page = path.suffix.lower() == ".html"
    head = '<!doctype html>\n<meta charset="utf-8">\n' if is_page else ""
    write_text(path, head + svg)


def svg(elements: Sequence[str], *, title: str, width: int, height: int) -> str:
    """A whole drawing on white, which is readable on dark pages, too."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONTS}">',
        f"<title>{clean(title)}</title>",
        rectangle((0, 0), width, height, fill="#ffffff"),
        *(element for element in elements if element),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def clean(content: str) -> str:
    """Text as XML takes it: escaped, and without characters that XML has not."""
    return escape("".join(letter if letter.isprintable() else " " for letter in content))


def text_width(content: str, size: float = FONT_SIZE, *, bold: bool = False) -> float:
    """Width that a line of text takes, estimated."""
    return _GLYPH_WIDTH * (_BOLDER if bold else 1) * size * len(content)


def fitted(content: str, size: float, room: float) -> str:
    """The text, its end cut off if it is wider than the room."""
    most = max(1, int(room / (_GLYPH_WIDTH * size)))
    return content if len(content) <= most else content[: most - 1].rstrip() + "\u2026"


def text(
    at: Point,
    content: str,
    *,
    size: float = FONT_SIZE,
    fill: str = INK,
    anchor: str = "start",
    weight: str = "normal",
    turn: float = 0.0,
    room: float | None = None,
) -> str:
    """A line of text on a base line; "" if it is empty.

    Args:
        turn: degrees clockwise, around `at`.
        room: width within which it is cut.
    """
    if not content:
        return ""
    shown = content if room is None else fitted(content, size, room)
    turned = f' transform="rotate({_n(turn)} {_n(at[0])} {_n(at[1])})"' if turn else ""
    bold = f' font-weight="{weight}"' if weight != "normal" else ""
    return (
        f'<text x="{_n(at[0])}" y="{_n(at[1])}" font-size="{size:g}" fill="{fill}" '
        f'text-anchor="{anchor}"{bold}{turned}>{clean(shown)}</text>'
    )


def line(
    start: Point, end: Point, stroke: str, *, width: float = 1.0, dash: str = "", kind: str = ""
) -> str:
    """A straight line; `kind` is its class."""
    ends = f'x1="{_n(start[0])}" y1="{_n(start[1])}" x2="{_n(end[0])}" y2="{_n(end[1])}"'
    return f"<line{_kind(kind)} {ends} {_stroke(stroke, width, dash)}/>"


def polyline(points: Sequence[Point], stroke: str, *, width: float = 1.0, kind: str = "") -> str:
    """Straight lines from point to point."""
    corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    joins = 'fill="none" stroke-linejoin="round"'
    return f'<polyline{_kind(kind)} points="{corners}" {joins} {_stroke(stroke, width, "")}/>'


def polygon(
    points: Sequence[Point], *, fill: str, stroke: str, kind: str = "", note: str = ""
) -> str:
    """A filled shape; `note` is shown where a viewer shows such."""
    corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    shape = f'points="{corners}" fill="{fill}" {_stroke(stroke, 1.6, "")}'
    return f"<polygon{_kind(kind)} {shape}>{_note(note)}</polygon>"


def circle(
    at: Point, radius: float, *, fill: str, stroke: str, kind: str = "", note: str = ""
) -> str:
    """A filled circle; `note` is shown where a viewer shows such."""
    shape = f'cx="{_n(at[0])}" cy="{_n(at[1])}" r="{_n(radius)}" fill="{fill}"'
    return f"<circle{_kind(kind)} {shape} {_stroke(stroke, 1.6, '')}>{_note(note)}</circle>"


def rectangle(
    corner: Point,
    width: float,
    height: float,
    *,
    fill: str,
    stroke: str = "none",
    opacity: float = 1.0,
    kind: str = "",
    note: str = "",
) -> str:
    """A rectangle from its upper left corner; `note` is shown where a viewer shows such."""
    shape = f'x="{_n(corner[0])}" y="{_n(corner[1])}" width="{_n(width)}" height="{_n(height)}"'
    pale = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    start = f'<rect{_kind(kind)} {shape} fill="{fill}" stroke="{stroke}"{pale}'
    return f"{start}>{_note(note)}</rect>" if note else f"{start}/>"


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _stroke(colour: str, width: float, dash: str) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{colour}" stroke-width="{width:g}"{dashes}'


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _note(note: str) -> str:
    return f"<title>{clean(note)}</title>" if note else ""
