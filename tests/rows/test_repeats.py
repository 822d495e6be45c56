"""Equal greedy rows are computed once, and every one of them is answered."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.rows import repeats as repeats_module
from moebatch.rows.repeats import Beginnings, RepeatCounter, Repeats, greedy_key
from moebatch.spec.grammar import Grammar
from moebatch.spec.reasoning import Reasoning
from moebatch.spec.request import Choice, Outcome, Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.tools import ToolChoice, Tools


def request(index: int, prompt: int, **sampling: object) -> Request:
    return Request(
        index=index,
        custom_id=f"row-{index}",
        prompt_tokens=(prompt, prompt),
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
    )


class Engine:
    """Answers with the prompt; takes a few rows in before the first one ends."""

    def __init__(self, num_at_once: int) -> None:
        self.num_at_once = num_at_once
        self.computed: list[Request] = []

    def run(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        requests = iter(requests)
        while batch := list(islice(requests, self.num_at_once)):
            self.computed += batch
            for row in reversed(batch):
                choice = Choice(
                    index=0,
                    tokens=row.prompt_tokens,
                    text=str(row.prompt_tokens),
                    finish_reason="stop",
                )
                yield Outcome(request=row, choices=(choice,))


def answers(rows: list[Request], num_at_once: int) -> tuple[list[Outcome], Engine]:
    counter, engine = RepeatCounter(), Engine(num_at_once)
    repeated = [counter.add(row) for row in rows]
    repeats = Repeats(counter.repeated)
    outcomes = list(repeats.answer(iter(rows), engine.run))
    assert not repeats._known and not repeats._waiting, "nothing is held longer than it is needed"
    assert repeats.num_copied == sum(repeated)
    return outcomes, engine


@given(
    prompts=st.lists(st.integers(0, 5), max_size=40),
    temperatures=st.lists(st.sampled_from((0.0, 0.0, 1.0)), min_size=40, max_size=40),
    num_at_once=st.integers(1, 9),
)
def test_everybody_is_answered_once_with_the_answer_to_his_own_prompt(
    prompts: list[int], temperatures: list[float], num_at_once: int
) -> None:
    rows = [
        request(index, prompt, temperature=temperatures[index])
        for index, prompt in enumerate(prompts)
    ]
    outcomes, engine = answers(rows, num_at_once)
    assert sorted(outcome.request.index for outcome in outcomes) == list(range(len(rows)))
    for outcome in outcomes:
        assert outcome.request == rows[outcome.request.index]
        assert outcome.choices[0].tokens == outcome.request.prompt_tokens
    greedy = [row for row in rows if row.sampling.greedy]
    different = {row.prompt_tokens for row in greedy}
    assert len(engine.computed) == len(rows) - len(greedy) + len(different)


def test_copies_that_come_behind_the_last_answer_are_answered() -> None:
    outcomes, _ = answers([request(index, 0) for index in range(3)], num_at_once=1)
    assert [outcome.request.index for outcome in outcomes] == [0, 1, 2]


def test_copies_of_a_known_answer_do_not_wait_for_the_end() -> None:
    rows = [request(index, prompt) for index, prompt in enumerate((0, 0, 1, 2))]
    outcomes, _ = answers(rows, num_at_once=1)
    assert [outcome.request.index for outcome in outcomes] == [0, 2, 1, 3]


def test_of_more_rows_than_are_remembered_all_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeats_module, "_MOST_KEYS", 2)
    rows = [request(index, index % 3) for index in range(6)]
    outcomes, engine = answers(rows, num_at_once=2)
    assert sorted(outcome.request.index for outcome in outcomes) == list(range(6))
    assert [row.prompt_tokens[0] for row in engine.computed] == [0, 1, 2, 2]


@given(
    prompts=st.lists(st.integers(0, 5), max_size=60),
    num_at_once=st.integers(1, 9),
    most_waiting=st.integers(0, 9),
    most_known=st.integers(0, 99),
)
def test_rows_and_answers_for_which_there_is_no_room_are_computed_again(
    prompts: list[int], num_at_once: int, most_waiting: int, most_known: int
) -> None:
    """However many alike rows follow each other, and however many answers have copies to come."""
    rows = [request(index, prompt) for index, prompt in enumerate(prompts)]
    counter, engine = RepeatCounter(), Engine(num_at_once)
    for row in rows:
        counter.add(row)
    repeats = Repeats(counter.repeated)

    def watched() -> Iterator[Request]:
        for row in rows:
            yield row
            waiting = sum(len(alike) - 1 for alike in repeats._waiting.values())
            assert waiting + len(repeats._ready) <= most_waiting
            assert (len(repeats._known) - 1) * repeats_module._NUMBERS_OF_ROW < most_known

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(repeats_module, "_MOST_WAITING", most_waiting)
        patched.setattr(repeats_module, "_MOST_KNOWN", most_known)
        found = list(repeats.answer(watched(), engine.run))
    assert sorted(outcome.request.index for outcome in found) == list(range(len(rows)))
    assert all(each.choices[0].tokens == each.request.prompt_tokens for each in found)
    assert repeats.num_copied == len(rows) - len(engine.computed)
    assert not repeats._num_waiting, "what is copied has room again"


def test_rows_that_wait_hold_no_prompt_of_their_own() -> None:
    rows = [request(index, 7_000) for index in range(3)]
    outcomes, _ = answers(rows, num_at_once=2)
    assert len({id(outcome.request.prompt_tokens) for outcome in outcomes}) == 1
    assert [outcome.request for outcome in outcomes] == rows


CHANGES: dict[str, object] = {
    "max_tokens": 3,
    "n": 2,
    "stop": ("x",),
    "stop_token_ids": frozenset({5}),
    "ignore_eos": True,
    "min_tokens": 1,
    "logprobs": 0,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {4: 1.0},
    "response_format": Grammar("schema", "{}"),
    "structured_outputs": Grammar("choice", '["a"]'),
    "tools": Tools("[]"),
    "tool_choice": ToolChoice("none"),
    "parallel_tool_calls": False,
}
"""Of parameters on which greedy answers depend."""
CHANCE: dict[str, object] = {"seed": 7, "top_p": 0.5, "top_k": 3, "min_p": 0.5}


def test_parameters_that_matter_make_rows_different() -> None:
    usual = request(0, 1)
    for name, value in CHANGES.items():
        assert greedy_key(request(0, 1, **{name: value})) != greedy_key(usual), name
    for name, value in CHANCE.items():
        assert greedy_key(request(5, 1, **{name: value})) == greedy_key(usual), name
    assert greedy_key(request(0, 1, temperature=0.7)) is None


def test_no_parameter_is_forgotten() -> None:
    """A new one makes rows different, or it does not."""
    known = {*CHANGES, *CHANCE, "temperature"}
    assert {field.name for field in dataclasses.fields(Sampling)} == known


def test_a_grammar_of_rows_that_may_think_before_is_another() -> None:
    """One is of messages, and the other of a prompt with the same tokens."""
    held = request(0, 1, structured_outputs=Grammar("choice", '["a"]'))
    thinks = dataclasses.replace(held, reasoning=Reasoning(headers={3: 3}, closes=((4,),)))
    assert greedy_key(held) != greedy_key(thinks)


def test_of_a_beginning_two_tokens_are_left_to_compute() -> None:
    """As `test_two_tokens_at_least_are_left_to_compute` says of the cache."""
    for num_behind, num_shared in ((0, 0), (1, 0), (2, 16)):
        beginnings = Beginnings()
        beginnings.add((*range(16), 1, 2))
        assert beginnings.add((*range(16), *[3] * num_behind)) == num_shared


def test_beginnings_count_whole_pages_and_leave_something_to_compute() -> None:
    beginnings = Beginnings()
    header = tuple(range(50))
    assert beginnings.add((*header, 1, 2)) == 0
    assert beginnings.add((*header, 3, 4)) == 48
    assert beginnings.add(header[:40]) == 32
    assert beginnings.add(header[:32]) == 16
    assert beginnings.add((99, *header)) == 0
