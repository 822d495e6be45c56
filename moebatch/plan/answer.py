"""A planner's whole answer: the policy, what it will do, what binds, and what would help."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from moebatch.plan.advice import Improvement, improvements
from moebatch.plan.expert_choice import ExpertChoice, Wishes, choose_experts, wished
from moebatch.plan.fitting import fitted, policy_for, slot_notes
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.problem import Problem
from moebatch.plan.runnable import not_priced, require_none
from moebatch.plan.search.planner import Planned, best_policy
from moebatch.plan.search.refusal import too_large, too_small
from moebatch.spec.policy.policy import Policy

Method = Literal["milp", "klotski", "paper", "given"]


@dataclass(frozen=True, kw_only=True)  # no slots: advice is worked out when it is asked for
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
    planned: Planned | None = None
    """How a search found the policy; None where a paper's method or the user chose it."""
    only_planned: tuple[str, ...] = ()
    """Why no run does this; empty where one can."""
    notes: tuple[str, ...] = field(default=())
    """What the reader should know about figures and limits."""

    @property
    def title(self) -> str:
        """``mixtral-8x7b on t4``."""
        return f"{self.model} on {self.problem.hardware.name}"

    @cached_property
    def improvements(self) -> list[Improvement]:
        """What would help most, the best first: each line takes as long to find as the policy."""
        if self.planned is None:
            return []
        is_even = self.problem.habits is None and self.planned.policy == self.policy
        return improvements(self.problem.evenly, self.planned, self.prediction if is_even else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The best policy of a problem, with what was chosen among predictors and caches."""

    planned: Planned
    policy: Policy
    experts: ExpertChoice | None
    """None where that does not matter."""


def best_for(
    problem: Problem,
    wishes: Wishes | None = None,
    *,
    is_plain: bool = False,
) -> Chosen:
    """What `moebatch plan` says and `moebatch run` does where no policy is given.

    Args:
        wishes: what the job says of its experts; the planner chooses the rest.
        is_plain: everything is done one after the other, so nothing is foreseen.

    Raises DoesNotFit, and ConfigError for a schedule that the model does not go with.
    """
    wishes = wishes or Wishes()
    planned = best_policy(problem.evenly)
    policy = fitted(problem, wished(planned.policy, wishes))
    experts = None if is_plain else choose_experts(problem, policy, wishes)
    chosen = policy if experts is None else experts.chosen.policy
    return Chosen(planned=planned, policy=chosen, experts=experts)


def answer_milp(problem: Problem, model: str, wishes: Wishes | None = None) -> Answer:
    """The best policy by the MILP. Raises what `best_for` does."""
    found = best_for(problem, wishes)
    return Answer(
        problem=problem,
        model=model,
        method="milp",
        solver=_solver_text(found.planned),
        policy=found.policy,
        prediction=predict(problem, found.policy),
        experts=found.experts,
        planned=found.planned,
        notes=slot_notes(problem, found.policy),
    )


def answer_given(
    problem: Problem, model: str, policy: Policy, *, source: str, schedule: str | None = None
) -> Answer:
    """What a policy that the user has chosen will do, whether it fits or not; under another
    `schedule`, with fewer experts where they are computed if that needs the room.

    Raises ConfigError, with `source`, if it asks for what the machine does not have or do;
    DoesNotFit if it does not fit under another schedule.
    """
    require_none(not_priced(problem, policy), source=source)
    if schedule is not None:
        policy = fitted(problem, policy_for(policy, schedule, problem))
    reasons = (too_small(problem, policy), too_large(problem, policy))
    slots = slot_notes(problem, policy) if schedule is not None else ()
    return Answer(
        problem=problem,
        model=model,
        method="given",
        solver="policy file",
        policy=policy,
        prediction=predict(problem, policy),
        notes=(*(f"this policy does not fit: {reason}" for reason in reasons if reason), *slots),
    )


def _solver_text(planned: Planned) -> str:
    solver = planned.solution.solver.replace("PULP_CBC_CMD", "CBC")
    return f"{solver}, {len(planned.candidates)} candidates"
