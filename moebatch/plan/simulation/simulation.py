"""A policy simulated under one schedule or several."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from moebatch.advance import Advance, parts_of, unwatched
from moebatch.layout.routing import SkewedRouting
from moebatch.plan.answer import Answer
from moebatch.plan.as_json import policy_json
from moebatch.plan.fitting import policy_for
from moebatch.plan.options import SimOptions, Work
from moebatch.plan.problem import Problem
from moebatch.plan.runnable import not_priced, require_none
from moebatch.plan.search.refusal import too_large
from moebatch.plan.simulation.passes import passes_of
from moebatch.plan.simulation.world import SimWorld
from moebatch.schedule.drivers.simulate import simulate
from moebatch.schedule.registry import traits_of
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.statistics import Statistics
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.files.values import real_number
from moebatch.spec.policy.policy import Policy

_MOST_S = 1e6
"""Of a kind of tasks in a file of durations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What the lanes would do under one schedule."""

    policy: Policy
    timeline: Timeline
    tokens_per_pass: float
    """Generated in each pass once the pipeline has filled."""
    work: Work
    notes: tuple[str, ...] = ()
    """What the reader should know about the policy under this schedule."""

    @property
    def tokens_per_s(self) -> float:
        """Generated, once the pipeline has filled."""
        pass_s = self.timeline.steady_pass_s
        return self.tokens_per_pass / pass_s if pass_s else 0.0

    @property
    def statistics(self) -> Statistics:
        """What the lanes did once it had."""
        return Statistics.of(self.timeline, since_s=self.timeline.steady_since_s)


def simulations(
    problem: Problem,
    policy: Policy,
    options: SimOptions,
    advance: Advance = unwatched,
) -> dict[str, Simulation]:
    """By schedule, the one asked for first; `advance` is called with the share of all that is done,
    0 to 1. Raises ConfigError for what cannot be simulated."""
    require_none(not_priced(problem, policy), source="moebatch simulate")
    changed = replace(
        policy,
        num_hot=policy.num_hot if options.num_hot is None else options.num_hot,
        num_slots=policy.num_slots if options.slots is None else options.slots,
    )
    names = options.schedules(policy.schedule)
    return {
        name: _simulation(problem, policy_for(changed, name, problem), options, part)
        for name, part in zip(names, parts_of(advance, len(names)), strict=True)
    }


def _simulation(
    problem: Problem, policy: Policy, options: SimOptions, advance: Advance
) -> Simulation:
    passes = passes_of(problem, policy, options.work, options.passes)
    routing = options.routing or SkewedRouting(
        shape=problem.shape, exponent=options.skew, seed=options.seed
    )
    world = SimWorld(
        problem, policy, passes=passes, routing=routing, table=options.table, advance=advance
    )
    name = policy.schedule
    timeline = simulate(name, world.setup, world.room, world, num_passes=options.passes)
    return Simulation(
        policy=policy,
        timeline=timeline,
        tokens_per_pass=passes[-1].logits_rows,
        work=options.work,
        notes=tuple(_notes(problem, policy, options)),
    )


def _notes(problem: Problem, policy: Policy, options: SimOptions) -> Iterator[str]:
    reason = too_large(problem, policy)
    if options.slots is not None and reason:
        yield f"with {policy.num_slots} slots the policy does not fit: {reason}"
    wanted = problem.placed(policy).slots_wanted
    if policy.num_slots < wanted:
        what = (
            "simulated as if there were enough"
            if traits_of(policy).is_paged
            else "what does not fit comes later, or again for every micro-batch"
        )
        yield f"{policy.schedule} wants {wanted} slots, the policy has {policy.num_slots}: {what}"


def simulation_json(answer: Answer, simulated: Mapping[str, Simulation]) -> dict[str, Any]:
    """Everything that the screen shows. Units stand in the names."""
    return {
        "model": answer.model,
        "hardware": answer.problem.hardware.name,
        "schedules": {
            name: {
                "policy": policy_json(one.policy),
                "tokens_per_pass": one.tokens_per_pass,
                "tokens_per_s": one.tokens_per_s,
                **timeline_json(one.timeline),
                "notes": list(one.notes),
            }
            for name, one in simulated.items()
        },
        "notes": list(answer.notes),
    }


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """Seconds of each pass, and what each lane did once the pipeline had filled, and waited for;
    shares are 0..1."""
    statistics = Statistics.of(timeline, since_s=timeline.steady_since_s)
    return {
        "num_layers": timeline.num_layers,
        "num_passes": len(timeline.pass_ends_s),
        "length_s": timeline.length_s,
        "pass_s": list(timeline.pass_s),
        "steady_pass_s": timeline.steady_pass_s,
        "steady_since_s": timeline.steady_since_s,
        "num_steady_passes": timeline.num_steady_passes,
        "bottleneck": statistics.bottleneck,
        "lanes": {name: _lane_json(statistics, name) for name in statistics.names},
    }


def _lane_json(statistics: Statistics, name: str) -> dict[str, Any]:
    lane = statistics.lanes[name]
    return {
        "num_tasks": lane.num_tasks,
        "busy_s": lane.busy_s,
        "bubbles": {
            "total_s": lane.bubbles_s,
            "waited_for_s": dict(sorted(lane.idle_s.items(), key=lambda pair: -pair[1])),
            "longest": [
                {
                    "start_s": bubble.start_s,
                    "seconds": bubble.seconds,
                    "before": str(bubble.before),
                    "waited_for": bubble.waited_for,
                }
                for bubble in lane.longest
            ],
        },
        "share": statistics.share(name),
        "rest_s": statistics.rest_s(name),
    }


def load_durations(path: Path) -> Mapping[Kind, float]:
    """A file of ``attend: 0.002``: seconds by the kinds of `schedule/task.py`. YAML or JSON.

    Raises ConfigError with all faults of the file at once.
    """
    # Here, so that commands start without pydantic.
    from pydantic import create_model

    from moebatch.spec.files.form import Form, given, read_form

    seconds: Any = (Annotated[float | None, real_number(0, _MOST_S)], None)
    form = create_model("Durations", __base__=Form, **dict.fromkeys(Kind, seconds))
    found = given(read_form(path, form, kind="durations file"))
    return {Kind(name): seconds for name, seconds in found.items()}
