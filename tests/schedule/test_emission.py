"""What schedules launch, counted."""

import pytest

from moebatch.schedule.drivers.emission import computes_together, launched
from moebatch.schedule.registry import SCHEDULES
from moebatch.schedule.steps.kv_route import Place, route
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LevelName

ATTENDED_ON_CPU = {Kind.PRE, Kind.OFF, Kind.ATTN, Kind.LOAD}
KV = {Kind.KV_READ, Kind.KV_UP, Kind.KV_DOWN, Kind.KV_WRITE}


@pytest.mark.parametrize("home", ["vram", "dram", "disk"])
@pytest.mark.parametrize("top", ["vram", "dram"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_micro_batch_attends_once_in_every_layer(
    name: str, top: Place, home: LevelName
) -> None:
    if home == "vram" and top == "dram":
        return
    for attends_on_cpu in {False, top == "vram" and home != "vram"}:
        decode, prompt = launched(name, top, home, attends_on_cpu=attends_on_cpu)
        expected = ATTENDED_ON_CPU if attends_on_cpu else {Kind.ATTEND}
        assert {kind: decode[kind] for kind in expected} == dict.fromkeys(expected, 1)
        assert prompt[Kind.ATTEND] == 1
        place: Place = "dram" if attends_on_cpu else top
        assert decode.keys() & KV == route(home, place, top).keys()
        assert {kind: prompt[kind] for kind in KV & prompt.keys()} == dict.fromkeys(
            route(home, top, top), 1
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_says_of_itself_whether_experts_run_for_every_micro_batch(name: str) -> None:
    decode, _ = launched(name, "vram", "vram", attends_on_cpu=False)
    of_batch = Kind.EXPERT in decode or Kind.POST in decode
    assert of_batch == (SCHEDULES[name].traits.runs == "batch")


@pytest.mark.parametrize("name", SCHEDULES)
def test_experts_that_run_over_the_pass_are_computed_together(name: str) -> None:
    assert computes_together(name, "vram") == (SCHEDULES[name].traits.runs == "pass")


def test_a_schedule_that_takes_experts_one_by_one_says_so() -> None:
    assert not computes_together("tests/schedule/own_schedule.py:mine", "vram")
