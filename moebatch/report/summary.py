"""The report at the end of a run."""

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType

from moebatch.job.status import GatingUse, RunStatus, RunSummary
from moebatch.plan.prediction import Prediction
from moebatch.report.console import plain
from moebatch.report.foresight import foresight_table
from moebatch.report.tables import NamedRows, titled_columns
from moebatch.report.timeline_view import waits_table
from moebatch.units import format_bytes, format_duration, format_rate

_NUM_WAITS = 3


def summary_table(summary: RunSummary) -> RenderableType:
    """What was done, how fast, what the lanes did, and what it took."""
    grid = NamedRows()
    if summary.emulated is not None:
        grid.add_row("[bold yellow]emulated[/]", plain(summary.emulated))
    grid.add_row("rows", _rows(summary))
    grid.add_row("output", plain(summary.output))
    for name, text in _speed(summary):
        grid.add_row(name, text)
    for lane in summary.lanes:
        grid.add_row(lane.name, f"busy {format_duration(lane.busy_s)} ({lane.share:.0%})")
    grid.add_row("waiting", f"compute waited {format_duration(summary.waited_s)} for experts")
    if summary.bytes_read:
        grid.add_row("read", _reading(summary))
    if summary.num_copied or summary.shared_tokens:
        grid.add_row("alike", _sharing(summary))
    if summary.num_grown:
        text = f"{summary.num_grown} more experts stayed in memory when no rows were waiting"
        grid.add_row("at the end", text)
    if summary.num_preempted:
        grid.add_row("sent back", f"{summary.num_preempted} sequences, when the cache was full")
    if summary.num_shrunk:
        times = f"passes were halved {summary.num_shrunk} times, since the system refused memory"
        grid.add_row("backed off", times)
    if summary.torch_only is not None:
        grid.add_row("kernels", f"torch only: {plain(summary.torch_only)}")
    if summary.gating is not None:
        grid.add_row("gating", _gating(summary.gating))
    grid.add_row("peak memory", _memory(summary))
    if summary.policy is not None:
        grid.add_row("policy", str(summary.policy))
    parts: list[RenderableType] = ["", grid]
    if summary.waits is not None and summary.waits.names:
        parts += ["", waits_table(summary.waits, _NUM_WAITS)]
    if summary.foresight:
        parts += ["", foresight_table(summary.foresight)]
    if summary.prediction is not None and summary.run_s:
        parts += ["", _beside(summary, summary.prediction)]
    return Group(*parts)


def failed_rows(summary: RunSummary) -> str:
    """How many rows failed and why, in one line."""
    codes = ", ".join(f"{count} {code}" for code, count in sorted(summary.errors.items()))
    return f"{summary.num_failed} of {summary.num_rows} rows failed ({codes}); see {summary.output}"


def stopped_early(status: RunStatus) -> str:
    """What is left of a run that was interrupted."""
    return (
        f"stopped by Ctrl-C with {status.num_done} of {status.num_rows} rows done; "
        f"they are in {status.run_folder}"
    )


def _rows(summary: RunSummary) -> str:
    if not summary.num_failed:
        return f"{summary.num_rows} done"
    return f"{summary.num_rows} done, [red]{plain(failed_rows(summary))}[/]"


def _sharing(summary: RunSummary) -> str:
    """What was computed once for several rows."""
    found = []
    if summary.shared_tokens:
        share = summary.shared_tokens / (summary.shared_tokens + summary.prompt_tokens)
        found.append(
            f"{summary.shared_tokens} prompt tokens ({share:.0%}) had been computed for other rows"
        )
    if summary.num_copied:
        found.append(f"{summary.num_copied} rows got the answer of an equal one")
    return "; ".join(found)


def _gating(use: GatingUse) -> str:
    how = f"[bold yellow]{plain(use.how)}[/]"
    if use.single_share is None:
        return how
    return (
        f"{how}: a single expert in {use.single_share:.1%} of all decisions, "
        f"{use.mean_experts:.2f} experts in the mean"
    )


def _speed(summary: RunSummary) -> list[tuple[str, str]]:
    seconds = summary.run_s or float("nan")
    return [
        (
            "tokens",
            f"{summary.generated_tokens} generated ([bold green]"
            f"{summary.generated_tokens / seconds:.1f} tok/s[/]), "
            f"{summary.prompt_tokens} prompt ({summary.prompt_tokens / seconds:.1f} tok/s)",
        ),
        (
            "time",
            f"{format_duration(summary.total_s)} in all: {format_duration(summary.load_s)} to "
            f"start, {format_duration(summary.run_s)} for {summary.num_passes} passes",
        ),
    ]


def _reading(summary: RunSummary) -> str:
    rate = f" at {_disk_rate(summary)}" if summary.bytes_read else ""
    how = "" if summary.reads_past_page_cache else ", through the page cache (O_DIRECT refused)"
    return f"{format_bytes(summary.bytes_read)} of experts{rate}{how}"


def _beside(summary: RunSummary, expected: Prediction) -> RenderableType:
    """What was expected beside what was measured."""
    table = titled_columns()
    table.add_column("", style="dim", justify="right")
    for title in ("predicted", "measured", "measured / predicted"):
        table.add_column(title, justify="right")
    for name, figure, measured, shown in _figures(summary, expected):
        ratio = f"{measured / figure:.2f}" if figure else ""
        table.add_row(name, shown(figure), shown(measured), ratio)
    return table


def _figures(
    summary: RunSummary, expected: Prediction
) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
    """Name, predicted, measured, and how to write them."""
    if expected.job_time_s is not None and expected.num_passes is not None:
        yield "time of all passes", expected.job_time_s, summary.run_s, format_duration
        again = summary.hindsight
        if again is not None and again.job_time_s is not None:
            name = f"the same at {_disk_rate(summary)}"
            yield name, again.job_time_s, summary.run_s, format_duration
        yield "passes", expected.num_passes, summary.num_passes, lambda number: f"{number:.0f}"
        for lane in summary.lanes:
            busy_s = expected.busy_s.get(lane.name, 0.0)
            yield f"{lane.name} busy", busy_s, lane.busy_s, format_duration
    measured = summary.generated_tokens / summary.run_s
    yield "generated tok/s", expected.tokens_per_s, measured, lambda rate: f"{rate:.1f}"
    yield from _peaks(summary, expected)


def _peaks(
    summary: RunSummary, expected: Prediction
) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
    peak, name = expected.peak_bytes["dram"], "peak of dram"
    if summary.vram_peak_bytes is not None:
        vram = expected.peak_bytes["vram"]
        yield "peak of vram", vram, summary.vram_peak_bytes, format_bytes
        if summary.emulated is not None:
            # It is memory of the process like any other.
            peak, name = peak + vram, "peak of dram and vram"
    yield name, peak, summary.peak_bytes, format_bytes


def _disk_rate(summary: RunSummary) -> str:
    busy = next((lane.busy_s for lane in summary.lanes if lane.name == "disk->dram"), 0.0)
    return format_rate(summary.bytes_read / busy) if busy else "no rate"


def _memory(summary: RunSummary) -> str:
    return f"{format_bytes(summary.peak_bytes)} of {format_bytes(summary.budget_bytes)}"
