"""A planner's whole answer: the policy, what it will do, what binds, and what would help."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from moebatch.errors import ConfigError, Fault
from moebatch.plan.advice import Improvement, improvements, searched
from moebatch.plan.expert_choice import ExpertChoice, Wishes, choose_experts, wished
from moebatch.plan.planner import Planned, best_policy
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.problem import Problem
from moebatch.plan.refusal import too_large, too_small
from moebatch.spec.hardware import LEVELS, LevelName
from moebatch.spec.policy import Policy

_MOST_ADVICE = 3
"""Changes that are planned anew: each takes as long as the plan itself."""
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
    experts: ExpertChoice | None = None
    """What was chosen among predictors and caches, where that matters."""
    improvements: tuple[Improvement, ...] = ()
    """The best first."""
    only_planned: tuple[str, ...] = ()
    """Why no run does this; empty where one can."""
    notes: tuple[str, ...] = field(default=())
    """What the reader should know about figures and limits."""

    @property
    def title(self) -> str:
        """``mixtral-8x7b on t4``."""
        return f"{self.model} on {self.problem.hardware.name}"


def answer_milp(problem: Problem, model: str, wishes: Wishes | None = None) -> Answer:
    """The best policy by the MILP, with what would help most. Raises DoesNotFit."""
    wishes = wishes or Wishes()
    planned = best_policy(problem.evenly)
    better = improvements(problem.evenly, planned)[:_MOST_ADVICE]
    policy = wished(planned.policy, wishes)
    experts = choose_experts(problem, policy, wishes)
    if experts is not None:
        policy = experts.chosen.policy
    return Answer(
        problem=problem,
        model=model,
        method="milp",
        solver=_solver_text(planned),
        policy=policy,
        prediction=predict(problem, policy),
        experts=experts,
        improvements=tuple(searched(problem.evenly, planned.policy, better)),
    )


def answer_given(problem: Problem, model: str, policy: Policy, *, source: str) -> Answer:
    """What a policy that somebody else has chosen will do, whether it fits or not.

    Raises ConfigError, with `source`, if it uses what the machine does not have.
    """
    faults = [
        Fault(
            file=source, where=f"policy.{where}", message=f"{problem.hardware.name} has no {level}"
        )
        for where, level in _missing_levels(problem, policy)
    ]
    if faults:
        raise ConfigError(faults)
    reasons = (too_small(problem, policy), too_large(problem, policy))
    return Answer(
        problem=problem,
        model=model,
        method="given",
        solver="policy file",
        policy=policy,
        prediction=predict(problem, policy),
        notes=tuple(f"this policy does not fit: {reason}" for reason in reasons if reason),
    )


def _missing_levels(problem: Problem, policy: Policy) -> Iterator[tuple[str, LevelName]]:
    """Keys of a policy that need a level which the machine lacks."""
    for name in ("attention_on_gpu", "ffn_on_gpu"):
        if getattr(policy, name) and not problem.with_vram:
            yield name, "vram"
    for name in ("weights", "kv_cache"):
        for level in LEVELS:
            if getattr(policy, name).on(level) and level not in problem.hardware.levels:
                yield f"{name}.{level}", level


def _solver_text(planned: Planned) -> str:
    solver = planned.solution.solver.replace("PULP_CBC_CMD", "CBC")
    return f"{solver}, {len(planned.candidates)} candidates"
