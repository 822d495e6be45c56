"""What tests look at in pictures: the figure before it is written, and the SVG that comes of it."""

from collections.abc import Callable
from xml.etree import ElementTree

from matplotlib.text import Text

from moebatch.report.pictures.figure import Picture, rendered

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: Picture) -> list[str]:
    """All that is written in a picture."""
    found = (text.get_text() for text in picture.figure.findobj(Text))
    return [text for text in found if text]


def svg(draw: Callable[[], Picture]) -> ElementTree.Element:
    """The picture as a viewer of SVG gets it."""
    return ElementTree.fromstring(rendered(draw))


def svg_texts(root: ElementTree.Element) -> list[str]:
    """All that is written in it."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def groups(root: ElementTree.Element, start: str) -> list[ElementTree.Element]:
    """Parts of a picture whose name begins so."""
    return [group for group in root.iter(f"{SVG}g") if (group.get("id") or "").startswith(start)]


def notes(root: ElementTree.Element) -> list[str]:
    """What is shown of shapes that are pointed at; the title of the picture is not among them."""
    titles = root.findall(f"{SVG}title")
    return [title.text or "" for title in root.iter(f"{SVG}title") if title not in titles]
