"""How long answers become, from those that have ended."""

import random

import numpy as np
import pytest

from moebatch.engine.progress.endings import Endings, InWork

MANY = np.full(400, 200)


def in_work(generated: int, allowed: int = 200) -> InWork:
    return InWork(pending=0, cached=50, shared=0, generated=generated, allowed=allowed)


def test_before_anything_has_ended_answers_are_as_long_as_they_may_be() -> None:
    left, new = Endings().expected_new([in_work(30), in_work(199)], np.array([10, 300]))
    assert left.tolist() == [170, 1]
    assert new.tolist() == [10, 300]


@pytest.mark.parametrize("mean", [20, 60, 150])
def test_after_many_have_ended_the_others_are_drawn_from_them(mean: int) -> None:
    rng, endings = random.Random(1), Endings()
    for _ in range(300):
        endings.add(max(1, min(200, int(rng.gauss(mean, mean / 5)))), 200)
    _, new = endings.expected_new([], MANY)
    assert new.mean() == pytest.approx(mean, rel=0.06)
    assert new.std() == pytest.approx(mean / 5, rel=0.4), "long and short ones, not all alike"


def test_answers_that_get_as_long_as_they_may_stay_so() -> None:
    endings = Endings()
    for _ in range(100):
        endings.add(200, 200)
    assert (endings.expected_new([], MANY)[1] == 200).all()


def test_that_the_short_ones_end_first_does_not_deceive() -> None:
    """Of answers that begin together, half of them long, the short ones have ended: those in work
    say that this is not all."""
    endings = Endings()
    for _ in range(50):
        endings.add(20, 200)
    running = [in_work(60)] * 50
    _, new = endings.expected_new(running, MANY)
    assert 0.4 < (new <= 21).mean() < 0.6
    assert new.mean() > 60


def test_an_answer_in_work_has_passed_what_is_shorter() -> None:
    rng, endings = random.Random(2), Endings()
    for _ in range(300):
        endings.add(rng.randint(1, 100), 200)
    left, _ = endings.expected_new([in_work(80)] * 100, np.array([], np.int64))
    assert left.min() >= 1
    assert left.mean() == pytest.approx(10, abs=3)


def test_what_an_earlier_run_has_left_is_no_sign_that_answers_get_so_far() -> None:
    """Rows that had ended then are not seen any more."""
    fresh, resumed = Endings(), Endings()
    for _ in range(40):
        for endings in (fresh, resumed):
            endings.add(10, 200)
        resumed.add(120, 200, begun=100)
    new = [endings.expected_new([], MANY)[1].mean() for endings in (fresh, resumed)]
    assert new[1] < 2 * new[0]
