"""How well experts were foreseen: which ones were there when a gate chose them, and which came
without being used."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields

from moebatch.schedule.slots.expert_load import State


@dataclass(slots=True)
class LayerForesight:
    """Counts of one layer, over passes."""

    num_asked: int = 0
    """Experts that gates have chosen, each once in a pass."""
    num_there: int = 0
    """Of these, those that had stayed: hits of residents and of the cache."""
    num_arrived: int = 0
    """Of these, those that had come because they were foreseen."""
    num_on_their_way: int = 0
    """Of these, those that had come in part."""
    num_foreseen: int = 0
    """Experts that were said to be likely before the gate chose, wherever they were."""
    num_true: int = 0
    """Of these, those that were chosen."""
    num_in_time: int = 0
    """Of those foreseen, chosen or not, those that were ready when the gate chose."""
    num_good: int = 0
    """Chosen, and ready."""

    @classmethod
    def total(cls, layers: Iterable["LayerForesight"]) -> "LayerForesight":
        """Layers together."""
        of_all, names = list(layers), [field.name for field in fields(cls)]
        return cls(**{name: sum(getattr(one, name) for one in of_all) for name in names})

    @property
    def hit_rate(self) -> float:
        """Of what was asked for, the share that had stayed."""
        return self.num_there / self.num_asked if self.num_asked else 0.0

    @property
    def ready(self) -> float:
        """Of what was asked for, the share that was ready."""
        return (self.num_there + self.num_arrived) / self.num_asked if self.num_asked else 0.0

    @property
    def begun(self) -> float:
        """Of what was asked for and had not stayed, the share that had come or was on its way: how
        right predictions are where it matters, as far as the link had time for them."""
        num_absent = self.num_asked - self.num_there
        return (self.num_arrived + self.num_on_their_way) / num_absent if num_absent else 0.0

    @property
    def accuracy(self) -> float:
        """Of what was foreseen, the share that was chosen (ProMoE)."""
        return self.num_true / self.num_foreseen if self.num_foreseen else 0.0

    @property
    def fetch_rate(self) -> float:
        """Of what was foreseen, the share that was ready in time (ProMoE)."""
        return self.num_in_time / self.num_foreseen if self.num_foreseen else 0.0

    @property
    def good_prediction(self) -> float:
        """Of what was foreseen, the share that was both: GoodPred, counted and not multiplied."""
        return self.num_good / self.num_foreseen if self.num_foreseen else 0.0


@dataclass(slots=True)
class _Step:
    """What was said of a step whose pass is not over."""

    foreseen: frozenset[int]
    in_time: frozenset[int] | None = None
    """None before the first gate has chosen."""
    asked: set[int] = field(default_factory=set)


class Foresight:
    """Keeps the counts of all layers. The driver of a schedule reports what happens."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerForesight] = {}
        self._steps: dict[tuple[int, int], _Step] = {}

    @property
    def layers(self) -> Mapping[int, LayerForesight]:
        """Counts of passes that are over, by layer, in order."""
        return dict(sorted(self._layers.items()))

    @property
    def has_news(self) -> bool:
        """Whether gates have asked for anything that had not stayed."""
        return any(of_layer.num_there < of_layer.num_asked for of_layer in self.layers.values())

    def foresee(self, step: int, layer: int, experts: Collection[int]) -> None:
        """Experts of a step are likely to be chosen; the last word before a gate chooses counts."""
        known = self._steps.get((step, layer))
        if known is None or known.in_time is None:
            self._steps[step, layer] = _Step(frozenset(experts))

    def ask(
        self, step: int, layer: int, experts: Collection[int], state: Callable[[int], State]
    ) -> None:
        """A gate has chosen experts, none of them asked for before at this step; `state` is that of
        any expert of the layer."""
        counts = self._layers.setdefault(layer, LayerForesight())
        known = self._steps.setdefault((step, layer), _Step(frozenset()))
        if known.in_time is None:
            ready = ("resident", "arrived")
            known.in_time = frozenset(e for e in known.foreseen if state(e) in ready)
        known.asked.update(experts)
        for expert in experts:
            found = state(expert)
            counts.num_asked += 1
            counts.num_there += found == "resident"
            counts.num_arrived += found == "arrived"
            counts.num_on_their_way += found == "in flight"

    def end_pass(self) -> None:
        """What was foreseen for steps whose gates have chosen is settled, and that for steps before
        them, which the pass has left out, is forgotten."""
        chosen = {key: known for key, known in self._steps.items() if known.in_time is not None}
        last = max((step for step, _ in chosen), default=-1)
        self._steps = {key: known for key, known in self._steps.items() if key[0] > last}
        for (_, layer), known in chosen.items():
            assert known.in_time is not None, "its gate has chosen"
            counts = self._layers[layer]
            counts.num_foreseen += len(known.foreseen)
            counts.num_true += len(known.foreseen & known.asked)
            counts.num_in_time += len(known.in_time)
            counts.num_good += len(known.in_time & known.asked)

    def forget(self) -> None:
        """A pass was given up: nothing of it counts."""
        self._steps.clear()
