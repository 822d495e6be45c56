"""Policies for reading a text: they fit, and they are as large as they can be."""

import pytest

from moebatch.calibration.reading_policy import reading_policy
from moebatch.errors import DoesNotFit
from moebatch.plan.problem import Problem
from moebatch.plan.search.refusal import too_large, too_small
from moebatch.spec.workload import Workload
from tests.plan.problems import SHAPE, SMALL, cpu_machine, problem


def reading(dram_gib: float, *, num_sequences: int = 128, small: bool = False) -> Problem:
    workload = Workload(
        num_sequences=num_sequences,
        mean_prompt_tokens=512.0,
        mean_new_tokens=1.0,
        max_total_tokens=513,
    )
    shape = SMALL if small else SHAPE
    # A text is read without scratch files.
    return problem(cpu_machine(dram_gib), shape=shape, workload=workload, kv_on_disk=False)


@pytest.mark.parametrize("dram_gib", [6.5, 7, 8, 12, 16, 64, 120])
def test_it_fits_and_lacks_room_for_one_more_expert(dram_gib: float) -> None:
    asked = reading(dram_gib)
    policy = reading_policy(asked)
    assert too_large(asked, policy) is None
    assert too_small(asked, policy) is None
    left = asked.capacity_bytes("dram") - asked.footprints(policy)["dram"].total_bytes
    expert_bytes = 3 * 4096 * 14336 * 2
    assert left < 1.01 * expert_bytes or policy.num_slots == 0


def test_with_enough_memory_nothing_streams() -> None:
    policy = reading_policy(reading(20, small=True))
    assert (policy.num_slots, policy.weights.dram, policy.batch_size) == (0, 1.0, 16)
    assert policy.tokens_per_pass == 8192


def test_little_memory_makes_smaller_passes() -> None:
    sizes = [reading_policy(reading(gib)).tokens_per_pass for gib in (4.4, 4.6, 5.5, 16)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 8192


def test_the_memory_that_a_refusal_asks_for_is_enough() -> None:
    with pytest.raises(DoesNotFit) as caught:
        reading_policy(reading(4))
    needed = int(str(caught.value).partition("resources.dram: ")[2].partition("MiB")[0])
    asked = reading(needed / 1024)
    assert too_large(asked, reading_policy(asked)) is None


def test_no_more_seats_than_sequences() -> None:
    assert reading_policy(reading(16, num_sequences=3)).batch_size == 3
