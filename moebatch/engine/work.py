"""What each kind of task does to the pass in work."""

from moebatch.engine.attention_work import AttentionWork
from moebatch.engine.broken import BrokenRows
from moebatch.engine.expert_work import ExpertWork
from moebatch.engine.parts import Parts
from moebatch.engine.pass_rows import PassRows
from moebatch.model.router import Routing
from moebatch.schedule.task import Task


class PassWork:
    """One pass: its hidden states, its micro-batches, and what gates have said so far.

    Tasks of different lanes are for different micro-batches, or wait for each other, so nothing
    here is locked.
    """

    def __init__(self, rows: PassRows, parts: Parts) -> None:
        self._attention = AttentionWork(rows, parts)
        self._experts = ExpertWork(rows, parts, self._attention)
        self._do = {**self._attention.tasks, **self._experts.tasks}

    def run(self, task: Task) -> None:
        """Does what the task says, on the thread of its lane."""
        self._do[task.kind](task)

    def num_bytes(self, task: Task) -> int:
        """Bytes that a task of a link moves, experts left out."""
        return self._attention.num_bytes(task) or self._experts.num_bytes(task)

    def routing(self, step: int, k: int) -> Routing:
        """What a gate has said."""
        return self._experts.routing(step, k)

    @property
    def broken(self) -> BrokenRows:
        """Rows whose numbers stopped being numbers."""
        return self._experts.broken
