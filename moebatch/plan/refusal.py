"""Why nothing fits, and the smallest change that would."""

from dataclasses import replace

from moebatch.errors import DoesNotFit
from moebatch.plan.candidates import FEWEST_SLOTS, candidates
from moebatch.plan.footprint import KV_TERM, Footprint
from moebatch.plan.problem import Problem
from moebatch.spec.hardware import LevelName
from moebatch.spec.policy import Placement, Policy
from moebatch.units import format_bytes

_MIB = 2**20


def refusal(problem: Problem) -> DoesNotFit:
    """Levels that are too small even for the least that runs: need, have, largest term, knob."""
    policy = min(_least_policies(problem), key=lambda policy: _missing(problem, policy))
    lines = [
        line
        for level, footprint in problem.footprints(policy).items()
        if footprint.total_bytes > problem.capacity_bytes(level)
        for line in _lines(problem, level, footprint)
    ]
    return DoesNotFit("\n".join(lines or ["no policy keeps within the budgets of all levels"]))


def too_large(problem: Problem, policy: Policy) -> str | None:
    """Levels that this very policy does not fit into; None if it fits."""
    lines = [
        f"{level}: the policy needs {format_bytes(footprint.total_bytes)}, there are "
        f"{format_bytes(problem.capacity_bytes(level))}. "
        f"Largest term: {footprint.largest[0]}, {format_bytes(footprint.largest[1])}."
        for level, footprint in problem.footprints(policy).items()
        if footprint.total_bytes > problem.capacity_bytes(level)
    ]
    return "\n".join(lines) or None


def _least_policies(problem: Problem) -> list[Policy]:
    """The first candidate of every place of computation, everything movable moved down."""
    least: dict[tuple[bool, bool], Policy] = {}
    for candidate in candidates(problem, slots=FEWEST_SLOTS):
        policy = candidate.policy
        if policy.num_slots or not problem.hardware.disk:
            placed = replace(
                policy,
                weights=Placement(**{candidate.weight_levels[-1]: 1.0}),
                kv_cache=Placement(**{candidate.kv_levels[-1]: 1.0}),
            )
            least.setdefault((policy.attention_on_gpu, policy.ffn_on_gpu), placed)
    return list(least.values())


def _missing(problem: Problem, policy: Policy) -> int:
    return sum(
        max(0, footprint.total_bytes - problem.capacity_bytes(level))
        for level, footprint in problem.footprints(policy).items()
    )


def _lines(problem: Problem, level: LevelName, needed: Footprint) -> list[str]:
    name, num_bytes = needed.largest
    shorten = "; lower max_tokens or shorten the longest prompt" if name == KV_TERM else ""
    enough = -(-needed.total_bytes // _MIB)
    return [
        f"{level}: needs {format_bytes(needed.total_bytes)} at the least, "
        f"has {format_bytes(problem.capacity_bytes(level))} (resources.{level}).",
        f"Largest term: {name}, {format_bytes(num_bytes)}{shorten}.",
        f"Smallest change that fits: resources.{level}: {enough}MiB "
        f"(for another machine: --what-if {level}={enough}MiB).",
    ]
