"""Why nothing fits, and the smallest change that would."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moebatch.errors import DoesNotFit
from moebatch.layout.buffers import KV_TERM
from moebatch.layout.footprint import Footprint
from moebatch.plan.problem import Problem
from moebatch.plan.search.affine import footprints_in_parts
from moebatch.plan.search.bounds import filled
from moebatch.plan.search.candidates import FEWEST_SLOTS, candidates
from moebatch.plan.search.known import Known
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Policy
from moebatch.units import format_bytes, format_unlike

_MIB = 2**20
_Needs = Mapping[LevelName, Footprint]


def refusal(problem: Problem) -> DoesNotFit:
    """Levels that are too small even for the least that runs: need, have, largest term, knob."""
    least = _least(problem)
    lines = [
        line
        for level, footprint in least.items()
        if _excess_bytes(problem, level, footprint)
        for line in _lines(problem, level, footprint)
    ]
    lines = lines or ["no policy keeps within the budgets of all levels"]
    lines += (words for words, other in _other_ways(problem) if not _missing(other, _least(other)))
    return DoesNotFit("\n".join(lines))


def too_small(problem: Problem, policy: Policy) -> str | None:
    """Why this very policy has too little cache for the longest sequence; None if it has enough."""
    needed = problem.fewest_pages
    if policy.num_kv_pages >= needed:
        return None
    return f"the longest sequence needs {needed} KV pages, the policy has {policy.num_kv_pages}"


def too_large(problem: Problem, policy: Policy) -> str | None:
    """Levels that this very policy does not fit into; None if it fits."""
    lines = []
    for level, footprint in problem.overfull(policy).items():
        needed, there = format_unlike(footprint.total_bytes, problem.capacity_bytes(level))
        lines.append(
            f"{level}: the policy needs {needed}, there are {there}. "
            f"Largest term: {footprint.largest[0]}, {format_bytes(footprint.largest[1])}."
        )
    return "\n".join(lines) or None


def _other_ways(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """What a user may leave out, in words and as a problem."""
    if problem.with_vram:
        hardware = problem.hardware.without("vram")
        alone = replace(problem, hardware=hardware, program_bytes={}, stages=False)
        yield "Without the GPU it fits: resources.device: cpu.", alone
    if problem.schedule is not None:
        yield f"Without --schedule {problem.schedule} it fits.", replace(problem, schedule=None)


def _least(problem: Problem) -> _Needs:
    return min(_least_needs(problem), key=lambda needs: _missing(problem, needs))


def _least_needs(problem: Problem) -> list[_Needs]:
    """What the first candidate of every kind takes, with what does not fit moved down."""
    least: dict[object, _Needs] = {}
    known = Known(problem)
    for candidate in candidates(problem, slots=FEWEST_SLOTS):
        policy = candidate.policy
        places = (policy.attention_on_gpu, policy.ffn_on_gpu, policy.num_slots > 0)
        kind = (places, candidate.weight_levels, candidate.kv_levels)
        if kind in least:
            continue
        shares = filled(problem, candidate, known.memory(candidate))
        least[kind] = footprints_in_parts(problem, candidate, candidate.placed(shares))
    return list(least.values())


def _missing(problem: Problem, needs: _Needs) -> int:
    return sum(_excess_bytes(problem, *one) for one in needs.items())


def _excess_bytes(problem: Problem, level: LevelName, footprint: Footprint) -> int:
    """How much too small a level is. Where shares have been moved to fill it, all that is too much
    is what its terms have been rounded up by."""
    rounded = footprint.total_bytes - len(footprint.terms)
    return max(0, rounded - problem.capacity_bytes(level))


def _lines(problem: Problem, level: LevelName, needed: Footprint) -> list[str]:
    name, num_bytes = needed.largest
    shorten = "; lower max_tokens or shorten the longest prompt" if name == KV_TERM else ""
    enough = -(-needed.total_bytes // _MIB)
    least, there = format_unlike(needed.total_bytes, problem.capacity_bytes(level))
    return [
        f"{level}: needs {least} at the least, has {there}.",
        f"Largest term: {name}, {format_bytes(num_bytes)}{shorten}.",
        f"Smallest change that fits: {_knob(level, enough)}.",
    ]


def _knob(level: LevelName, num_mib: int) -> str:
    """How a job, or a question about another machine, gets so much of a level."""
    option = f"--what-if {level}={num_mib}MiB"
    if level == "disk":
        return option
    return f"resources.{level}: {num_mib}MiB (for another machine: {option})"
