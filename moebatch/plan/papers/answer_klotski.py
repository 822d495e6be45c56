"""The answer of Klotski's inequalities, in the words of ours."""

from collections.abc import Iterator

from moebatch.plan.answer import Answer
from moebatch.plan.papers.klotski import KlotskiPlan, klotski_policy
from moebatch.plan.papers.klotski_bubbles import Inequality
from moebatch.plan.prediction import predict
from moebatch.plan.problem import Problem
from moebatch.units import format_duration


def answer_klotski(problem: Problem, model: str) -> Answer:
    """The fewest batches that leave no bubble, or as many as fit. Raises DoesNotFit."""
    plan = klotski_policy(problem)
    return Answer(
        problem=problem,
        model=model,
        method="klotski",
        solver=f"n = {plan.num_batches} batches of {plan.batch_size}",
        policy=plan.policy,
        prediction=predict(problem, plan.policy),
        notes=tuple(_notes(plan)),
    )


def _notes(plan: KlotskiPlan) -> Iterator[str]:
    yield from (_line(inequality) for inequality in plan.inequalities)
    if plan.disk is not None:
        yield _line(plan.disk)
    if plan.limit is not None:
        yield f"bubbles remain: {plan.limit}"


def _line(inequality: Inequality) -> str:
    sign = ">=" if inequality.holds else "<"
    return (
        f"inequality {inequality.name}, {inequality.meaning}: "
        f"{format_duration(inequality.left_s)} {sign} {format_duration(inequality.right_s)}"
    )
