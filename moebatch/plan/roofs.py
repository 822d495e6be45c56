"""Where attention and experts of a policy lie on the rooflines of a machine."""

from dataclasses import dataclass

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
from moebatch.spec.hardware import LevelName
from moebatch.spec.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOperation:
    """An operation of a policy on a pair of levels, and the level that computes it."""

    operation: Operation
    level: LevelName


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
    """For every pair of levels of the machine, the fastest first."""
    shape, dtype_bytes = problem.shape, problem.dtypes.compute_bytes
    workload = problem.workload
    context = workload.mean_prompt_tokens + workload.mean_new_tokens / 2
    # A GPU machine's experts go through in micro-batches unless one takes the whole batch.
    whole = policy.schedule == "klotski" or not policy.ffn_on_gpu
    micro_batch = policy.batch_size if whole else policy.micro_batch_size
    ffn = ffn_operation(
        shape, batch=policy.batch_size, micro_batch=micro_batch, dtype_bytes=dtype_bytes
    )
    attention = attention_operation(shape, policy.micro_batch_size, context, dtype_bytes)
    intensity = ffn_intensity(shape, dtype_bytes)
    found = []
    for roofline in rooflines(problem.hardware, problem.dtypes.compute):
        p2 = roofline.p2(ffn.intensity_i)
        operations = tuple(
            PlacedOperation(operation=operation, level="vram" if on_gpu else "dram")
            for operation, on_gpu in (
                (attention, policy.attention_on_gpu),
                (ffn, policy.ffn_on_gpu),
            )
        )
        pair = (roofline.level_i, roofline.level_j)
        found.append(
            PolicyRoofs(
                roofline=roofline,
                operations=tuple(placed for placed in operations if placed.level in pair),
                p1=roofline.p1,
                p1_tokens=tokens_reaching(roofline.p1, intensity),
                p2=p2,
                p2_tokens=tokens_reaching(p2, intensity),
            )
        )
    return tuple(found)
