"""What tokens and hidden states let a predictor guess, and how it falls back on frequencies."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.guesser import (
    FirstGateGuesser,
    GateGuesser,
    Guess,
    KnownTokens,
    LearnedGuesser,
    Perceptron,
    TokenGuesser,
    beginning_of,
    linear_of,
    top_shares,
)
from moebatch.predict.guessing import GuessingPredictor
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import PassTokens

LAYERS, EXPERTS = (0, 2, 3), 4


def usual() -> CorrelationPredictor:
    table = PathTable.empty(LAYERS, num_experts=EXPERTS, experts_per_token=1, path_length=0)
    return CorrelationPredictor(table)


def tokens(ids: list[int], *, position: int = 0) -> PassTokens:
    count = len(ids)
    return PassTokens(
        tokens_T=np.array(ids),
        requests_T=np.arange(count),
        choices_T=np.zeros(count, np.int64),
        positions_T=np.full(count, position),
        is_first_T=np.ones(count, bool),
        is_last_T=np.ones(count, bool),
    )


class Always:
    """Says for a position and some rows that an expert is certain."""

    def __init__(self, sees: int, position: int, expert: int) -> None:
        self._sees, self._position, self._expert = sees, position, expert

    def from_tokens(self, known: KnownTokens) -> Iterator[Guess]:
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


def test_what_tokens_say_of_all_layers_does_not_take_the_memory_of_all() -> None:
    num_layers, num_tokens, num_experts = 16, 1000, 64
    shares_LVE = np.full((num_layers, 10, num_experts), 1 / num_experts, np.float16)
    table = PathTable.empty(
        range(num_layers), num_experts=num_experts, experts_per_token=1, path_length=0
    )
    predictor = GuessingPredictor(
        [TokenGuesser(shares_LVE)], CorrelationPredictor(table), moe_layers=range(num_layers)
    )
    known, chosen_RK = tokens([3] * num_tokens), np.zeros((num_tokens // 2, 1), np.uint16)
    tracemalloc.start()
    predictor.begin_pass(num_tokens, known)
    for layer in range(num_layers):
        assert predictor.is_guess(layer)
        assert predictor.expected(layer).tolist() == [num_tokens / num_experts] * num_experts
        predictor.observe(layer, slice(0, num_tokens // 2), chosen_RK)
        assert predictor.expected(layer)[1] == num_tokens / 2 / num_experts
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    of_all_bytes = num_layers * num_tokens * num_experts * np.dtype(np.float32).itemsize
    assert peak_bytes < of_all_bytes / 3


def test_what_is_guessed_from_nearer_by_stands_before_what_tokens_say() -> None:
    shares_LVE = np.zeros((3, 1, EXPERTS), np.float16)
    shares_LVE[:, 0, 1] = 1
    guessers = [TokenGuesser(shares_LVE), Always(0, 1, expert=2)]
    predictor = GuessingPredictor(guessers, usual(), moe_layers=LAYERS)
    predictor.begin_pass(3, tokens([0, 0, 0]))
    predictor.observe(0, slice(0, 2), np.array([[0], [0]]), torch.zeros(2, 8))
    assert predictor.expected(2).tolist() == [0, 1, 2, 0]
    assert predictor.expected(3).tolist() == [0, 3, 0, 0]


def test_gates_of_the_next_layers_are_asked_as_they_would_answer() -> None:
    torch.manual_seed(0)
    gates = [torch.randn(EXPERTS, 8) for _ in LAYERS]
    asked = [partial(linear_of, gate_ED=gate_ED) for gate_ED in gates]
    predictor = GuessingPredictor([GateGuesser(asked, 1, depth=2)], usual(), moe_layers=LAYERS)
    hidden_RD = torch.randn(1, 8)
    predictor.begin_pass(1)
    predictor.observe(0, slice(0, 1), np.array([[0]]), hidden_RD)
    for position, layer in enumerate(LAYERS[1:], start=1):
        assert predictor.rank(layer)[0] == int((gates[position] @ hidden_RD[0]).argmax())


@pytest.mark.parametrize(("depth", "asked"), [(1, [1]), (2, [1, 2]), (3, [1, 2])])
def test_as_many_gates_are_asked_as_there_are_next_layers(depth: int, asked: list[int]) -> None:
    gates = [partial(linear_of, gate_ED=torch.zeros(EXPERTS, 8))] * len(LAYERS)
    guesser = GateGuesser(gates, 1, depth=depth)
    assert [guess.position for guess in guesser.from_hidden(0, torch.ones(1, 8))] == asked
    assert not list(guesser.from_hidden(len(LAYERS) - 1, torch.ones(1, 8)))


def test_only_what_the_last_layer_sees_tells_of_the_next_pass() -> None:
    guesser = FirstGateGuesser(torch.zeros(EXPERTS, 8), num_layers=3, num_chosen=1)
    told = [list(guesser.from_hidden(position, torch.ones(1, 8))) for position in range(3)]
    assert list(map(len, told)) == [0, 0, 1]


def test_rows_of_which_nothing_is_guessed_go_by_what_is_expected_of_rows_that_are_left() -> None:
    """What others have chosen at that layer is known, and is no part of what is expected."""
    table = PathTable.empty(LAYERS, num_experts=EXPERTS, experts_per_token=1, path_length=0)
    table.counts[0][1, 0] = [0, 0, 0, 1]
    rest = CorrelationPredictor(table, learns=False)
    predictor = GuessingPredictor([Always(0, 1, expert=2)], rest, moe_layers=LAYERS)
    predictor.begin_pass(4)
    predictor.observe(0, slice(0, 3), np.zeros((3, 1), int), torch.zeros(3, 8))
    predictor.observe(2, slice(0, 2), np.zeros((2, 1), int), torch.zeros(2, 8))
    # Two rows have chosen 0, one is guessed to choose 2, and of the last one nothing is known.
    assert predictor.expected(2) == pytest.approx([2, 0, 1, 1])


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


def certain(expert: int, input_size: int = 8) -> Perceptron:
    """Always of one opinion."""
    perceptron = Perceptron(
        torch.zeros(1, input_size),
        torch.zeros(1),
        torch.zeros(EXPERTS, 1),
        torch.zeros(EXPERTS),
    )
    perceptron.bias_E[expert] = 30.0
    return perceptron


def learned(*ahead: int, beginning: tuple[int, ...] = (3, 3)) -> LearnedGuesser:
    return LearnedGuesser(
        [certain(expert) for expert in ahead], [certain(one, 16) for one in beginning], num_chosen=1
    )


def choose(predictor: GuessingPredictor, layer: int, num_rows: int = 1) -> None:
    chosen_RK = np.zeros((num_rows, 1), int)
    predictor.observe(layer, slice(0, num_rows), chosen_RK, torch.ones(num_rows, 8))


def test_a_learned_predictor_looks_a_stride_ahead() -> None:
    predictor = GuessingPredictor([learned(1, 2, 2)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(1, tokens([5]))
    choose(predictor, 0)
    assert predictor.rank(3)[0] == 1
    assert predictor.expected(2).max() < 0.9


def test_the_last_layers_of_a_token_foresee_the_first_ones_of_the_next() -> None:
    predictor = GuessingPredictor([learned(1, 2, 0)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(1, tokens([5]))
    for layer in LAYERS:
        choose(predictor, layer)
    assert (predictor.rank(0)[0], predictor.rank(2)[0]) == (2, 0)


def test_what_was_foreseen_of_a_sequence_holds_in_its_next_pass() -> None:
    predictor = GuessingPredictor([learned(1, 2, 1)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(2, replace(tokens([5, 6]), is_last_T=np.array([False, True])))
    for layer in LAYERS:
        choose(predictor, layer, 2)
    following = tokens([7, 8], position=1)
    predictor.begin_pass(2, following)
    # The other sequence goes by what was chosen before.
    assert predictor.expected(0) == pytest.approx([1, 0, 1, 0], abs=1e-6)
    predictor.begin_pass(2, following)  # nobody has said anything of what comes then
    assert predictor.expected(0) == pytest.approx([2, 0, 0, 0], abs=1e-6)


def test_answers_to_one_request_are_not_taken_for_each_other() -> None:
    nobody = np.zeros(1, np.int64)
    predictor = GuessingPredictor([learned(1, 2, 1)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(1, replace(tokens([5]), choices_T=nobody))
    for layer in LAYERS:
        choose(predictor, layer)
    here, later = predictor.expected(0), tokens([7], position=1)
    predictor.begin_pass(1, replace(later, choices_T=nobody + 1))
    assert predictor.expected(0) != pytest.approx(here)
    predictor.begin_pass(1, tokens([5]))
    for layer in LAYERS:
        choose(predictor, layer)
    predictor.begin_pass(1, replace(later, choices_T=nobody))
    assert predictor.expected(0) == pytest.approx(here)


def test_other_places_of_a_sequence_are_not_what_was_foreseen() -> None:
    predictor = GuessingPredictor([learned(1, 2, 1)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(1, tokens([5]))
    for layer in LAYERS:
        choose(predictor, layer)
    predictor.begin_pass(1, tokens([7], position=2))
    assert predictor.expected(0)[2] == pytest.approx(0, abs=1e-6)


def test_tokens_that_are_known_replace_what_was_foreseen_of_them() -> None:
    predictor = GuessingPredictor([learned(1, 2, 1)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(1, tokens([5]))
    for layer in LAYERS:
        choose(predictor, layer)
    predictor.begin_pass(1, replace(tokens([7], position=1), embedded_TD=torch.ones(1, 8)))
    assert (predictor.rank(0)[0], predictor.rank(2)[0]) == (3, 3)


def test_the_beginning_is_foreseen_from_a_token_and_what_was_seen_before_it() -> None:
    seen: list[KnownTokens] = []

    class Looks(Always):
        def from_tokens(self, known: KnownTokens) -> Iterator[Guess]:
            seen.append(known)
            return iter(())

    predictor = GuessingPredictor([Looks(0, 1, 0)], usual(), moe_layers=LAYERS)
    predictor.begin_pass(2, replace(tokens([5, 6]), is_last_T=np.array([False, True])))
    hidden_RD = torch.arange(16.0).view(2, 8)
    for layer in LAYERS:
        predictor.observe(layer, slice(0, 2), np.zeros((2, 1), int), hidden_RD * (1 + layer))
    predictor.begin_pass(2, tokens([7, 8], position=1))
    first, second = seen
    assert first.before(slice(0, 2)) is None
    wanted = torch.stack([torch.zeros(8), hidden_RD[1] * 4])
    for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
        before = second.before(rows)
        assert before is not None and torch.equal(before, wanted[rows])


def test_long_prompts_are_looked_at_block_by_block_and_the_guesses_are_the_same() -> None:
    torch.manual_seed(0)
    random = Perceptron(
        torch.randn(4, 16), torch.randn(4), torch.randn(EXPERTS, 4), torch.randn(EXPERTS)
    )
    guesser = LearnedGuesser([certain(1)], [random], num_chosen=1)
    embedded_TD, before_TD = torch.randn(700, 8), torch.randn(700, 8)
    ids = np.arange(700)
    (together,) = guesser.from_tokens(KnownTokens(ids, embedded_TD, lambda rows: before_TD[rows]))
    for row in (0, 255, 256, 699):
        here = slice(row, row + 1)
        known = KnownTokens(
            ids[here], embedded_TD[here], lambda rows, row=row: before_TD[row:][rows]
        )
        (alone,) = guesser.from_tokens(known)
        assert together.shares_RE[row] == pytest.approx(alone.shares_RE[0], abs=1e-5)


def test_what_a_token_is_is_as_long_as_what_gates_see() -> None:
    embedded_TD = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    input_TD = beginning_of(embedded_TD, None)
    assert torch.allclose(beginning_of(embedded_TD * 100, None), input_TD, atol=1e-5)
    assert torch.allclose(input_TD[:, :8].square().mean(dim=1), torch.ones(3), atol=1e-4)


def test_a_gate_that_is_very_sure_is_no_fault() -> None:
    assert top_shares(torch.tensor([[2e4, -2e4, 0.0]]), 1).tolist() == [[1, 0, 0]]


@given(st.integers(1, 6), st.integers(6, 12), st.integers(0, 1000))
def test_chances_are_chances(num_chosen: int, num_experts: int, seed: int) -> None:
    logits = 4 * torch.randn(5, num_experts, generator=torch.Generator().manual_seed(seed))
    shares = top_shares(logits, num_chosen)
    assert (shares <= 1 + 1e-6).all() and (shares >= 0).all()
    assert shares.sum(axis=1) == pytest.approx(np.full(5, num_chosen), rel=0.02)
    in_order = np.take_along_axis(shares, logits.numpy().argsort(axis=1), axis=1)
    assert (np.diff(in_order, axis=1) >= -1e-6).all()
