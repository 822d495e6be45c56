"""Lanes of a pass, and how their busy times make up its length."""

from collections.abc import Mapping

from moebatch.schedule.lanes import BLOCK, DOWN, PROCESSORS, UP
from moebatch.schedule.registry import traits_of
from moebatch.spec.policy.policy import Policy

_SERIAL_LANES = (*PROCESSORS, UP.name, DOWN.name)
LaneSeconds = Mapping[str, float]
"""Busy seconds by lane, lanes that do nothing left out."""


def pass_seconds(lanes: LaneSeconds, policy: Policy) -> float:
    """Seconds of a pass: the busiest lane where lanes run side by side (Eq 12).

    Schedules that leave bubbles are priced like that too: how long these are only a simulation
    shows. Where nothing is loaded before a gate has chosen, the busiest
    processor and the busiest link take turns (Pre-gated MoE, section 2).
    """
    traits = traits_of(policy)
    if traits.foresees == "nothing":
        computing = max((lanes.get(lane, 0.0) for lane in PROCESSORS), default=0.0)
        moving = (time_s for lane, time_s in lanes.items() if lane not in PROCESSORS)
        return computing + max(moving, default=0.0)
    if takes_turns(policy):
        computing = sum(lanes.get(lane, 0.0) for lane in PROCESSORS)
        return max((computing, *lanes.values()))
    if traits.moves == "block":
        return _block_seconds(lanes, policy)
    return max(lanes.values(), default=0.0)


def takes_turns(policy: Policy) -> bool:
    """Whether CPU and GPU wait for each other in every layer: the CPU attends to all micro-batches,
    and then the GPU computes experts over the tokens of all of them."""
    beside = policy.ffn_on_gpu and not policy.attention_on_gpu
    return beside and traits_of(policy).runs == "pass"


def _block_seconds(lanes: LaneSeconds, policy: Policy) -> float:
    """FlexGen waits for everything after each micro-batch and brings the weights of the next layer
    up with the first one, so they run beside one micro-batch of M: its cost model gives weights +
    max(the rest), which this is for large M.

    With attention on the GPU, caches of the next micro-batch run beside the arithmetic. With
    attention on the CPU (FlexGen(c) in MoE-Lightning's Figure 6), each micro-batch goes through
    GPU, CPU and the copies between them one after the other.
    """
    work = max((time_s for lane, time_s in lanes.items() if lane != BLOCK.name), default=0.0)
    if traits_of(policy).attention == "cpu":
        work = max(work, sum(lanes.get(lane, 0.0) for lane in _SERIAL_LANES))
    each = work / policy.num_micro_batches
    return max(lanes.get(BLOCK.name, 0.0), each) + work - each


def bottleneck(lanes: LaneSeconds) -> str:
    """The busiest lane."""
    return max(lanes, key=lambda lane: lanes[lane])
