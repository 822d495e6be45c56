"""What gates say and what is likely before they do, for whoever drives a schedule."""

import math
from collections.abc import Callable, Sequence

from moebatch.model.router import Routing
from moebatch.predict.predictor import PassTokens, Predictor, RoutingObserver
from moebatch.schedule.setup import Setup

_LIKELY = math.log(2)
"""Expected tokens beyond which an expert is likelier than not to be chosen."""


class Guesses:
    """Reads routings of the pass in work, and lets a predictor learn from them and rank."""

    def __init__(
        self,
        setup: Setup,
        predictor: Predictor,
        routing: Callable[[int, int], Routing],
        observer: RoutingObserver | None = None,
    ) -> None:
        """`routing` gives what the gate of a step and a micro-batch has said; `observer` is told
        what the predictor is told."""
        self._setup = setup
        self._predictor = predictor
        self._routing = routing
        self._observers = (predictor, observer) if observer else (predictor,)

    def begin_pass(self, tokens: PassTokens) -> None:
        """A pass of those tokens begins."""
        for observer in self._observers:
            observer.begin_pass(len(tokens.tokens_T), tokens)

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        """Experts that a micro-batch chose."""
        routing = self._routing(step, micro_batch)
        layer = self._setup.layer(step)
        for rows in routing.rows:
            experts_RK = routing.chosen(rows)
            for observer in self._observers:
                observer.observe(layer, rows, experts_RK, routing.normed_TD[rows])
        return list(routing.tokens)

    def selected(self, step: int, micro_batch: int, later: int) -> Sequence[int]:
        """Experts of a later step that a micro-batch has chosen at this one."""
        return self._routing(step, micro_batch).ahead

    def ranked(self, step: int) -> Sequence[int]:
        """Experts that are likelier than not to be chosen, the likeliest first."""
        layer = self._setup.layer(step)
        expected_E = self._predictor.expected(layer)
        return [e for e in self._predictor.rank(layer) if expected_E[e] >= _LIKELY]
