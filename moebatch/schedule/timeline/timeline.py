"""Timelines: tasks with their start and end, predicted or measured, in one form."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moebatch.schedule.task import Task

LAUNCH = "launch"
"""What a lane waited for while nothing had been launched for it."""
FREE_SLOT = "a free slot"
"""What chunks of experts wait for."""


class Launch(NamedTuple):
    """When a task was launched, and what the one that launches had slept for last."""

    at_s: float
    slept_for: str


@dataclass(frozen=True, slots=True)
class Span:
    """A task on its lane."""

    task: Task
    lane: str
    start_s: float
    end_s: float
    slots: tuple[int, ...] = ()
    """Where the experts of the task lie, if it has such."""
    waited_for: str | None = None
    """What ended last before the task could begin, if its lane was idle meanwhile."""
    launch: Launch | None = None
    """None of a chunk."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


def last_awaited(task: Task, ended_s: Mapping[Task, float], launch: Launch) -> str:
    """What kept a task from beginning earlier: of what it waits for the one that ended last, if
    that was not before its launch."""
    last = max(task.after, key=lambda other: ended_s.get(other, 0.0), default=None)
    return launch.slept_for if last is None or ended_s.get(last, 0.0) < launch.at_s else str(last)


@dataclass(frozen=True, slots=True)
class Bubble:
    """Time in which a lane was idle although the job was not done."""

    lane: str
    start_s: float
    end_s: float
    before: Task
    """What ran then."""
    waited_for: str
    """What that had waited for."""

    @property
    def seconds(self) -> float:
        """How long the lane was idle."""
        return self.end_s - self.start_s


def bubbles_before(span: Span, free_s: float, start_s: float) -> Iterator[Bubble]:
    """Why a lane was idle from one moment until it began a task: before its launch no other task
    can have held it up."""
    reason, launch = span.waited_for or LAUNCH, span.launch
    if launch is not None and launch.slept_for != reason and launch.at_s > free_s:
        launched_s = min(launch.at_s, start_s)
        yield Bubble(span.lane, free_s, launched_s, span.task, launch.slept_for)
        free_s = launched_s
    if start_s > free_s:
        yield Bubble(span.lane, free_s, start_s, span.task, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What the lanes did in some passes. Seconds count from the start of the first of them."""

    num_layers: int
    pass_ends_s: tuple[float, ...]
    """When each pass had ended; the first one began at 0."""
    spans: tuple[Span, ...]
    """In the order in which they began, per lane."""

    @property
    def length_s(self) -> float:
        """Seconds of all passes."""
        return self.pass_ends_s[-1] if self.pass_ends_s else 0.0

    @property
    def pass_s(self) -> tuple[float, ...]:
        """Seconds of each pass."""
        starts = (0.0, *self.pass_ends_s)
        return tuple(end - start for start, end in zip(starts, self.pass_ends_s, strict=False))

    @property
    def steady_since_s(self) -> float:
        """When the pipeline had filled: the end of the first pass, or 0 if there is no other."""
        return self.pass_ends_s[0] if len(self.pass_ends_s) > 1 else 0.0

    @property
    def steady_pass_s(self) -> float:
        """Mean seconds of the passes after the first, or of the only one; 0 without any."""
        return (self.length_s - self.steady_since_s) / self.num_steady_passes

    @property
    def num_steady_passes(self) -> int:
        """Passes after the first, or 1 if there is no other."""
        return max(1, len(self.pass_ends_s) - 1)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes that did something, in the order in which they began."""
        return tuple(dict.fromkeys(span.lane for span in self.spans))

    def on(self, lane: str) -> list[Span]:
        """Spans of one lane, in order."""
        spans = (span for span in self.spans if span.lane == lane)
        return sorted(spans, key=lambda span: (span.start_s, span.end_s))

    def between(self, start_s: float, end_s: float) -> list[Span]:
        """Spans that lie wholly or partly between two moments."""
        return [span for span in self.spans if span.end_s > start_s and span.start_s < end_s]

    def busy_s(self, lane: str, *, since_s: float = 0.0, until_s: float | None = None) -> float:
        """Seconds in which a lane did something, between two moments."""
        until = self.length_s if until_s is None else until_s
        return sum(
            max(0.0, min(span.end_s, until) - max(span.start_s, since_s)) for span in self.on(lane)
        )

    def bubbles(self, lane: str) -> Iterator[Bubble]:
        """Idle times of a lane before each of its tasks."""
        free_s = 0.0
        for span in self.on(lane):
            if span.start_s > free_s:
                yield from bubbles_before(span, free_s, span.start_s)
            free_s = max(free_s, span.end_s)
