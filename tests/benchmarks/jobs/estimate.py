"""How long a peer would take for a whole job, from what it did in a part of it.

Standard library only: the peers' own interpreters import it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.benchmarks.jobs.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A peer at one size of batch."""

    batch: int
    job_s: float
    """Of the whole job."""
    measured_share: float
    """Part of `job_s` that was really run, 0..1; the rest is extrapolated."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """What came of a peer's trials."""

    name: str
    trials: Sequence[Trial]
    ended: str
    """Why no larger batch was tried; empty if the last one was slower, or has all rows."""
    was_killed: bool = False

    @property
    def best(self) -> Trial | None:
        return min(self.trials, key=lambda trial: trial.job_s, default=None)

    def as_json(self) -> dict[str, Any]:
        trials = [asdict(trial) for trial in self.trials]
        return {"name": self.name, "trials": trials, "ended": self.ended}


def padded_batches_s(
    lengths: Lengths, batch: int, *, prefill_s: Callable[[int], float], step_s: float
) -> float:
    """Seconds of a job in static batches in the order of the rows, padded to the longest prompt,
    each until its longest answer is done. `prefill_s` goes by tokens, padding included."""
    total_s = 0.0
    for first in range(0, lengths.num_rows, batch):
        prompts = lengths.prompts[first : first + batch]
        answers = lengths.answers[first : first + batch]
        total_s += prefill_s(max(prompts) * len(prompts)) + step_s * (max(answers) - 1)
    return total_s


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds of a call by its tokens: a part that is always the same, and one for each."""

    fixed_s: float
    token_s: float

    def at(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens


def line_through(points: Sequence[tuple[int, float]]) -> Line:
    """Least squares over (tokens, seconds), neither part negative."""
    assert points, "something was measured"
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return Line(fixed_s=mean_y - slope * mean_x, token_s=slope)
