"""What an estimate of the time left takes in, fact by fact; `test_course` has whole runs."""

from dataclasses import replace

import pytest

from moebatch.engine.progress.endings import Endings
from moebatch.engine.progress.time_left import PassDone, Standing, TimeLeft, _Priced
from moebatch.layout.lanes import pass_seconds
from moebatch.layout.load import PassLoad
from moebatch.spec.policy.policy import Placement, Policy
from tests.engine.test_course import asked_for, policy, ragged

ROWS = ragged(60, 15)
ASKED = asked_for(ROWS)
UNDER = policy(ASKED)


@pytest.mark.parametrize(
    ("less", "under"),
    [
        (Standing(batch_size=12), replace(UNDER, batch_size=12)),
        (Standing(tokens_per_pass=60), replace(UNDER, tokens_per_pass=60)),
        (Standing(num_joint_pages=450), replace(UNDER, num_kv_pages=UNDER.num_kv_pages - 450)),
    ],
    ids=["sequences", "tokens", "pages"],
)
def test_what_is_left_is_done_with_the_room_that_there_is(less: Standing, under: Policy) -> None:
    """A batcher that was refused memory goes on with less than the policy says, and pages that
    several sequences hold are room for nobody else."""
    left_s = TimeLeft(ASKED, UNDER).seconds(less, Endings())
    assert left_s == pytest.approx(TimeLeft(ASKED, under).seconds(Standing(), Endings()))
    assert left_s > 1.05 * TimeLeft(ASKED, UNDER).seconds(Standing(), Endings())


def test_passes_with_experts_that_have_grown_are_held_against_what_they_should_take_then() -> None:
    """Else a machine that is as planned would be taken for a faster one."""
    load = PassLoad.decoding(8, 100)
    num_grown = ASKED.num_experts // 2
    weights = Placement(dram=0.75, disk=0.25)
    seconds = ASKED.cost_of(load, replace(UNDER, weights=weights)).seconds
    assert seconds < 0.7 * ASKED.cost_of(load, UNDER).seconds
    grown = TimeLeft(ASKED, UNDER)
    grown.add([PassDone(number=1, load=load, seconds=seconds, num_grown=num_grown)])
    as_planned_s = TimeLeft(ASKED, UNDER).seconds(Standing(), Endings())
    left_s = grown.seconds(Standing(num_passes=1), Endings())
    assert left_s == pytest.approx(as_planned_s)


def test_where_nothing_is_left_it_takes_no_time() -> None:
    at_end = Standing(num_passes=9, num_taken=len(ROWS))
    assert TimeLeft(ASKED, UNDER).seconds(at_end, Endings()) == 0


def test_a_machine_that_has_become_faster_is_soon_as_fast_as_it_is_now() -> None:
    """Such as one that others have left to the run."""
    load = PassLoad.decoding(8, 100)
    planned_s = ASKED.cost_of(load, UNDER).seconds
    time_left = TimeLeft(ASKED, UNDER)
    time_left.add(PassDone(number=n, load=load, seconds=3 * planned_s) for n in range(1, 201))
    time_left.add(PassDone(number=n, load=load, seconds=planned_s) for n in range(201, 281))
    as_planned_s = TimeLeft(ASKED, UNDER).seconds(Standing(), Endings())
    left_s = time_left.seconds(Standing(num_passes=280), Endings())
    assert left_s == pytest.approx(as_planned_s, rel=0.05)


def test_pages_that_are_all_held_jointly_leave_time_to_tell() -> None:
    """The oldest sequence goes on all the same."""
    full = Standing(num_joint_pages=UNDER.num_kv_pages)
    assert TimeLeft(ASKED, UNDER).seconds(full, Endings()) > 0


def test_a_pass_in_work_counts_down_by_the_clock_on_a_slow_machine() -> None:
    load = PassLoad.decoding(8, 100)
    planned_s = ASKED.cost_of(load, UNDER).seconds
    time_left = TimeLeft(ASKED, UNDER)
    time_left.add(PassDone(number=n, load=load, seconds=3 * planned_s) for n in range(1, 101))

    def left_s(since_s: float) -> float:
        return time_left.seconds(Standing(num_passes=100), Endings(), since_s=since_s)

    gone_s = planned_s / 2
    assert left_s(0.0) - left_s(gone_s) == pytest.approx(gone_s, rel=1e-6)


def test_passes_beyond_those_that_were_expected_leave_nothing_and_never_less() -> None:
    """Between two replays there may be more of them than the last one knew of."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # so that a replay is not due again for long
        return now[0]

    time_left = TimeLeft(ASKED, UNDER, clock=clock)
    num_expected = 10 * ASKED.workload.max_new_tokens
    assert time_left.seconds(Standing(), Endings()) > 0
    load = PassLoad.decoding(48, 200)
    time_left.add(PassDone(number=n, load=load, seconds=1.0) for n in range(1, num_expected))
    assert time_left.seconds(Standing(num_passes=num_expected), Endings()) == 0


def test_what_lanes_wait_for_beside_each_other_grows_as_the_slowest_of_them() -> None:
    lanes = {"cpu": 2.0, "disk->dram": 1.0}
    assert pass_seconds(lanes, UNDER) == 2.0
    waiting = _Priced(lanes, UNDER, seconds=3.0)
    assert waiting.at({}) == 3.0
    assert waiting.at({"cpu": 2.0}) == 6.0
    assert waiting.at({"disk->dram": 4.0}) == 6.0


def test_a_pass_without_waits_is_as_long_as_its_slowest_lane() -> None:
    lanes = {"cpu": 2.0, "disk->dram": 1.0}
    assert _Priced(lanes, UNDER, seconds=1.5).at({"cpu": 2.0}) == 4.0
    assert _Priced({}, UNDER, seconds=1.0).at({}) == 0.0
