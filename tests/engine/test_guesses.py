"""How many experts are said to be likely."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moebatch.engine.passes.guesses import Guesses
from moebatch.layout.routing import num_likely
from moebatch.model.routing.router import Routing
from moebatch.predict.predictor import PassTokens, counts_of
from moebatch.schedule.setup import Setup


class Fixed:
    """A predictor that always expects the same."""

    def __init__(self, expected_E: Sequence[float], *, guesses: bool) -> None:
        self.expected_E = np.array(expected_E)
        self.guesses = guesses

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None: ...

    def observe(self, *news: object) -> None: ...

    def rank(self, layer: int) -> list[int]:
        return [int(expert) for expert in np.argsort(-self.expected_E, kind="stable")]

    def expected(self, layer: int) -> NDArray[np.float64]:
        return self.expected_E

    def is_guess(self, layer: int) -> bool:
        return self.guesses


def guesses_of(
    expected_E: Sequence[float],
    num_tokens: int,
    *,
    is_guess: bool = True,
    routing: Routing | None = None,
) -> Guesses:
    setup = Setup(num_layers=2, num_experts=4, moe_layers=frozenset({0, 1}), num_hot=4)
    predictor = Fixed(expected_E, guesses=is_guess)
    guesses = Guesses(setup, predictor, lambda step, k: routing, computed_per_token=2)
    begin(guesses, num_tokens)
    return guesses


def begin(guesses: Guesses, num_tokens: int) -> None:
    every = np.ones(num_tokens, bool)
    guesses.begin_pass(
        PassTokens(
            tokens_T=np.arange(num_tokens),
            requests_T=np.arange(num_tokens),
            choices_T=np.zeros(num_tokens, np.int64),
            positions_T=np.zeros(num_tokens, np.int64),
            is_first_T=every,
            is_last_T=every,
        )
    )


def ranked(expected_E: Sequence[float], num_tokens: int) -> Sequence[int]:
    return guesses_of(expected_E, num_tokens).ranked(1)


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


def chosen(experts_TK: Sequence[Sequence[int]]) -> Routing:
    """What a gate has said."""
    num_tokens = len(experts_TK)
    return Routing(
        rows=(slice(0, num_tokens),),
        normed_TD=torch.zeros(num_tokens, 3),
        weights_TK=torch.ones(num_tokens, 2),
        experts_TK=torch.tensor(experts_TK),
        num_experts=4,
        tokens={},
        outputs_TKD=torch.zeros(num_tokens, 2, 3),
    )


def test_a_choice_of_no_expert_is_shown_as_the_first_of_its_token_and_counts_for_none() -> None:
    """Four experts, of which a number stands for none; one token has none at all."""
    found = chosen([[4, 1], [2, 4], [0, 3], [4, 4]]).chosen(slice(0, 4))
    assert found.tolist() == [[1, 1], [2, 2], [0, 3], [3, 3]]
    assert counts_of(found, 4).tolist() == [1, 1, 1, 2]


def test_what_is_guessed_of_tokens_is_the_chance_that_any_of_them_chooses_it() -> None:
    assert guesses_of((0.2, 0.8, 0.4, 0.6), 1).chances(1) == pytest.approx((0.2, 0.8, 0.4, 0.6))
    assert guesses_of((1, 1, 2, 0), 2).chances(1) == pytest.approx((0.75, 0.75, 1, 0))


def test_of_a_layer_of_which_nothing_is_known_chances_are_those_of_passes_of_late() -> None:
    guesses = guesses_of((1, 0.2, 0.5, 0.3), 1, is_guess=False, routing=chosen([[0, 1]]))
    guesses.learn(1, 0)
    assert guesses.chances(1) == [0.5, 0.5, 0, 0]
    begin(guesses, 1)
    guesses.learn(1, 0)
    assert guesses.chances(1) == [0.75, 0.75, 0, 0]


def test_before_its_turn_a_layer_is_as_likely_to_choose_as_it_ever_was_or_was_of_late() -> None:
    guesses = guesses_of((0.1, 0.6, 0.9, 0.4), 1, is_guess=False, routing=chosen([[0, 1]]))
    guesses.learn(1, 0)
    begin(guesses, 1)
    assert guesses.chances(1) == pytest.approx((0.5, 0.6, 0.9, 0.4))
