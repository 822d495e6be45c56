"""What the planner leaves out: only what cannot matter, and it works nothing out twice."""

from dataclasses import replace
from itertools import product

import pytest

from moebatch.layout.lanes import LaneSeconds
from moebatch.layout.load import PassLoad
from moebatch.plan.advice import FACTOR, promising
from moebatch.plan.pricing.pass_tasks import PassTasks
from moebatch.plan.problem import Problem
from moebatch.plan.search.bounds import (
    least_experts_s,
    least_seconds,
    least_with_room,
    lower_seconds,
)
from moebatch.plan.search.candidates import Candidate, candidates
from moebatch.plan.search.known import Known
from moebatch.plan.search.milp import solve
from moebatch.plan.search.neighbours import neighbours
from moebatch.plan.search.planner import (
    MOST_CANDIDATES,
    _solved,
    best_policy,
    best_seconds,
    screen,
)
from moebatch.plan.search.ranking import ranked_among
from moebatch.plan.search.widest import _pages_with_room
from moebatch.spec.machine.hardware import LinkName
from moebatch.spec.policy.policy import Policy
from moebatch.spec.workload import Workload
from tests.plan.problems import GIB, bounds_of, cpu_machine, gpu_machine, problem, screened_of

PROBLEMS = {
    "cpu": problem(cpu_machine(16)),
    "gpu": problem(gpu_machine()),
    "gpu with disk": problem(gpu_machine(dram_gib=40)),
    "larger gpu": problem(gpu_machine(vram_gib=60)),
    "endless": problem(workload=Workload.uniform(prompt_tokens=77, new_tokens=128)),
}
every_problem = pytest.mark.parametrize("asked", PROBLEMS.values(), ids=PROBLEMS.keys())


def some_candidates(asked: Problem) -> list[Candidate]:
    return list(candidates(asked))[::7]


@pytest.mark.few(2)
@every_problem
def test_screening_finds_what_looking_at_all_finds(asked: Problem) -> None:
    known = Known(asked)
    everything = [bounds_of(asked, known.affine(candidate)) for candidate in candidates(asked)]
    best_s = min(limits.upper_s for limits in everything)
    assert best_seconds(screened_of(asked)) == pytest.approx(best_s, rel=1e-12)


@pytest.mark.few(2)
@every_problem
def test_candidates_come_by_the_least_that_they_take_and_no_more_are_priced(asked: Problem) -> None:
    some, known = some_candidates(asked), Known(asked)
    by_least = sorted(
        ((least_seconds(known, candidate), candidate) for candidate in some),
        key=lambda pair: pair[0],
    )
    asked_first = Known(asked)
    ranking = ranked_among(asked_first, some)
    assert next(iter(ranking)) == by_least[0]
    assert len(asked_first._limits) < len(known._limits)
    assert [*ranking] == by_least
    assert [*ranking] == by_least
    for least_s, candidate in by_least:
        assert least_experts_s(known, candidate) <= least_s * (1 + 1e-12)


@pytest.mark.few(2)
@every_problem
def test_lanes_that_candidates_share_are_those_of_each(asked: Problem) -> None:
    known = Known(asked)
    for candidate in some_candidates(asked):
        known.affine(candidate)
    for (load, policy), lanes in known._limits.items():
        # A problem of its own, of which nothing is known yet.
        assert lanes == replace(asked).cost_of(load, policy).limits


@pytest.mark.few(2)
@every_problem
def test_buffers_that_policies_share_are_those_of_each(asked: Problem) -> None:
    for policy in (candidate.policy for candidate in candidates(asked)):
        assert asked.memory.buffers(policy) == replace(asked).memory.buffers(policy)


def test_nothing_that_is_known_of_candidates_depends_on_capacities() -> None:
    asked = PROBLEMS["gpu with disk"]
    larger = asked.with_capacity("vram", 64 * GIB).with_capacity("dram", 200 * GIB)
    for candidate in some_candidates(asked):
        assert Known(asked).affine(candidate) == Known(larger).affine(candidate)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROBLEMS["gpu with disk"].hardware.links)
def test_what_is_known_at_other_rates_is_what_would_be_worked_out(name: LinkName) -> None:
    asked = PROBLEMS["gpu with disk"]
    faster = with_faster(asked, name)
    known = Known(asked)
    some = some_candidates(asked)
    for candidate in some:
        known.affine(candidate)
    changed, fresh = known.at_rates_of(faster), Known(faster)
    assert [*map(changed.affine, some)] == [*map(fresh.affine, some)]


@pytest.mark.few(2)
@every_problem
def test_no_placement_takes_less_than_if_a_level_held_nothing_but_experts(asked: Problem) -> None:
    known = Known(asked)
    for candidate in some_candidates(asked):
        least_s = least_with_room(asked, known, candidate)
        assert least_s <= lower_seconds(asked, known.affine(candidate)) * (1 + 1e-9)


@pytest.mark.few(2)
@every_problem
def test_a_policy_is_told_to_be_faster_as_its_seconds_say(asked: Problem) -> None:
    policies = {candidate.policy for candidate in some_candidates(asked)}
    known = Known(asked)
    limits = sorted(map(known.mean_s, policies))[:: len(policies) // 4]
    for policy, limit_s in product(policies, limits):
        assert Known(asked).is_faster(policy, limit_s) == (known.mean_s(policy) < limit_s)


@pytest.mark.few(2)
@every_problem
def test_the_solver_needs_no_candidate_that_is_left_out(asked: Problem) -> None:
    near = screened_of(asked)[:MOST_CANDIDATES]
    of_all = solve(asked, [item for item, _ in near], unit_s=near[0][1].upper_s)
    solution = _solved(asked, near)
    assert solution.chosen == of_all.chosen
    assert solution.seconds_per_sequence == pytest.approx(of_all.seconds_per_sequence, rel=1e-6)


@pytest.mark.few(2)
@every_problem
def test_a_widest_cache_leaves_no_room_for_another_page(asked: Problem) -> None:
    for policy in neighbours(asked, best_policy(asked).policy):
        pages = _pages_with_room(asked, policy, 10**9)
        assert not pages or asked.fits(replace(policy, num_kv_pages=pages))
        too_many = max(pages + 1, asked.fewest_pages)
        assert not asked.fits(replace(policy, num_kv_pages=too_many))


def test_no_arithmetic_of_a_pass_is_worked_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[object] = []
    computing = PassTasks.computing

    def counted(self: PassTasks) -> object:
        asked_for.append(self.key)
        return computing(self)

    monkeypatch.setattr(PassTasks, "computing", counted)
    screened_of(PROBLEMS["gpu with disk"])
    assert len(asked_for) == len(set(asked_for)) > 100


def test_policies_with_other_micro_batches_or_places_compute_otherwise() -> None:
    load = PassLoad(decode_sequences=64, decode_positions=6400, prompt_tokens=700, logits_rows=64)
    asked = PROBLEMS["gpu"]
    policies = list({candidate.policy for candidate in some_candidates(asked)})
    by_key: dict[object, LaneSeconds] = {}
    for policy in policies:
        key = PassTasks(prices=asked.prices, load=load, policy=policy).key
        assert by_key.setdefault(key, seconds(asked, load, policy)) == seconds(asked, load, policy)
    assert len(by_key) > 1


def seconds(asked: Problem, load: PassLoad, policy: Policy) -> LaneSeconds:
    return PassTasks(prices=asked.prices, load=load, policy=policy).computing_s


@pytest.mark.few(1)
@every_problem
def test_advice_is_what_looking_at_all_candidates_gives(asked: Problem) -> None:
    planned = best_policy(asked)
    now_s = planned.solution.seconds_per_sequence
    said = {better.change.what_if: better.speedup for better in promising(asked, planned)}
    assert len(planned.candidates) <= MOST_CANDIDATES
    for name in asked.hardware.links:
        best_s = least_with_faster(asked, name, [item.candidate for item in planned.candidates])
        rate = asked.hardware.links[name].bandwidth * FACTOR
        expected = now_s / best_s if now_s / best_s >= 1.01 else None
        assert said.get(f"{name}={rate / 1e9:.4g}GB/s") == expected


def least_with_faster(asked: Problem, name: LinkName, some: list[Candidate]) -> float:
    faster = with_faster(asked, name)
    known = Known(faster)
    return best_seconds(screen(faster, [(0.0, candidate) for candidate in some], known))


def with_faster(asked: Problem, name: LinkName) -> Problem:
    return asked.with_link_rate(name, asked.hardware.links[name].bandwidth * FACTOR)


def test_a_lane_that_is_twice_as_fast_takes_half_and_the_others_what_they_took() -> None:
    asked = PROBLEMS["gpu"]
    item = Known(asked).affine(best_policy(asked).solution.chosen.candidate)
    faster = item.faster({"dram->vram"}, 2.0)
    for before, after in zip(item.lanes, faster.lanes, strict=True):
        assert after["dram->vram"].constant == before["dram->vram"].constant / 2
        assert {**after, "dram->vram": None} == {**before, "dram->vram": None}
    twice = asked.with_link_rate("dram->vram", 2 * asked.hardware.links["dram->vram"].bandwidth)
    exact = replace(item, lanes=Known(twice).affine(item.candidate).lanes)
    assert lower_seconds(asked, faster) <= lower_seconds(asked, exact) * (1 + 1e-9)
