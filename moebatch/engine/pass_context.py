"""What passes work with, and the hidden states of one of them.

Shape letters: T tokens of the pass, D hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moebatch.engine.exchange import CpuAttention
from moebatch.engine.layout import AttentionInput
from moebatch.engine.pass_log import PassLog
from moebatch.engine.weights import WeightStream
from moebatch.model.decoder import Decoder
from moebatch.predict.predictor import Predictor, RoutingObserver
from moebatch.schedule.foresight import Foresight
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Task
from moebatch.spec.policy import Policy
from moebatch.store.kv import KVCache


@dataclass(frozen=True, kw_only=True, slots=True)
class PassContext:
    """Model, memory and what goes between them; all of it is there before the first pass."""

    decoder: Decoder
    cache: KVCache
    policy: Policy
    setup: Setup
    predictor: Predictor
    weights: WeightStream
    beside: CpuAttention | None
    """Where decoding sequences attend on the CPU beside a GPU."""
    observer: RoutingObserver | None = None
    log: PassLog | None = None
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Where the thread that launches computes what comes before a pass and after it."""
    foresight: Foresight = field(default_factory=Foresight)
    """How well experts are foreseen at the level that computes."""


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows of a pass by micro-batches."""

    x_TD: Tensor
    inputs: Sequence[AttentionInput]
    setup: Setup

    def layer(self, task: Task) -> int:
        """The layer of a task."""
        return self.setup.layer(task.step)

    def input(self, task: Task) -> AttentionInput:
        """What the micro-batch of a task attends with."""
        assert task.micro_batch is not None, "a task of a micro-batch"
        return self.inputs[task.micro_batch]

    def rows(self, task: Task) -> slice:
        """Rows of the micro-batch of a task."""
        return self.input(task).group.rows

    def num_tokens(self, task: Task) -> int:
        """Tokens of the micro-batch of a task."""
        return self.input(task).direct.num_tokens

    def is_beside(self, item: AttentionInput) -> bool:
        """Whether a micro-batch attends on the CPU beside a GPU."""
        return self.setup.compute == "vram" and item.group.place == "dram"
