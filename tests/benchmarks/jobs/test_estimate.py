"""What a peer would take for a whole job."""

import pytest

from tests.benchmarks.jobs.estimate import PeerResult, Trial, line_through, padded_batches_s
from tests.benchmarks.jobs.lengths import Lengths
from tests.benchmarks.jobs.peer import peer_result


def test_static_batches_are_padded_and_wait_for_the_longest() -> None:
    lengths = Lengths([10, 20, 30], [5, 9, 2])
    # 2 x 20 and 1 x 30 tokens; 8 steps, then 1.
    assert padded_batches_s(lengths, 2, prefill_s=float, step_s=100.0) == 40 + 800 + 30 + 100


def test_a_line_goes_through_two_points() -> None:
    line = line_through([(100, 3.0), (200, 4.0)])
    assert (line.fixed_s, line.token_s) == pytest.approx((2.0, 0.01))


def test_a_line_neither_falls_nor_starts_below_zero() -> None:
    assert line_through([(100, 4.0), (200, 3.0)]).token_s == 0
    steep = line_through([(100, 1.0), (200, 9.0)])
    assert steep.fixed_s == 0
    assert steep.at(150) == pytest.approx(5.0)


def test_one_point_says_that_calls_take_as_long_as_that() -> None:
    assert line_through([(100, 3.0)]).at(7) == 3.0


def test_the_best_trial_is_the_fastest() -> None:
    trials = [Trial(batch=b, job_s=s, measured_share=1.0) for b, s in ((8, 9.0), (16, 5.0))]
    result = PeerResult(name="peer", trials=trials, ended="")
    assert result.best is not None and result.best.batch == 16
    assert PeerResult(name="peer", trials=[], ended="killed").best is None


def test_what_a_driver_has_printed_before_it_was_killed_counts() -> None:
    trial = '{"batch": 8, "job_s": 9.0, "measured_share": 0.5, "detail": ""}'
    output = f'noise\n{{"trying": 8}}\n{trial}\n{{"trying": 16}}\n'
    result = peer_result("peer", output, -9)
    assert [trial.batch for trial in result.trials] == [8]
    assert result.was_killed
    assert result.ended == "killed at batch 16: out of memory"


def test_a_peer_that_ends_by_itself_says_why() -> None:
    output = '{"trying": 8}\n{"batch": 8, "job_s": 9.0, "measured_share": 1}\n{"ended": "no time"}'
    assert peer_result("peer", output, 0).ended == "no time"
    assert peer_result("peer", '{"trying": 8}', None).ended == "took too long at batch 8"
    assert peer_result("peer", "", 1).ended == "exit code 1"
