"""Tables on terminals that are too narrow for them: nothing is cut off."""

from io import StringIO

import pytest
from rich.console import Console, RenderableType

from moebatch.report.console import show
from moebatch.report.tables import NamedRows, ShareBar, named_bars, titled_columns


def on_terminal(view: RenderableType, width: int) -> list[str]:
    screen = StringIO()
    show(Console(file=screen, width=width, force_terminal=True, color_system=None), view)
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 30, 80])
def test_figures_that_do_not_fit_into_a_line_go_on_in_the_next(width: int) -> None:
    table = titled_columns("weights", "million", "bytes", left=("weights",))
    table.add_row("embeddings", "0.06554", "128 KiB")
    lines = on_terminal(table, width)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    letters = sorted("".join(lines).replace(" ", ""))
    assert letters == sorted("weightsmillionbytesembeddings0.06554128KiB")


def test_a_table_of_more_columns_than_a_line_has_room_for_has_a_line_for_each_cell() -> None:
    titles = [f"title{number}" for number in range(8)]
    table = titled_columns(*titles)
    table.add_row(*[f"cell{number}" for number in range(8)])
    table.add_row("more", *[""] * 7)
    lines = [line.rstrip() for line in on_terminal(table, 20)]
    assert lines == [*(f"title{n}  cell{n}" for n in range(8)), "", "title0  more", ""]


def test_a_bar_behind_a_name_fits_into_its_line() -> None:
    (line,) = on_terminal(NamedRows([("rows", ShareBar(0.5))]), 20)
    assert len(line) <= 20 and line.endswith(" 50%")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_bar_on_a_narrow_terminal_is_shorter_and_shows_the_same_share(share: float) -> None:
    grid = named_bars()
    grid.add_row("dram", ShareBar(share), "91.2 GiB of 184 GiB")
    for width in (44, 80):
        text = "".join(on_terminal(grid, width))
        assert "…" not in text and f"{share:.0%}" in text
        full, empty = text.count("█"), text.count("·")
        assert abs(full - share * (full + empty)) <= 0.5
        assert full + empty == 24 or width == 44
