"""How lanes share the time of a device."""

import pytest

from moebatch.store import statistics
from moebatch.store.statistics import BusyClock


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(statistics, "time", found)
    return found


def test_a_lane_alone_is_busy_while_anything_is_in_flight(clock: Clock) -> None:
    busy = BusyClock()
    busy.enter()
    clock.now_s += 2.0
    busy.enter()
    clock.now_s += 3.0
    assert busy.total_s == pytest.approx(5.0)
    busy.leave()
    clock.now_s += 1.0
    busy.leave()
    clock.now_s += 7.0
    assert busy.total_s == pytest.approx(6.0)


def test_time_of_a_device_is_divided_among_all_that_is_in_flight(clock: Clock) -> None:
    reading = BusyClock()
    writing = BusyClock(reading.device)
    reading.enter()
    reading.enter()
    clock.now_s += 2.0
    writing.enter(is_task=True)
    clock.now_s += 3.0
    assert (reading.total_s, writing.total_s) == (pytest.approx(4.0), pytest.approx(1.0))
    assert reading.device.num_tasks == 1
    reading.leave()
    clock.now_s += 4.0
    writing.leave(is_task=True)
    clock.now_s += 1.0
    reading.leave()
    clock.now_s += 9.0
    assert (reading.total_s, writing.total_s) == (pytest.approx(7.0), pytest.approx(3.0))
    assert reading.device.num_tasks == 0
