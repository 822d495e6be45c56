"""The table of how well experts were foreseen."""

from io import StringIO

from rich.console import Console

from moebatch.report.summary import MOST_LAYERS, foresight_table
from moebatch.schedule.drivers.foresight import LayerForesight


def shown(layers: dict[int, LayerForesight]) -> list[list[str]]:
    screen = StringIO()
    Console(file=screen, width=160).print(foresight_table(layers))
    return [line.split() for line in screen.getvalue().splitlines()]


def counts(num_asked: int, num_foreseen: int = 0) -> LayerForesight:
    return LayerForesight(
        num_asked=num_asked,
        num_there=num_asked // 2,
        num_arrived=num_asked // 4,
        num_foreseen=num_foreseen,
        num_true=num_foreseen // 2,
        num_in_time=num_foreseen // 4,
        num_good=num_foreseen // 8,
    )


def test_every_layer_and_all_together_have_their_shares() -> None:
    _, first, second, *_, total = shown({1: counts(8, 16), 4: counts(24)})
    assert first == ["1", "8", "50.0%", "75.0%", "16", "50.0%", "25.0%", "12.5%"]
    assert second == ["4", "24", "50.0%", "75.0%"]  # nothing was foreseen
    assert total == ["all", "32", "50.0%", "75.0%", "16", "50.0%", "25.0%", "12.5%"]


def test_neighbours_share_rows_where_there_are_many_layers() -> None:
    rows = shown({layer: counts(4) for layer in range(3, 3 + 3 * MOST_LAYERS - 1)})
    assert len(rows) <= MOST_LAYERS + 3
    assert rows[1][:4] == ["3", "to", "5", "12"]
