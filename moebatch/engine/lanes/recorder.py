"""What the lanes of a run did: added up for the whole of it, task by task for its first passes."""

import math
import time
from dataclasses import dataclass, field, replace

from moebatch.schedule.timeline.statistics import Statistics
from moebatch.schedule.timeline.timeline import Span, Timeline

_MOST_SPANS = 200_000


@dataclass(slots=True)
class Recorder:
    """Takes spans from lanes, one at a time per lane. Seconds count from `begin`."""

    num_layers: int
    num_traced_passes: int = 0
    """So many passes are kept task by task."""
    statistics: Statistics = field(init=False)
    _spans: list[Span] = field(default_factory=list, init=False)
    _pass_ends_s: list[float] = field(default_factory=list, init=False)
    _begin_s: float = field(default=math.nan, init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The first pass begins; what was before does not count."""
        self._begin_s = time.perf_counter()
        self.statistics = Statistics(num_layers=self.num_layers)
        self._spans.clear()
        self._pass_ends_s.clear()

    def now(self) -> float:
        """Seconds since the start."""
        return self.seconds(time.perf_counter())

    def seconds(self, moment_s: float) -> float:
        """Seconds since the start, of a moment of ``perf_counter``."""
        return moment_s - self._begin_s

    def add(self, span: Span) -> None:
        """A task has been run. What began before `begin` counts from there on."""
        if span.start_s < 0.0:
            span = replace(span, start_s=0.0, end_s=max(0.0, span.end_s))
        self.statistics.add(span)
        if self._is_tracing:
            self._spans.append(span)

    def end_pass(self) -> None:
        """All of a pass has been computed."""
        if self._is_tracing:
            self._pass_ends_s.append(self.seconds(time.perf_counter()))

    def drop_pass(self) -> None:
        """The pass in work was given up: nothing of it is kept task by task."""
        since_s = self._pass_ends_s[-1] if self._pass_ends_s else -math.inf
        self._spans = [span for span in self._spans if span.start_s < since_s]

    @property
    def timeline(self) -> Timeline:
        """The passes that were kept."""
        until_s = self._pass_ends_s[-1] if self._pass_ends_s else 0.0
        return Timeline(
            num_layers=self.num_layers,
            pass_ends_s=tuple(self._pass_ends_s),
            spans=tuple(span for span in self._spans if span.start_s <= until_s),
        )

    @property
    def _is_tracing(self) -> bool:
        return len(self._pass_ends_s) < self.num_traced_passes and len(self._spans) < _MOST_SPANS
