"""How fast a level's memory is read."""

import torch
from torch import Tensor

from moebatch.measure.timer import Timer


def read_bandwidth(memory: Tensor, timer: Timer) -> float:
    """Bytes per second at which all threads add up `memory` (uint8, far larger than a cache)."""
    numbers = memory.view(torch.int64)  # no rounding, no NaN, and a sum that uses all threads
    return memory.nbytes / timer.seconds(numbers.sum)
