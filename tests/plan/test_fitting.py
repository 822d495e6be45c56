"""Policies for schedules that a user names."""

from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.errors import DoesNotFit
from moebatch.plan.answer import best_for
from moebatch.plan.expert_choice import Wishes
from moebatch.plan.fitting import fitted, policy_for, with_room
from moebatch.plan.prediction import predict
from moebatch.plan.runnable import not_runnable
from moebatch.plan.search.planner import best_policy
from moebatch.plan.search.refusal import too_small
from moebatch.schedule.registry import SCHEDULES, schedule_faults
from moebatch.schedule.steps.attention import LOOK_AHEAD
from moebatch.spec.machine.hardware import Hardware
from tests.plan.problems import SHAPE, SMALL, cpu_machine, gpu_machine, problem


def test_a_schedule_that_looks_ahead_gets_micro_batches_enough() -> None:
    asked = problem(gpu_machine())
    policy = replace(best_policy(asked).policy, batch_size=1000, micro_batch_size=1000)
    other = policy_for(replace(policy, schedule="klotski"), "cgopipe", asked)
    assert other.num_micro_batches > LOOK_AHEAD
    assert (
        policy_for(replace(policy, schedule="cgopipe"), "klotski", asked).micro_batch_size == 1000
    )


def test_a_policy_keeps_its_micro_batches_with_its_own_schedule() -> None:
    asked = problem(gpu_machine())
    policy = replace(
        best_policy(asked).policy, schedule="cgopipe", batch_size=1000, micro_batch_size=1000
    )
    assert policy_for(policy, "cgopipe", asked).micro_batch_size == 1000


@pytest.mark.few(4)
@pytest.mark.parametrize("machine", [cpu_machine(), gpu_machine()], ids=lambda one: one.name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_for_a_schedule_is_as_good_as_another_plan_under_it(
    schedule: str, machine: Hardware
) -> None:
    asked = problem(machine, shape=SMALL)
    under_it = replace(asked, schedule=schedule)
    policy = best_policy(under_it).policy
    assert policy.schedule == schedule
    assert not [*schedule_faults(policy)]
    assert asked.fits(policy) and too_small(asked, policy) is None
    other = policy_for(best_policy(asked).policy, schedule, asked)
    if asked.fits(with_room(asked, other)):
        least = 0.97 * predict(asked, with_room(asked, other)).tokens_per_s
        assert predict(asked, policy).tokens_per_s >= least


def test_a_plan_for_a_schedule_of_a_file_names_the_file() -> None:
    path = Path(__file__).parents[1] / "schedule" / "own_schedule.py"
    asked = replace(problem(cpu_machine(), shape=SMALL), schedule=f"{path}:mine")
    assert best_policy(asked).policy.schedule == asked.schedule


def test_a_plan_for_a_schedule_leaves_room_for_what_it_needs() -> None:
    """Two layers of experts in pages: the best plan of all has none left on a small GPU."""
    asked = problem(gpu_machine(14), shape=SHAPE)
    other = policy_for(best_policy(asked).policy, "cgopipe", asked)
    assert not asked.fits(with_room(asked, other))
    assert asked.fits(best_policy(replace(asked, schedule="cgopipe")).policy)


def test_a_refusal_says_that_another_schedule_would_fit() -> None:
    asked = problem(gpu_machine(5), shape=SHAPE)
    best_policy(asked)
    with pytest.raises(DoesNotFit, match="Without --schedule cgopipe it fits"):
        best_policy(replace(asked, schedule="cgopipe"))


@pytest.mark.parametrize(("vram", "dram"), [(15, 60), (40, 60), (15, 96), (60, 16), (120, 16)])
def test_a_cache_that_a_job_asks_for_sends_experts_to_disk_where_main_memory_is_full(
    vram: int, dram: int
) -> None:
    asked = problem(gpu_machine(vram, dram))
    policy = best_for(asked, Wishes(cache="lru")).policy
    assert asked.fits(policy)
    assert policy.cache == ("static" if policy.weights.vram == 1 else "lru")
    assert [*not_runnable(asked, policy)] == []


@pytest.mark.parametrize(("vram", "dram"), [(15, 60), (40, 40)])
def test_experts_that_leave_a_gpu_for_another_schedule_go_to_disk_where_main_memory_is_full(
    vram: int, dram: int
) -> None:
    asked = problem(gpu_machine(vram, dram))
    policy = best_policy(asked).policy
    other = fitted(asked, policy_for(policy, "cgopipe", asked))
    assert other.weights.vram < policy.weights.vram and other.weights.disk > policy.weights.disk
    assert asked.fits(other)


def test_no_more_experts_go_to_disk_than_have_to() -> None:
    asked = problem(gpu_machine(15, 60))
    policy = best_for(asked, Wishes(cache="lru")).policy
    fewer = policy.weights.disk - 1 / asked.num_experts
    weights = replace(policy.weights, dram=policy.weights.dram + 1 / asked.num_experts, disk=fewer)
    assert [*asked.overfull(replace(policy, weights=weights))] == ["dram"]


def test_without_a_disk_a_refusal_says_that_a_static_cache_needs_less() -> None:
    machine = gpu_machine(40, 80)
    levels = {name: level for name, level in machine.levels.items() if name != "disk"}
    links = {name: link for name, link in machine.links.items() if "disk" not in name}
    asked = problem(replace(machine, levels=levels, links=links))
    assert best_for(asked).policy.cache == "static"
    with pytest.raises(DoesNotFit, match=r"take experts\.cache: static, which needs less main mem"):
        best_for(asked, Wishes(cache="lru"))


def test_sizes_of_a_cache_go_where_it_has_to_shrink() -> None:
    asked = problem(gpu_machine())
    policy = replace(policy_for(best_policy(asked).policy, "klotski", asked), num_slots=6)
    sizes = (SHAPE.num_experts,) * len(SHAPE.moe_layers)
    all_there = asked.with_residents(replace(policy, cache="lru", cache_sizes=sizes), 256)
    shrunk = fitted(asked, all_there)
    assert (shrunk.cache, shrunk.cache_sizes) == ("lru", ()) and shrunk.weights.vram < 1
