"""What gates say and what is likely before they do, for the driver of a schedule."""

from collections.abc import Callable, Sequence

import numpy as np

from moebatch.arrays import Floats
from moebatch.layout.routing import chances_of_any, num_likely
from moebatch.model.routing.router import Routing
from moebatch.predict.predictor import PassTokens, Predictor, RoutingObserver
from moebatch.predict.recent_use import RecentUse
from moebatch.schedule.drivers.driver import Router
from moebatch.schedule.setup import Setup


class Guesses(Router):
    """Reads routings of the pass in work, and lets a predictor learn from them and rank."""

    def __init__(
        self,
        setup: Setup,
        predictor: Predictor,
        routing: Callable[[int, int], Routing],
        observer: RoutingObserver | None = None,
        *,
        computed_per_token: float,
    ) -> None:
        """`routing` gives what the gate of a step and a micro-batch has chosen; `observer`
        learns what the predictor learns; `computed_per_token` is as a `ModelShape` has it."""
        self._computed_per_token = computed_per_token
        self._num_tokens = self._num_next = 0
        """Of the pass in work, and what is known to come in the next one."""
        self._num_seen: dict[int, int] = {}
        """Rows that have chosen in each layer in this pass."""
        self._last_chosen = -1
        """The layer whose gate has chosen last in this pass."""
        self._setup = setup
        self._predictor = predictor
        self._routing = routing
        self._recent = RecentUse(setup.num_experts)
        learning = (predictor, self._recent)
        self._observers = (*learning, observer) if observer else learning

    def begin_pass(self, tokens: PassTokens) -> None:
        self._num_tokens, self._num_next = len(tokens.tokens_T), int(tokens.is_last_T.sum())
        self._last_chosen = -1
        self._num_seen.clear()
        for observer in self._observers:
            observer.begin_pass(self._num_tokens, tokens)

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        return list(self._routing(step, micro_batch).tokens)

    def learn(self, step: int, micro_batch: int) -> None:
        """Shows predictor and observer what a micro-batch chose, and what its gate saw."""
        routing = self._routing(step, micro_batch)
        self._last_chosen = layer = self._setup.layer(step)
        for rows in (rows for rows in routing.rows if rows.start < rows.stop):
            experts_RK, start = routing.chosen(rows), self._num_seen.get(layer, 0)
            self._num_seen[layer] = start + len(experts_RK)
            seen = slice(start, self._num_seen[layer])
            for observer in self._observers:
                observer.observe(layer, seen, experts_RK, routing.normed_TD[rows])

    def selected(self, step: int, micro_batch: int, later: int) -> Sequence[int]:
        return self._routing(step, micro_batch).ahead

    def ranked(self, step: int) -> Sequence[int]:
        """As many experts as will probably be chosen, the likeliest first."""
        layer = self._setup.layer(step)
        chances_E = self._chances_of_token(layer)
        count = 0 if chances_E is None else num_likely(chances_E, self._tokens_at(layer))
        return self._predictor.rank(layer)[:count]

    def chances(self, layer: int) -> Sequence[float]:
        """As they are guessed from tokens; before, as tokens have chosen of late, or as often
        as so many do anyway."""
        chances_E, recent_E = self._chances_of_token(layer), self._recent.chances(layer)
        is_guess = self._predictor.is_guess(layer)
        found_E = recent_E
        if chances_E is not None and (is_guess or layer > self._last_chosen):
            guessed_E = chances_of_any(chances_E, self._tokens_at(layer))
            found_E = guessed_E if is_guess else np.maximum(guessed_E, recent_E)
        found: list[float] = found_E.tolist()
        return found

    def _chances_of_token(self, layer: int) -> Floats | None:
        """With what chance a token chooses each expert, [E]; None if nothing is expected."""
        expected_E = self._predictor.expected(layer)
        num_expected = expected_E.sum() / self._computed_per_token
        return expected_E / num_expected if num_expected else None

    def _tokens_at(self, layer: int) -> int:
        """Tokens that the gate of a layer is asked about next, as far as they are known to come."""
        return self._num_next if layer <= self._last_chosen else self._num_tokens
