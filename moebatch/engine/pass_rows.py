"""Hidden states of a pass, and which of them a task is about.

Shape letters: T tokens of the pass, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moebatch.engine.layout import AttentionInput
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Task


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
