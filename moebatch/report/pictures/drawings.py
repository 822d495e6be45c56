"""Files that answers and timelines are drawn into. What draws is imported when it is asked for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from moebatch.errors import ConfigError
from moebatch.plan.answer import Answer
from moebatch.plan.roofs import policy_roofs
from moebatch.report.pictures.chrome_trace import write_chrome_trace
from moebatch.schedule.timeline.timeline import Timeline


def write_timelines(
    timelines: Mapping[str, Timeline],
    *,
    trace: Path | None,
    gantt: Path | None,
    title: str = "What the lanes did",
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes what is asked for: a Chrome trace, a picture under a title, or both. `log` gets a
    line for each. Raises StorageError."""
    if trace is not None:
        write_chrome_trace(trace, timelines)
        log(f"trace: {trace}, for ui.perfetto.dev")
    if gantt is not None:
        from moebatch.report.pictures.figure import write_picture
        from moebatch.report.pictures.gantt import gantt_picture

        write_picture(gantt, lambda: gantt_picture(timelines, title=title))
        log(f"picture: {gantt}")


def write_roofline(path: Path, answer: Answer) -> None:
    """Draws where the operations of a policy lie on the rooflines of the machine.

    Raises ConfigError if the machine has but one level, StorageError.
    """
    found, policy = policy_roofs(answer.problem, answer.policy), answer.policy
    if not found:
        message = "there is nothing to draw: only one level of this machine is known"
        raise ConfigError.at("--roofline", message)
    from moebatch.report.pictures.figure import write_picture
    from moebatch.report.pictures.roofline import roofline_picture
    from moebatch.report.pictures.roofline_panel import Panel

    panels = [Panel(roofline=roofs.roofline, marks=roofs.operations) for roofs in found]
    subtitle = (
        f"batch {policy.batch_size}, micro-batches of {policy.micro_batch_size}, "
        f"schedule {policy.schedule}"
    )
    write_picture(path, lambda: roofline_picture(panels, title=answer.title, subtitle=subtitle))
