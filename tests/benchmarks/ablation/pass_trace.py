"""Where the time of a pass goes, read off the timeline that was executed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import mean

from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Span, Timeline

_LINK = "dram->vram"
_GPU = "gpu"


@dataclass(frozen=True, kw_only=True)
class PassTrace:
    """Seconds of a pass. The GPU computes, waits for an expert, or for whoever launches."""

    computing_s: float
    waiting_s: float
    """For experts on their way that nobody had begun to bring when the gate chose."""
    waiting_begun_s: float
    """For experts on their way that had been begun by then."""
    launching_s: float
    """For anything else: the gate's word, the predictor, sampling."""
    needed_s: float
    """Of the link: experts that were computed in this pass."""
    in_vain_s: float
    """Of the link: all others."""

    @classmethod
    def mean(cls, traces: Sequence["PassTrace"]) -> "PassTrace":
        """Of several passes."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: mean(getattr(one, name) for one in traces) for name in names})

    @property
    def least_s(self) -> float:
        """What a pass takes that foresees everything and launches as slowly: the GPU's work or the
        link's, whichever is longer."""
        return max(self.computing_s + self.launching_s, self.needed_s)


def pass_traces(timeline: Timeline) -> list[PassTrace]:
    """Of each pass of a timeline."""
    arrivals, begun = _arrivals(timeline)
    chosen_s = {
        span.task.step: span.end_s for span in timeline.spans if span.task.kind is Kind.GATE
    }
    computed = {_expert(span) for span in timeline.spans if span.task.kind is Kind.EXPERT}
    found, start_s = [], 0.0
    for end_s in timeline.pass_ends_s:
        spans = timeline.between(start_s, end_s)
        computing_s = launching_s = waiting_s = begun_early_s = 0.0
        free_s = start_s
        for span in _of(_GPU, spans):
            computing_s += span.end_s - max(span.start_s, start_s)
            gap_s = max(0.0, span.start_s - free_s)
            arrived_s = arrivals.get(_expert(span), 0.0) if span.task.kind is Kind.EXPERT else 0.0
            waited_s = min(max(0.0, arrived_s - free_s), gap_s)
            launching_s += gap_s - waited_s
            if begun.get(_expert(span), end_s) < chosen_s.get(span.task.step, start_s):
                begun_early_s += waited_s
            else:
                waiting_s += waited_s
            free_s = max(free_s, span.end_s)
        moved = [
            (_expert(span) in computed, min(span.end_s, end_s) - max(span.start_s, start_s))
            for span in _of(_LINK, spans)
        ]
        found.append(
            PassTrace(
                computing_s=computing_s,
                waiting_s=waiting_s,
                waiting_begun_s=begun_early_s,
                launching_s=launching_s + max(0.0, end_s - free_s),
                needed_s=sum(seconds for is_needed, seconds in moved if is_needed),
                in_vain_s=sum(seconds for is_needed, seconds in moved if not is_needed),
            )
        )
        start_s = end_s
    return found


def _arrivals(
    timeline: Timeline,
) -> tuple[dict[tuple[int, int | None], float], dict[tuple[int, int | None], float]]:
    """When the last part of an expert of a step had arrived, and when its first one was begun."""
    last: dict[tuple[int, int | None], float] = {}
    first: dict[tuple[int, int | None], float] = {}
    for span in _of(_LINK, timeline.spans):
        key = _expert(span)
        last[key] = max(last.get(key, 0.0), span.end_s)
        first.setdefault(key, span.start_s)
    return last, first


def _of(lane: str, spans: Iterable[Span]) -> Iterator[Span]:
    found = (span for span in spans if span.lane == lane)
    return iter(sorted(found, key=lambda span: span.start_s))


def _expert(span: Span) -> tuple[int, int | None]:
    return span.task.step, span.task.expert
