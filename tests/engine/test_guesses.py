"""How many experts are said to be likely."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from moebatch.engine.guesses import Guesses
from moebatch.plan.likely import num_likely
from moebatch.predict.predictor import PassTokens
from moebatch.schedule.setup import Setup


class Fixed:
    """A predictor that always expects the same."""

    def __init__(self, expected_E: Sequence[float]) -> None:
        self.expected_E = np.array(expected_E)

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None: ...

    def observe(self, *news: object) -> None: ...

    def rank(self, layer: int) -> list[int]:
        return [int(expert) for expert in np.argsort(-self.expected_E, kind="stable")]

    def expected(self, layer: int) -> NDArray[np.float64]:
        return self.expected_E


def ranked(expected_E: Sequence[float], num_tokens: int, *, K: int = 2) -> Sequence[int]:
    setup = Setup(num_layers=2, num_experts=4, moe_layers=frozenset({0, 1}), num_hot=4)
    guesses = Guesses(setup, Fixed(expected_E), lambda step, k: None, experts_per_token=K)
    every = np.ones(num_tokens, bool)
    guesses.begin_pass(
        PassTokens(
            tokens_T=np.arange(num_tokens),
            requests_T=np.arange(num_tokens),
            positions_T=np.zeros(num_tokens, np.int64),
            is_first_T=every,
            is_last_T=every,
        )
    )
    return guesses.ranked(1)


@pytest.mark.parametrize("expected_E", [(1, 0, 1, 0), (0.4, 0.6, 0.3, 0.7), (0.5, 0.5, 0.5, 0.5)])
def test_of_one_token_as_many_as_it_chooses(expected_E: Sequence[float]) -> None:
    assert len(ranked(expected_E, 1)) == 2


def test_the_likeliest_come_first() -> None:
    assert ranked((0.4, 0.6, 0.3, 0.7), 1) == [3, 1]


def test_of_many_tokens_all_that_are_popular() -> None:
    assert ranked((60, 60, 60, 20), 100) == [0, 1, 2, 3]
    assert ranked((100, 99.9, 0.05, 0.05), 100) == [0, 1]


def test_nothing_is_likely_before_anything_is_known() -> None:
    assert ranked((0, 0, 0, 0), 0) == []


def test_as_many_are_likely_as_even_routing_makes_distinct() -> None:
    # 8 (1 - (1 - 1/4)^4) = 5.47
    assert num_likely(np.full(8, 0.25), 4) == 5
