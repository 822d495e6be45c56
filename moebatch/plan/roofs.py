"""Where attention and experts of a policy lie on the rooflines of a machine."""

from dataclasses import dataclass, replace

from moebatch.plan.problem import Problem
from moebatch.plan.roofline import (
    Operation,
    Roofline,
    attention_operation,
    ffn_intensity,
    ffn_operation,
    rooflines,
    tokens_reaching,
)
from moebatch.schedule.registry import traits_of
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Placement, Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOperation:
    """An operation of a policy on a pair of levels, and the level that computes it."""

    operation: Operation
    level: LevelName
    data: Placement
    """Where its weights, or its keys and values, live."""

    def staying(self) -> "PlacedOperation":
        """The same where nothing of its data lies below."""
        return replace(self, operation=replace(self.operation, bytes_j=0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRoofs:
    """One pair of levels with the operations of a policy that concern it, and where the experts
    turn (Eq 9-11), in FLOP per byte on the lower level and in tokens of a batch."""

    roofline: Roofline
    operations: tuple[PlacedOperation, ...]
    p1: float
    p1_tokens: float
    """From so many tokens on, experts are better computed on the upper level."""
    p2: float
    p2_tokens: float
    """From so many tokens on, the link does not bind; the balance point where the upper level is
    bound by its memory."""


def policy_roofs(problem: Problem, policy: Policy) -> tuple[PolicyRoofs, ...]:
    """For every pair of levels between which the policy moves or could move something, the
    fastest first; where it moves nothing at all, for the fastest pair."""
    operations = _operations(problem, policy)
    pairs = rooflines(problem.hardware, problem.dtypes.compute)
    concerned = [pair for pair in pairs if any(_concerns(pair, placed) for placed in operations)]
    return tuple(_roofs(problem, pair, operations) for pair in concerned or pairs[:1])


def _roofs(
    problem: Problem, roofline: Roofline, operations: tuple[PlacedOperation, ...]
) -> PolicyRoofs:
    intensity = ffn_intensity(problem.shape, problem.dtypes)
    _, ffn = operations
    p2 = roofline.p2(ffn.operation.intensity_i)
    return PolicyRoofs(
        roofline=roofline,
        operations=tuple(
            placed if _concerns(roofline, placed) else placed.staying()
            for placed in operations
            if placed.level in (roofline.level_i, roofline.level_j)
        ),
        p1=roofline.p1,
        p1_tokens=tokens_reaching(roofline.p1, intensity),
        p2=p2,
        p2_tokens=tokens_reaching(p2, intensity),
    )


def _operations(problem: Problem, policy: Policy) -> tuple[PlacedOperation, PlacedOperation]:
    """Attention of a micro-batch, and the experts of a whole batch."""
    # Experts take the whole batch at once unless the schedule goes micro-batch by micro-batch.
    whole = traits_of(policy).runs == "pass" or not policy.ffn_on_gpu
    ffn = ffn_operation(
        problem.shape,
        problem.dtypes,
        batch=policy.batch_size,
        micro_batch=policy.batch_size if whole else policy.micro_batch_size,
    )
    attention = attention_operation(
        problem.prices, policy.micro_batch_size, problem.workload.decode_context
    )
    return (
        PlacedOperation(
            operation=attention,
            level="vram" if policy.attention_on_gpu else "dram",
            data=policy.kv_cache,
        ),
        PlacedOperation(
            operation=ffn,
            level="vram" if policy.ffn_on_gpu else "dram",
            data=policy.weights,
        ),
    )


def _concerns(roofline: Roofline, placed: PlacedOperation) -> bool:
    """Whether the operation could be on either level, or has data below the one it is on. What is
    all on a GPU needs no link to it."""
    if (roofline.level_i, roofline.level_j) == ("vram", "dram"):
        return placed.level != "vram" or placed.data.vram < 1
    return placed.level == roofline.level_i and placed.data.on(roofline.level_j) > 0
