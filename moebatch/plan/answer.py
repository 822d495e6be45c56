"""A planner's whole answer: the policy, what it will do, what binds, and what would help."""

from dataclasses import dataclass, field
from typing import Literal

from moebatch.plan.advice import Improvement, improvements
from moebatch.plan.planner import Planned, best_policy
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.problem import Problem
from moebatch.spec.policy import Policy

Method = Literal["milp", "klotski", "paper", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A policy for a problem, however it was found."""

    problem: Problem
    model: str
    """Name of the model."""
    method: Method
    solver: str
    """What found the shares, and how well."""
    policy: Policy
    prediction: Prediction
    improvements: tuple[Improvement, ...] = ()
    """The best first."""
    notes: tuple[str, ...] = field(default=())
    """What the reader should know about figures and limits."""


def answer_milp(problem: Problem, model: str) -> Answer:
    """The best policy by the MILP, with what would help most. Raises DoesNotFit."""
    planned = best_policy(problem)
    solution = planned.solution
    better = improvements(
        problem, [item.candidate for item in planned.candidates], solution.seconds_per_sequence
    )
    return Answer(
        problem=problem,
        model=model,
        method="milp",
        solver=_solver_text(planned),
        policy=planned.policy,
        prediction=predict(problem, planned.policy),
        improvements=tuple(better[:3]),
    )


def answer_given(problem: Problem, model: str, policy: Policy) -> Answer:
    """What a policy that somebody else has chosen will do."""
    return Answer(
        problem=problem,
        model=model,
        method="given",
        solver="policy file",
        policy=policy,
        prediction=predict(problem, policy),
    )


def _solver_text(planned: Planned) -> str:
    return f"{planned.solution.solver}, {len(planned.candidates)} candidates"
