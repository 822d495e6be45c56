"""How well experts were foreseen, as a table."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType

from moebatch.report.tables import titled_columns
from moebatch.schedule.foresight import LayerForesight

MOST_ROWS = 16
"""Of more layers than that, neighbours share a row."""
_COLUMNS = ("experts asked for", "had stayed", "at hand", "foreseen", "accuracy", "FetchRate")


def foresight_table(layers: Mapping[int, LayerForesight]) -> RenderableType:
    """By layer: of what gates asked for, what had stayed and what was at hand; of what was
    foreseen, what was chosen, what was at hand in time, and what was both."""
    table = titled_columns()
    table.add_column("layer", style="dim", justify="right")
    for title in (*_COLUMNS, "GoodPred"):
        table.add_column(title, justify="right")
    for name, counts in _rows(layers):
        table.add_row(name, *_cells(counts))
    table.add_section()
    table.add_row("all", *_cells(LayerForesight.total(layers.values())))
    return table


def _rows(layers: Mapping[int, LayerForesight]) -> Iterator[tuple[str, LayerForesight]]:
    """Layers, or as many neighbours at a time as make few rows."""
    numbers, together = list(layers), -(-len(layers) // MOST_ROWS)
    for first in range(0, len(numbers), together):
        some = numbers[first : first + together]
        yield _name(some), LayerForesight.total(layers[layer] for layer in some)


def _name(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first} to {last}"


def _cells(counts: LayerForesight) -> Iterator[str]:
    yield str(counts.num_asked)
    yield f"{counts.hit_rate:.1%}"
    yield f"{counts.at_hand:.1%}"
    if not counts.num_foreseen:
        return
    yield str(counts.num_foreseen)
    for share in (counts.accuracy, counts.fetch_rate, counts.good_prediction):
        yield f"{share:.1%}"
