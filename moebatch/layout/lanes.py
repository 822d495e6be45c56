"""Lanes of a pass, and how their busy times make up its length."""

from collections.abc import Mapping

from moebatch.schedule.lanes import BLOCK, DEVICES, DOWN, PROCESSORS, UP
from moebatch.schedule.registry import traits_of
from moebatch.spec.policy.policy import Policy

LaneSeconds = Mapping[str, float]
"""Busy seconds by lane, lanes that do nothing left out."""
Turns = tuple[tuple[str, ...], ...]
"""Lanes that take turns, so that their seconds add up."""

_SERIAL_LANES = (*PROCESSORS, UP.name, DOWN.name)
_DEVICES = {
    device: tuple(lane for lane in DEVICES if DEVICES[lane] == device)
    for device in dict.fromkeys(DEVICES.values())
}
_SHARED: Turns = tuple(lanes for lanes in _DEVICES.values() if len(lanes) > 1)


def pass_seconds(lanes: LaneSeconds, policy: Policy) -> float:
    """Seconds of a pass: the busiest lane where lanes run side by side (Eq 12), or the busiest of
    those `in_turns`.

    What lanes wait for beyond that is priced beside it (`plan/pricing/waits.py`).
    """
    if traits_of(policy).moves == "block":
        return _block_seconds(lanes, policy)
    return _longest(lanes, policy)


def in_turns(policy: Policy) -> Turns:
    """Lanes of one device, since a disk that reads and writes at once takes as long as for one
    after the other. CPU and GPU where they wait for each other and each micro-batch walks alone;
    where micro-batches go through FlexGen(c)'s blocks, with the copies between them (MoE-Lightning,
    Figure 6).
    """
    traits = traits_of(policy)
    if takes_turns(policy) and not traits.shares_weights:
        return (*_SHARED, tuple(PROCESSORS))
    if traits.moves == "block" and traits.attention == "cpu":
        return (*_SHARED, _SERIAL_LANES)
    return _SHARED


def takes_turns(policy: Policy) -> bool:
    """Whether CPU and GPU wait for each other in every layer: the CPU attends to all micro-batches,
    and then the GPU computes experts, which come one by one."""
    return policy.attends_beside_gpu and not traits_of(policy).is_paged


def takes_turns_by_micro_batch(policy: Policy) -> bool:
    """Whether they do so for each micro-batch by itself, which others may fill: the GPU computes
    experts of one while the CPU attends to the next."""
    return policy.attends_beside_gpu and traits_of(policy).is_paged


def _block_seconds(lanes: LaneSeconds, policy: Policy) -> float:
    """FlexGen waits for everything after each micro-batch and brings the weights of the next layer
    up with the first one, so they run beside one micro-batch of M: its cost model gives weights +
    max(the rest), which this is for large M.

    With attention on the GPU, caches of the next micro-batch run beside the arithmetic.
    """
    work = {lane: time_s for lane, time_s in lanes.items() if lane != BLOCK.name}
    work_s = _longest(work, policy)
    each_s = work_s / policy.num_micro_batches
    return max(lanes.get(BLOCK.name, 0.0), each_s) + work_s - each_s


def _longest(lanes: LaneSeconds, policy: Policy) -> float:
    turns = [_device_s(lanes, group) for group in in_turns(policy)]
    return max((*lanes.values(), *turns), default=0.0)


def bottleneck(lanes: LaneSeconds) -> str:
    """The busiest lane of the busiest device."""
    device = max(_DEVICES.values(), key=lambda of: _device_s(lanes, of))
    return max(device, key=lambda lane: lanes.get(lane, 0.0))


def busiest_s(lanes: LaneSeconds) -> float:
    """Seconds of the busiest device."""
    return max(_device_s(lanes, of) for of in _DEVICES.values())


def _device_s(lanes: LaneSeconds, of: tuple[str, ...]) -> float:
    return sum([lanes.get(lane, 0.0) for lane in of])  # plans ask thousands of times
