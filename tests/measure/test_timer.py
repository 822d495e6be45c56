"""What is repeated, in which order, and for how long."""

import itertools

import pytest
import torch

from moebatch.measure.timer import Timer

CPU = torch.device("cpu")


def test_calls_take_turns_after_a_first_round() -> None:
    called: list[str] = []
    timer = Timer(device=CPU, budget_s=0.0, least_repeats=1)
    times = timer.seconds_of_each(lambda: called.append("a"), lambda: called.append("b"))
    assert called == ["a", "b"] * 2
    assert len(times) == 2
    assert all(seconds > 0 for seconds in times)


def test_quick_calls_fill_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is looked at."""
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    called: list[int] = []
    timer = Timer(device=CPU, budget_s=30.0, least_repeats=1)
    assert timer.seconds(lambda: called.append(1)) == 1.0
    assert len(called) == 11, "the first call, and one for every three looks"


def test_a_call_that_takes_longer_than_the_budget_is_repeated_once() -> None:
    called: list[int] = []
    Timer(device=CPU, budget_s=0.0, least_repeats=5).seconds(lambda: called.append(1))
    assert len(called) == 2
