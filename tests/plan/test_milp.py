"""The solver's answers: as good as brute force, right by an independent check, and said so when
they are not."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moebatch.errors import DoesNotFit
from moebatch.plan.problem import Problem
from moebatch.plan.search.affine import AffineCandidate
from moebatch.plan.search.bounds import least_seconds, seconds_per_sequence
from moebatch.plan.search.candidates import candidates
from moebatch.plan.search.known import Known
from moebatch.plan.search.milp import NoSolution, make_solver, solve, violations
from moebatch.plan.search.planner import best_policy
from moebatch.spec.workload import Workload
from tests.few import examples
from tests.plan.problems import GIB, bounds_of, cpu_machine, gpu_machine, problem, screened_of

STEPS = 12
MANY = examples(20)
PROBLEMS = st.builds(
    lambda vram, dram, link, disk, prompt, new: problem(
        gpu_machine(vram, dram, link=link, disk=disk),
        workload=Workload.uniform(prompt_tokens=prompt, new_tokens=new, num_sequences=500),
    ),
    st.floats(8, 60),
    st.floats(10, 150),
    st.floats(3e9, 60e9),
    st.floats(0.5e9, 8e9),
    st.integers(8, 1000),
    st.integers(8, 300),
)


def grid(item: AffineCandidate) -> list[dict[tuple[str, str], float]]:
    """All shares in steps of one twelfth."""
    steps = [step / STEPS for step in range(STEPS + 1)]
    found = []
    for values in product(steps, repeat=len(item.candidate.variables)):
        shares = dict(zip(item.candidate.variables, values, strict=True))
        by_kind = {kind: sum(s for (k, _), s in shares.items() if k == kind) for kind, _ in shares}
        if all(total <= 1 + 1e-9 for total in by_kind.values()):
            found.append(shares)
    return found


def fits(asked: Problem, item: AffineCandidate, shares: dict[tuple[str, str], float]) -> bool:
    return all(
        formula.at(shares) <= asked.capacity_bytes(level) for level, formula in item.memory.items()
    )


def few_items(asked: Problem, data: st.DataObject) -> list[AffineCandidate]:
    pool = list(candidates(asked))
    chosen = data.draw(st.lists(st.sampled_from(range(len(pool))), min_size=1, max_size=4))
    return [Known(asked).affine(pool[index]) for index in chosen]


@MANY
@given(PROBLEMS, st.data())
def test_no_grid_of_shares_beats_the_solver(asked: Problem, data: st.DataObject) -> None:
    items = few_items(asked, data)
    best = min(
        (
            seconds_per_sequence(item, shares)
            for item in items
            for shares in grid(item)
            if fits(asked, item, shares)
        ),
        default=None,
    )
    assume(best is not None)
    solution = solve(asked, items, unit_s=best)
    assert solution.seconds_per_sequence <= best * (1 + 2e-4)
    assert violations(asked, solution) == []


@MANY
@given(PROBLEMS, st.data())
def test_bounds_hold_the_optimum_between_them(asked: Problem, data: st.DataObject) -> None:
    (item, *_) = few_items(asked, data)
    found = bounds_of(asked, item)
    try:
        solution = solve(asked, [item], unit_s=max(found.lower_s, 1e-6))
    except NoSolution:
        assert found.upper_s == float("inf")
        return
    # What breaks ties may cost one part in 10,000.
    assert solution.seconds_per_sequence >= found.lower_s * (1 - 1e-6)
    assert solution.seconds_per_sequence <= found.upper_s * (1 + 2e-4)
    assert found.lower_s >= least_seconds(Known(asked), item.candidate) * (1 - 1e-9)


@MANY
@given(PROBLEMS, st.data())
def test_coefficients_are_those_of_cost_and_footprint_everywhere(
    asked: Problem, data: st.DataObject
) -> None:
    """Both are affine in the shares, so what the corners say holds between them."""
    from moebatch.plan.search.affine import footprints_in_parts
    from moebatch.plan.search.bounds import seconds_under

    (item, *_) = few_items(asked, data)
    shares = data.draw(st.sampled_from(grid(item)))
    candidate = item.candidate
    policy = candidate.placed(shares)
    assert seconds_per_sequence(item, shares) == pytest.approx(
        seconds_under(asked, candidate, policy), rel=1e-6
    )
    for level, footprint in footprints_in_parts(asked, candidate, policy).items():
        assert item.memory[level].at(shares) == pytest.approx(footprint.total_bytes, abs=1e5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "asked",
    [
        problem(cpu_machine(24), kv_on_disk=False),
        problem(gpu_machine()),
        problem(gpu_machine(dram_gib=40), kv_on_disk=False),
        problem(workload=Workload.uniform(prompt_tokens=77, new_tokens=128), kv_on_disk=False),
    ],
    ids=["cpu", "gpu", "gpu with disk", "endless"],
)
def test_screening_drops_no_candidate_that_is_better(asked: Problem) -> None:
    best = best_policy(asked).solution.seconds_per_sequence
    known = Known(asked)
    everything = [bounds_of(asked, known.affine(c)) for c in candidates(asked)]
    assert min(found.lower_s for found in everything if found.upper_s < float("inf")) <= best * (
        1 + 1e-6
    )
    pool = screened_of(asked)
    assert best <= min(found.upper_s for _, found in pool) * (1 + 2e-4)
    assert min(found.upper_s for found in everything) >= best * (1 - 2e-4)


def test_the_checker_finds_what_is_wrong() -> None:
    asked = problem(gpu_machine())
    solution = best_policy(asked).solution
    assert violations(asked, solution) == []
    slower = replace(solution, seconds_per_sequence=solution.seconds_per_sequence * 1.1)
    assert any("per sequence" in found for found in violations(asked, slower))
    everything_above = replace(solution, shares=dict.fromkeys(solution.shares, 0.0))
    assert any(found.startswith("vram") for found in violations(asked, everything_above))
    asked_for_more = dict.fromkeys([("weights", "dram"), ("weights", "disk")], 0.8)
    too_much = replace(solution, shares=asked_for_more)
    assert any("sum to" in found for found in violations(asked, too_much))
    smaller = asked.with_capacity("dram", 20 * GIB)
    assert any(found.startswith("dram") for found in violations(smaller, solution))


@pytest.mark.exhaustive
def test_without_a_fitting_candidate_there_is_no_solution() -> None:
    asked = problem(cpu_machine(2))
    items = [Known(asked).affine(candidate) for candidate in candidates(asked)][:3]
    with pytest.raises(NoSolution, match="Infeasible"):
        solve(asked, items, unit_s=1.0)
    with pytest.raises(DoesNotFit):
        best_policy(asked)


def test_the_solver_is_quiet_repeatable_and_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    asked = problem(gpu_machine())
    first, second = (best_policy(asked) for _ in range(2))
    assert first.policy == second.policy
    assert capfd.readouterr() == ("", "")
    assert make_solver().timeLimit


def test_constraints_carry_names() -> None:
    from moebatch.plan.search.milp import _Program

    asked = problem(gpu_machine())
    items = [item for item, _ in screened_of(asked)][:2]
    names = set(_Program(asked, items, 1.0).lp.constraints)
    assert {"one_policy", "attention_on_gpu", "ffn_on_gpu"} <= names
    assert {"memory_vram_0", "memory_dram_0", "memory_disk_0", "share_weights_0"} <= names
    assert {"lane_gpu_0_0", "lane_dram_to_vram_0_0", "lane_cpu_0_0"} <= names
