"""Continuous batching on lengths alone."""

from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.jobs.lengths import Lengths, even
from tests.benchmarks.jobs.seats import Seats

ROWS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=20)


@given(rows=ROWS, num_seats=st.integers(1, 6), extra=st.integers(0, 20))
def test_every_token_is_computed_once_in_calls_that_are_not_too_large(
    rows: list[tuple[int, int]], num_seats: int, extra: int
) -> None:
    prompts, answers = zip(*rows, strict=True)
    lengths = Lengths(list(prompts), list(answers))
    seats = Seats(lengths, num_seats, num_seats + extra)
    calls = list(seats.calls())
    assert all(0 < call.num_tokens <= num_seats + extra for call in calls)
    # The last token of an answer is not computed further.
    assert sum(call.num_tokens for call in calls) == sum(prompts) + sum(answers) - len(rows)
    assert seats.num_given == sum(answers)
    assert sum(len(call.ended) for call in calls) == len(rows)


@given(rows=ROWS)
def test_positions_of_a_seat_follow_each_other(rows: list[tuple[int, int]]) -> None:
    prompts, answers = zip(*rows, strict=True)
    follows: dict[int, int] = {}
    for call in Seats(Lengths(list(prompts), list(answers)), 3, 8).calls():
        for piece in call.pieces:
            assert piece.start == follows.get(piece.seat, 0)
            follows[piece.seat] = piece.start + piece.num_tokens
        for seat in call.ended:
            del follows[seat]


def test_nobody_is_admitted_once_seats_are_closed() -> None:
    seats = Seats(even(10, 4, 3), 2, 8)
    calls = seats.calls()
    next(calls)
    seats.close()
    assert sum(len(call.ended) for call in calls) == 2


def test_closing_gives_up_prompts_that_are_not_done() -> None:
    seats = Seats(even(3, 6, 5), 3, 8)
    calls = seats.calls()
    next(calls)
    assert seats.close() == [1, 2]
    assert all(call.only_decodes for call in calls)


def test_closing_gives_nothing_up_as_long_as_nobody_decodes() -> None:
    seats = Seats(even(3, 20, 5), 3, 8)
    next(seats.calls())
    assert seats.close() == []
