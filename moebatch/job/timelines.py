"""The first passes of a run, as measured and as predicted."""

from moebatch.engine.build import BuiltEngine
from moebatch.job.planning import JobPlan
from moebatch.plan.sim_world import SimWorld
from moebatch.schedule.simulate import simulate
from moebatch.schedule.timeline.timeline import Timeline


def run_timelines(built: BuiltEngine, plan: JobPlan) -> dict[str, Timeline]:
    """By name; the simulated passes are those that were run, token for token, and where the
    schedule asks gates, so is their routing. Empty if nothing was traced."""
    if built.recorder is None or built.log is None:
        return {}
    measured = built.recorder.timeline
    num_passes = len(measured.pass_ends_s)
    if not num_passes:
        return {}
    world = SimWorld.of(
        plan.problem, plan.policy, passes=built.log.passes[:num_passes], routing=built.log
    )
    predicted = simulate(
        plan.policy.schedule, world.setup, world.room, world, num_passes=num_passes
    )
    return {"predicted": predicted, "measured": measured}
