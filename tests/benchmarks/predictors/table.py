"""How well each predictor has foreseen experts, as Markdown."""

from collections.abc import Callable, Mapping

from moebatch.schedule.drivers.foresight import LayerForesight
from tests.benchmarks.jobs.table import markdown

ByLayer = Mapping[int, LayerForesight]
Figure = Callable[[LayerForesight], float]
FIGURES: Mapping[str, Figure] = {
    "accuracy": lambda counts: counts.accuracy,
    "FetchRate": lambda counts: counts.fetch_rate,
    "GoodPred": lambda counts: counts.good_prediction,
    "foreseen and ready, of those asked for": lambda counts: (
        counts.num_good / max(1, counts.num_asked)
    ),
    "ready, of those asked for": lambda counts: counts.ready,
    "begun by then, of those that had not stayed": lambda counts: counts.begun,
}


def table(found: Mapping[str, ByLayer]) -> str:
    """A line for each figure and predictor: all layers together, then each one."""
    layers = list(next(iter(found.values())))
    titles = ("of", "predictor", "all layers", *(f"layer {layer}" for layer in layers))
    rows = [
        (name, predictor, *(f"{share:.1%}" for share in shares(figure, by_layer)))
        for name, figure in FIGURES.items()
        for predictor, by_layer in found.items()
    ]
    return markdown(titles, rows)


def shares(figure: Figure, by_layer: ByLayer) -> list[float]:
    """Of all layers together, then of each."""
    return [figure(LayerForesight.total(by_layer.values())), *map(figure, by_layer.values())]
