"""Tables without lines, and shares as bars, as all reports draw them."""

from rich.table import Table

NAME_WIDTH = 14
"""Of names in reports of several tables, so that these line up."""
_BAR_LENGTH = 24


def named_rows(min_width: int | None = None) -> Table:
    """A name on the left of every row, and what it is on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right", min_width=min_width)
    grid.add_column()
    return grid


def titled_columns() -> Table:
    """Columns that have titles; they are still to be added."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)


def share_bar(share: float) -> str:
    """``████···· 50%``: a part of a whole, in rich's markup."""
    full = round(min(1.0, share) * _BAR_LENGTH)
    return f"{'█' * full}[dim]{'·' * (_BAR_LENGTH - full)}[/] {share:4.0%}"
