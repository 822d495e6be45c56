"""Equal greedy rows are computed once, and every one of them is answered."""

from collections.abc import Iterable, Iterator
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from moebatch.rows.repeats import Beginnings, RepeatCounter, Repeats, greedy_key
from moebatch.spec.request import Choice, Outcome, Request
from moebatch.spec.sampling import Sampling


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
        assert outcome.request is rows[outcome.request.index]
        assert outcome.choices[0].tokens == outcome.request.prompt_tokens
    greedy = [row for row in rows if row.sampling.greedy]
    different = {row.prompt_tokens for row in greedy}
    assert len(engine.computed) == len(rows) - len(greedy) + len(different)


def test_parameters_that_matter_make_rows_different() -> None:
    usual = request(0, 1)
    for change in (
        {"max_tokens": 3},
        {"stop": ("x",)},
        {"logprobs": 2},
        {"logit_bias": {4: 1.0}},
        {"repetition_penalty": 1.1},
        {"n": 2},
    ):
        assert greedy_key(request(0, 1, **change)) != greedy_key(usual), change
    for change in ({"seed": 7}, {"top_p": 0.5}, {"top_k": 3}):
        assert greedy_key(request(5, 1, **change)) == greedy_key(usual), change
    assert greedy_key(request(0, 1, temperature=0.7)) is None


def test_beginnings_count_whole_pages_and_leave_something_to_compute() -> None:
    beginnings = Beginnings()
    header = tuple(range(50))
    assert beginnings.add((*header, 1, 2)) == 0
    assert beginnings.add((*header, 3, 4)) == 48
    assert beginnings.add(header[:40]) == 32
    assert beginnings.add(header[:32]) == 16
    assert beginnings.add((99, *header)) == 0
