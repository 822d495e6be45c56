"""Tables without lines, and shares as bars, as all reports draw them."""

from collections.abc import Container, Iterable, Iterator

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from moebatch.report.console import wrapped

NAME_WIDTH = 14
"""Of names in reports of several tables, so that these line up."""
_BAR_LENGTH = 24
_PERCENT_WIDTH = 5
_GAP = 2
_NARROWEST_CELL = 4


class NamedRows:
    """A name on the left of every row, and what it is on the right, which on a terminal is broken
    between words."""

    def __init__(
        self, rows: Iterable[tuple[str, "str | ShareBar"]] = (), *, min_width: int = 0
    ) -> None:
        """Rows as `add_row` takes them."""
        self._width = min_width
        self._rows: list[tuple[Text, Text | ShareBar]] = []
        for name, text in rows:
            self.add_row(name, text)

    def add_row(self, name: str, text: "str | ShareBar") -> None:
        """Both in rich's markup."""
        head = Text.from_markup(name, style="dim")
        self._width = max(self._width, head.cell_len)
        self._rows.append((head, Text.from_markup(text) if isinstance(text, str) else text))

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        margin = self._width + _GAP
        width = max(1, options.max_width - margin) if options.is_terminal else None
        for name, text in self._rows:
            head = Text(" " * (self._width - name.cell_len)) + name + Text(" " * _GAP)
            for line in wrapped(text if isinstance(text, Text) else text.within(width), width):
                yield Text("", no_wrap=True, overflow="ignore") + head + line
                head = Text(" " * margin)


class Paragraph:
    """A dim paragraph that on a terminal is broken between words."""

    def __init__(self, text: str) -> None:
        """Not markup."""
        self._text = Text(text, style="dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from wrapped(self._text, options.max_width if options.is_terminal else None)


def notes_view(notes: tuple[str, ...]) -> list[RenderableType]:
    """What a reader should know, one paragraph each."""
    return [Paragraph(f"note: {note}") for note in notes]


def named_bars() -> Table:
    """A name on the left of every row, a bar beside it, and figures on the right."""
    grid = Table.grid(padding=(0, _GAP))
    grid.add_column(style="dim", justify="right", min_width=NAME_WIDTH)
    grid.add_column()
    grid.add_column(justify="right")
    return grid


class _Titled(Table):
    """Where lines have no room for all columns, of which rich would leave some out, each cell has a
    line of its own behind its title."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= len(self.columns) * (_NARROWEST_CELL + _GAP):
            yield from super().__rich_console__(console, options)
            return
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            rows = zip(
                (str(column.header) for column in self.columns), map(str, cells), strict=True
            )
            yield NamedRows(row for row in rows if row[1])
            yield ""


def titled_columns(
    *titles: str, left: Container[str] = (), dim: Container[str] = (), bold: Container[str] = ()
) -> Table:
    """Columns that have titles, figures to the right unless they are named under `left`."""
    table = _Titled(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_edge=False)
    for title in titles:
        style = "dim" if title in dim else "bold" if title in bold else None
        justify: JustifyMethod = "left" if title in left else "right"
        table.add_column(title, justify=justify, style=style, overflow="fold")
    return table


class ShareBar:
    """A `share_bar` in a cell of a table: on a narrow terminal it is shorter, and never cut."""

    def __init__(self, share: float) -> None:
        self._share = share

    def within(self, width: int | None) -> Text:
        """So much of it as so many columns have room for."""
        most = _BAR_LENGTH if width is None else min(_BAR_LENGTH, width - _PERCENT_WIDTH)
        return Text.from_markup(share_bar(self._share, max(1, most)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1 + _PERCENT_WIDTH, _BAR_LENGTH + _PERCENT_WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield self.within(options.max_width)


def share_bar(share: float, length: int = _BAR_LENGTH) -> str:
    """``████····  50%``: a part of a whole, in rich's markup."""
    full = round(min(1.0, share) * length)
    return f"{'█' * full}[dim]{'·' * (length - full)}[/] {share:4.0%}"
