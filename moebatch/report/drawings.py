"""Files that timelines are drawn into."""

from collections.abc import Callable, Mapping
from pathlib import Path

from moebatch.report.chrome_trace import write_chrome_trace
from moebatch.report.gantt import USUAL_TITLE, gantt_svg
from moebatch.report.svg import write_picture
from moebatch.schedule.timeline.timeline import Timeline


def write_drawings(
    timelines: Mapping[str, Timeline],
    *,
    trace: Path | None,
    gantt: Path | None,
    title: str = USUAL_TITLE,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes what is asked for: a Chrome trace, a picture under a title, or both. `tell` gets a
    line for each. Raises StorageError."""
    if trace is not None:
        write_chrome_trace(trace, timelines)
        tell(f"trace: {trace}, for ui.perfetto.dev")
    if gantt is not None:
        write_picture(gantt, gantt_svg(timelines, title=title))
        tell(f"picture: {gantt}")
