"""What tokens and hidden states let a predictor guess, and how it falls back on frequencies."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.guesser import (
    FirstGateGuesser,
    GateGuesser,
    Guess,
    LearnedGuesser,
    Perceptron,
    TokenGuesser,
    top_shares,
)
from moebatch.predict.guessing import GuessingPredictor
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import PassTokens

LAYERS, EXPERTS = (0, 2, 3), 4


def usual() -> CorrelationPredictor:
    table = PathTable.empty(LAYERS, num_experts=EXPERTS, experts_per_token=1, path_length=0)
    return CorrelationPredictor(table)


def tokens(ids: list[int]) -> PassTokens:
    count = len(ids)
    return PassTokens(
        tokens_T=np.array(ids),
        requests_T=np.arange(count),
        positions_T=np.zeros(count, np.int64),
        is_first_T=np.ones(count, bool),
        is_last_T=np.ones(count, bool),
    )


class Always:
    """Says for a position and some rows that an expert is certain."""

    def __init__(self, sees: int, position: int, expert: int) -> None:
        self._sees, self._position, self._expert = sees, position, expert

    def from_tokens(self, tokens_T: NDArray[np.int64]) -> Iterator[Guess]:
        return iter(())

    def from_hidden(self, position: int, hidden_RD: Tensor) -> Iterator[Guess]:
        if position == self._sees:
            shares_RE = np.zeros((len(hidden_RD), EXPERTS), np.float32)
            shares_RE[:, self._expert] = 1
            yield Guess(self._position, shares_RE)


def test_rows_that_were_seen_are_guessed_and_others_go_by_frequency() -> None:
    predictor = GuessingPredictor([Always(0, 1, expert=2)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(4)
    predictor.observe(0, slice(0, 3), np.zeros((3, 1), int), torch.zeros(3, 8))
    assert predictor.expected(2).tolist() == [0.25, 0.25, 3.25, 0.25]
    assert predictor.rank(2)[0] == 2


def test_what_a_gate_has_said_counts_more_than_a_guess() -> None:
    predictor = GuessingPredictor([Always(0, 1, expert=2)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(2)
    predictor.observe(0, slice(0, 2), np.zeros((2, 1), int), torch.zeros(2, 8))
    predictor.observe(2, slice(0, 1), np.array([[3]]), torch.zeros(1, 8))
    assert predictor.expected(2).tolist() == [0, 0, 1, 1]
    predictor.observe(2, slice(1, 2), np.array([[0]]), torch.zeros(1, 8))
    assert predictor.expected(2).tolist() == [1, 0, 0, 1]


def test_a_guess_from_nearer_by_replaces_one_from_further_away() -> None:
    guessers = [Always(0, 2, expert=1), Always(1, 2, expert=3)]
    predictor = GuessingPredictor(guessers, usual(), moe_layers=LAYERS)
    predictor.begin_pass(1)
    predictor.observe(0, slice(0, 1), np.array([[0]]), torch.zeros(1, 8))
    assert predictor.rank(3)[0] == 1
    predictor.observe(2, slice(0, 1), np.array([[0]]), torch.zeros(1, 8))
    assert predictor.rank(3)[0] == 3


def test_a_new_pass_forgets_the_last_one() -> None:
    predictor = GuessingPredictor([Always(0, 1, expert=2)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(1)
    predictor.observe(0, slice(0, 1), np.array([[0]]), torch.zeros(1, 8))
    predictor.begin_pass(1)
    assert predictor.expected(2).sum() == pytest.approx(1)
    assert predictor.expected(2)[2] < 1


def test_tokens_say_all_layers_before_the_pass() -> None:
    shares_LVE = np.zeros((3, 2, EXPERTS), np.float16)
    shares_LVE[:, 0, 1] = shares_LVE[:, 1, 3] = 1
    guesser = TokenGuesser(shares_LVE)
    predictor = GuessingPredictor([guesser], usual(), moe_layers=LAYERS)
    predictor.begin_pass(3, tokens([0, 1, 1]))
    for layer in LAYERS:
        assert predictor.expected(layer).tolist() == [0, 1, 0, 2]


def test_gates_of_the_next_layers_are_asked_as_they_would_answer() -> None:
    torch.manual_seed(0)
    gates = [torch.randn(EXPERTS, 8) for _ in LAYERS]
    predictor = GuessingPredictor([GateGuesser(gates, 1, depth=2)], usual(), moe_layers=LAYERS)
    hidden_RD = torch.randn(1, 8)
    predictor.begin_pass(1)
    predictor.observe(0, slice(0, 1), np.array([[0]]), hidden_RD)
    for position, layer in enumerate(LAYERS[1:], start=1):
        assert predictor.rank(layer)[0] == int((gates[position] @ hidden_RD[0]).argmax())


def test_the_last_layer_tells_the_first_one_of_the_next_pass() -> None:
    gate_ED = torch.zeros(EXPERTS, 8)
    gate_ED[2, 0] = 50.0
    guesser = FirstGateGuesser(gate_ED, num_layers=3, num_chosen=1)
    predictor = GuessingPredictor([guesser], usual(), moe_layers=LAYERS)
    ended = replace(tokens([5, 6]), is_last_T=np.array([False, True]))
    predictor.begin_pass(2, ended)
    hidden_RD = torch.ones(2, 8)
    for layer in LAYERS:
        predictor.observe(layer, slice(0, 2), np.array([[0], [1]]), hidden_RD)
    assert predictor.expected(0) == pytest.approx([0, 0, 1, 0], abs=1e-6)
    predictor.begin_pass(1, tokens([7]))
    assert predictor.expected(0)[2] < 0.9


def test_a_learned_predictor_looks_a_stride_ahead() -> None:
    perceptron = Perceptron(
        torch.eye(8), torch.zeros(8), torch.zeros(EXPERTS, 8), torch.zeros(EXPERTS)
    )
    perceptron.bias_E[1] = 30.0
    guesser = LearnedGuesser({0: perceptron}, num_chosen=1, stride=2)
    predictor = GuessingPredictor([guesser], usual(), moe_layers=LAYERS)
    predictor.begin_pass(1)
    predictor.observe(0, slice(0, 1), np.array([[0]]), torch.ones(1, 8))
    assert predictor.rank(3)[0] == 1
    assert predictor.expected(2).max() < 0.9


@given(st.integers(1, 6), st.integers(6, 12), st.integers(0, 1000))
def test_chances_are_chances(num_chosen: int, num_experts: int, seed: int) -> None:
    logits = 4 * torch.randn(5, num_experts, generator=torch.Generator().manual_seed(seed))
    shares = top_shares(logits, num_chosen)
    assert (shares <= 1 + 1e-6).all() and (shares >= 0).all()
    assert shares.sum(axis=1) == pytest.approx(np.full(5, num_chosen), rel=0.02)
    in_order = np.take_along_axis(shares, logits.numpy().argsort(axis=1), axis=1)
    assert (np.diff(in_order, axis=1) >= -1e-6).all()
