"""The policy as a mixed integer program: MoE-Lightning's Eq 12-14 with disk as a level.

Sets        c candidates (batch N, micro-batch, tokens of a pass, A_g, F_g), f phases of the job,
            l lanes, m levels
Variables   z_c           binary: candidate c is the policy
            A_g, F_g      binary: attention, experts are computed on the GPU
            w_c,m  k_c,m  share of weights, of keys and values on level m below the computing one
            t_c,f         seconds of a pass of phase f
Minimise    sum_c,f n_c,f t_c,f  +  a little for the batch and for shares on lower levels
Subject to  one_policy    sum_c z_c = 1
            share_*       sum_m w_c,m <= z_c, the same for k
            lane_*        t_c,f >= time of lane l, or of computing with its waits for keys and
                          values, affine in the shares and z_c
            turns_*       t_c,f >= time of lanes together that take turns: reads and writes of
                          the disk; CPU and GPU, where they wait for each other
            memory_*      bytes on level m, affine in the shares and z_c, <= capacity_m z_c
            attention_on_gpu, ffn_on_gpu    A_g = sum of z_c over candidates that do, F_g alike

Shares belong to a candidate and vanish with its z_c. So every candidate is a polytope of its own,
there are no big constants, and the relaxation is the convex hull of all of them (Balas): the
solver finds integer solutions without branching.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite

import pulp

from moebatch.errors import StorageError
from moebatch.layout.lanes import in_turns
from moebatch.plan.problem import Problem
from moebatch.plan.search.affine import Affine, AffineCandidate, footprints_in_parts
from moebatch.plan.search.bounds import seconds_under
from moebatch.plan.search.candidates import KINDS, Variable
from moebatch.spec.machine.hardware import LevelName

RELATIVE_GAP = 1e-6
TIME_LIMIT_S = 20
_SMALLEST_BATCH = 1e-4
"""Share of the objective that the largest batch would cost if another one were as fast: a batch
that brings less than this is not worth its memory."""
_FEWEST_MICRO_BATCHES = 1e-5
"""The same for micro-batches of one sequence: each costs launches that are not counted."""
_LOWER_LEVEL: Mapping[LevelName, float] = {"vram": 0.0, "dram": 1e-6, "disk": 1e-5}
"""What a share on a level costs beside its time: of placements that are as fast, the one that
keeps things high leaves the slower links free."""
_SLACK = 1e-6
"""Share of a level that stays free, so that what the solver takes for equal still fits."""
_LEAST_SLOPE = 1e-12
_SHARE_TOLERANCE = 1e-6
_MEMORY_TOLERANCE = 1e-6
_TIME_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """What the solver found."""

    chosen: AffineCandidate
    shares: Mapping[Variable, float]
    seconds_per_sequence: float
    """Without what breaks ties."""
    solver: str


class NoSolution(Exception):
    """No candidate fits, or the solver gave up."""


def solve(problem: Problem, items: Sequence[AffineCandidate], *, unit_s: float) -> Solution:
    """The best of `items` with its shares; `unit_s` is about what it takes per sequence.

    Raises NoSolution, and StorageError where a solver cannot write its files.
    """
    program = _Program(problem, items, unit_s)
    solver = make_solver()
    try:
        program.lp.solve(solver)
    except OSError as error:
        folder = tempfile.gettempdir()
        message = f"{folder}: the solver cannot write its files: {error.strerror}"
        raise StorageError(f"{message}; make room, or set TMPDIR to another folder") from error
    status = pulp.LpStatus[program.lp.status]
    if status != "Optimal":
        raise NoSolution(status)
    return program.solution(solver.name)


def make_solver() -> pulp.LpSolver:
    """HiGHS where it is installed, else the CBC that comes with PuLP; both quiet and repeatable."""
    highs = pulp.HiGHS(msg=False, gapRel=RELATIVE_GAP, timeLimit=TIME_LIMIT_S, threads=1)
    if highs.available():
        return highs
    return pulp.PULP_CBC_CMD(
        msg=False, gapRel=RELATIVE_GAP, timeLimit=TIME_LIMIT_S, threads=1, options=["randomSeed 1"]
    )


class _Program:
    """Variables and constraints. Times are in units of `unit_s`, memory in those of the level's
    capacity, so that all figures are near one."""

    def __init__(self, problem: Problem, items: Sequence[AffineCandidate], unit_s: float) -> None:
        self._problem = problem
        self._items = items
        self._unit_s = unit_s
        self.lp = pulp.LpProblem("policy", pulp.LpMinimize)
        self._chosen = [
            pulp.LpVariable(f"z_{index}", cat=pulp.LpBinary) for index in range(len(items))
        ]
        self._shares = [self._share_variables(index) for index in range(len(items))]
        self._times = [
            [pulp.LpVariable(f"t_{index}_{phase}", lowBound=0) for phase in range(len(item.lanes))]
            for index, item in enumerate(items)
        ]
        self._add_objective()
        self.lp += pulp.lpSum(self._chosen) == 1, "one_policy"
        self._add_places()
        for index in range(len(items)):
            self._add_shares(index)
            self._add_lanes(index)
            self._add_memory(index)

    def solution(self, solver: str) -> Solution:
        """Reads the chosen candidate and its shares."""
        index = max(range(len(self._items)), key=lambda i: self._chosen[i].value())
        times = zip(self._items[index].candidate.phases, self._times[index], strict=True)
        return Solution(
            chosen=self._items[index],
            shares={v: share.value() for v, share in self._shares[index].items()},
            seconds_per_sequence=self._unit_s * sum(p.num_passes * t.value() for p, t in times),
            solver=solver,
        )

    def _share_variables(self, index: int) -> dict[Variable, pulp.LpVariable]:
        return {
            (kind, level): pulp.LpVariable(f"{kind}_{level}_{index}", lowBound=0, upBound=1)
            for kind, level in self._items[index].candidate.variables
        }

    def _add_objective(self) -> None:
        job_time, ties = [], []
        ties += [_LOWER_LEVEL[v[1]] * share for of in self._shares for v, share in of.items()]
        largest = max(item.candidate.policy.batch_size for item in self._items)
        for item, chosen, times in zip(self._items, self._chosen, self._times, strict=True):
            phases = zip(item.candidate.phases, times, strict=True)
            job_time += [phase.num_passes * time for phase, time in phases]
            policy = item.candidate.policy
            ties.append(_SMALLEST_BATCH * policy.batch_size / largest * chosen)
            ties.append(_FEWEST_MICRO_BATCHES * policy.num_micro_batches / largest * chosen)
        self.lp += pulp.lpSum(job_time) + pulp.lpSum(ties), "seconds_per_sequence"

    def _add_places(self) -> None:
        for name in ("attention_on_gpu", "ffn_on_gpu"):
            on_gpu = pulp.LpVariable(name, cat=pulp.LpBinary)
            those = [
                chosen
                for item, chosen in zip(self._items, self._chosen, strict=True)
                if getattr(item.candidate.policy, name)
            ]
            self.lp += on_gpu == pulp.lpSum(those), name

    def _add_shares(self, index: int) -> None:
        for kind in KINDS:
            below = [share for (of, _), share in self._shares[index].items() if of == kind]
            if below:
                self.lp += pulp.lpSum(below) <= self._chosen[index], f"share_{kind}_{index}"

    def _add_lanes(self, index: int) -> None:
        for phase, lanes in enumerate(self._items[index].lanes):
            time = self._times[index][phase]
            for lane, formula in lanes.items():
                name = f"lane_{lane.replace('->', '_to_')}_{index}_{phase}"
                self.lp += time >= self._expression(index, formula, self._unit_s), name
            for number, group in enumerate(in_turns(self._items[index].candidate.policy)):
                turns = [
                    self._expression(index, lanes[lane], self._unit_s)
                    for lane in group
                    if lane in lanes
                ]
                if len(turns) > 1:
                    self.lp += time >= pulp.lpSum(turns), f"turns_{number}_{index}_{phase}"

    def _add_memory(self, index: int) -> None:
        for level, formula in self._items[index].memory.items():
            capacity = max(1, self._problem.capacity_bytes(level))
            used = self._expression(index, formula, capacity)
            self.lp += used <= (1 - _SLACK) * self._chosen[index], f"memory_{level}_{index}"

    def _expression(self, index: int, formula: Affine, unit: float) -> pulp.LpAffineExpression:
        terms = [(self._chosen[index], formula.constant / unit)]
        terms += [(self._shares[index][v], slope / unit) for v, slope in formula.slopes.items()]
        return pulp.LpAffineExpression(
            [(variable, slope) for variable, slope in terms if abs(slope) > _LEAST_SLOPE]
        )


def violations(problem: Problem, solution: Solution) -> list[str]:
    """What is wrong with a solution, in words; empty if nothing is: cost and footprint themselves
    are asked, not their coefficients."""
    found = list(_share_violations(solution.shares))
    if found:
        return found
    candidate = solution.chosen.candidate
    policy = candidate.placed(solution.shares)
    for level, footprint in footprints_in_parts(problem, candidate, policy).items():
        capacity = problem.capacity_bytes(level)
        if footprint.total_bytes > capacity * (1 + _MEMORY_TOLERANCE):
            found.append(f"{level}: {footprint.total_bytes} bytes of {capacity}")
    seconds = seconds_under(problem, candidate, policy)
    if not isfinite(seconds):
        found.append("takes for ever")
    elif not isclose(seconds, solution.seconds_per_sequence, rel_tol=_TIME_TOLERANCE):
        said = solution.seconds_per_sequence
        found.append(f"takes {seconds:.6g} s per sequence, not {said:.6g}")
    return found


def _share_violations(shares: Mapping[Variable, float]) -> Iterator[str]:
    for (kind, level), share in shares.items():
        if not -_SHARE_TOLERANCE <= share <= 1 + _SHARE_TOLERANCE:
            yield f"{kind} on {level}: a share of {share}"
    for kind in KINDS:
        total = sum(share for (of, _), share in shares.items() if of == kind)
        if total > 1 + _SHARE_TOLERANCE:
            yield f"{kind}: shares below sum to {total}"
