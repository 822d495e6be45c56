"""Names of tasks can be read back, so that a wait tells what it was for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.schedule.task import Kind, Task, reason_kind, task_named

NUMBERS = st.none() | st.integers(0, 10**6)
OTHERS = st.lists(st.integers(0, 10**6), max_size=3).map(tuple)


def task(others: tuple[int, ...], **names: Any) -> Task:
    """Others beside an expert, where there is one."""
    return Task(**names, others=() if names["expert"] is None else others)


TASKS = st.builds(
    task,
    others=OTHERS,
    kind=st.sampled_from(Kind),
    step=st.integers(0, 10**9),
    micro_batch=NUMBERS,
    expert=NUMBERS,
    page=NUMBERS,
    part=NUMBERS,
)


@given(TASKS)
def test_a_task_is_found_by_its_name(task: Task) -> None:
    found = task_named(str(task))
    assert found == task and found.experts == task.experts
    assert reason_kind(str(task)) == task.kind


def test_a_part_may_stand_apart_from_its_number() -> None:
    assert task_named("chunk(12, e5, part 2)") == Task(Kind.CHUNK, 12, expert=5, part=2)


@pytest.mark.parametrize("name", ["launch", "", "expert", "tea(3)", "expert(3, q1)", "expert(3) "])
def test_what_is_no_task_is_none(name: str) -> None:
    assert task_named(name) is None


def test_a_reason_that_is_no_task_is_a_kind_of_its_own() -> None:
    assert reason_kind("launch") == "launch"
