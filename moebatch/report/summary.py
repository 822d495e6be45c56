"""The report at the end of a run."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Group, RenderableType

from moebatch.job.status import GatingUse, LaneTime, RunSummary
from moebatch.plan.prediction import Prediction
from moebatch.report.console import plain, whole
from moebatch.report.tables import NamedRows, Paragraph, titled_columns
from moebatch.report.timeline_view import waits_table
from moebatch.schedule.drivers.foresight import LayerForesight
from moebatch.units import count_of, format_bytes, format_duration, format_number, format_rate

_NUM_WAITS = 3
_LEAST_SHARE = 0.005
MOST_LAYERS = 16
"""Rows of layers: of more than that, neighbours share one."""
_FORESIGHT = ("chosen experts", "resident", "ready", "foreseen", "accuracy", "FetchRate")
_Figure = tuple[str, float, float, Callable[[float], str]]


def summary_view(summary: RunSummary, job_file: Path, *, details: bool) -> RenderableType:
    """Rows, speed and output; with `details` also lanes, memory, and predicted beside measured
    figures."""
    grid = NamedRows((*_outcome(summary, job_file), *_caveats(summary)))
    if details:
        return Group("", grid, *_details(summary))
    if summary.num_ended:
        grid.add_row("more", "--details shows lanes, memory, and predicted beside measured")
    return Group("", grid)


def _outcome(summary: RunSummary, job_file: Path) -> Iterator[tuple[str, str]]:
    if summary.emulated is not None:
        yield "[bold yellow]emulated[/]", plain(summary.emulated)
    yield "rows", _rows(summary)
    if summary.elapsed_s and summary.engine.num_passes:
        yield "speed", _speed(summary)
    yield "output", _output(summary, job_file)


def _caveats(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """What a reader of the answers, or of their speed, has to know."""
    if summary.num_cut_off:
        yield "cut off", _cut_off(summary)
    if summary.gating is not None:
        yield "gating", _gating(summary.gating)
    if summary.num_begun_again:
        times = count_of(summary.num_begun_again, "time")
        yield (
            "begun again",
            f"{times} in less memory, since the system refused it; tokens, speed and all that "
            "--details shows are of the last time",
        )
    if summary.engine.num_shrunk:
        times = count_of(summary.engine.num_shrunk, "time")
        yield "backed off", f"passes were halved {times}, since the system refused memory"
    if summary.torch_only is not None:
        yield "kernels", f"torch only: {plain(summary.torch_only)}"


def _details(summary: RunSummary) -> Iterator[RenderableType]:
    yield from ("", NamedRows(_took(summary)))
    waits = None if summary.waits is None else waits_table(summary.waits, _NUM_WAITS)
    if waits is not None and waits.row_count:
        yield from ("", waits)
    if summary.foresight:
        yield from ("", foresight_table(summary.foresight))
    if summary.prediction is not None and summary.elapsed_s:
        yield from ("", *_beside(summary, summary.prediction))


def _took(summary: RunSummary) -> Iterator[tuple[str, str]]:
    yield (
        "tokens",
        f"{summary.engine.generated_tokens} generated, {summary.engine.prompt_tokens} of prompts",
    )
    yield "time", _time(summary)
    for lane in summary.lanes:
        yield lane.name, _lane(lane)
    if summary.products:
        yield "products", summary.products
    waits = [f"{format_duration(s)} for {what}" for what, s in summary.waited_s.items() if s]
    if waits:
        yield "waiting", f"compute waited {', '.join(waits)}"
    if summary.bytes_read:
        yield "read", _reading(summary)
    if summary.num_copied or summary.engine.shared_tokens:
        yield "shared", _sharing(summary)
    if summary.engine.num_grown:
        grown = count_of(summary.engine.num_grown, "more expert")
        yield "at the end", f"{grown} stayed in memory when no rows were waiting"
    if summary.engine.num_preempted:
        sent = count_of(summary.engine.num_preempted, "sequence")
        yield "preempted", f"{sent}, when the cache was full"
    peak, budget = format_bytes(summary.peak_bytes), format_bytes(summary.budget_bytes)
    yield "peak memory", f"{peak} of {budget}"
    if summary.policy is not None:
        yield "policy", str(summary.policy)


def failed_rows(summary: RunSummary) -> str:
    """How many rows failed and why, in one line."""
    codes = ", ".join(f"{count} {code}" for code, count in sorted(summary.errors.items()))
    failed = f"{summary.num_failed} of {count_of(summary.num_rows, 'row')} failed ({codes})"
    return f"{failed}; see {summary.of_failed}" if summary.has_output else failed


def _rows(summary: RunSummary) -> str:
    of_shard = "" if summary.shard.is_all else f" of shard {summary.shard}"
    before = summary.num_rows - summary.num_ended
    if not summary.num_rows:
        return f"none{of_shard}"
    if not summary.num_ended:
        return f"{summary.num_rows}{of_shard} done before; nothing had to be computed"
    parts = [f"{summary.num_rows}{of_shard} done in {format_duration(summary.total_s)}"]
    if before:
        parts.append(f"{before} of them by earlier runs")
    if summary.num_failed:
        parts.append(f"[red]{plain(failed_rows(summary))}[/]")
    return ", ".join(parts)


def _cut_off(summary: RunSummary) -> str:
    share = f"{summary.num_cut_off} of {count_of(summary.num_ended, 'row')} reached max_tokens"
    if not summary.num_cut_thinking:
        return share
    return (
        f"[yellow]{share}[/], {summary.num_cut_thinking} of them while the model still thought: "
        "these answers are empty"
    )


def _speed(summary: RunSummary) -> str:
    generated = format_number(summary.engine.generated_tokens / summary.elapsed_s)
    prompt = format_number(summary.engine.prompt_tokens / summary.elapsed_s)
    return f"[bold green]{generated}[/] tokens/s generated, {prompt} tokens/s of prompts"


def _output(summary: RunSummary, job_file: Path) -> str:
    if summary.has_output:
        return whole(summary.output)
    merge = whole(f"moebatch merge {shlex.quote(str(job_file))}")
    return f"when all shards have ended, {merge} writes {whole(summary.output)}"


def _lane(lane: LaneTime) -> str:
    between = ""
    if lane.between_s >= _LEAST_SHARE * lane.elapsed_s > 0:
        between = f", {format_duration(lane.between_s)} of it for logits and between tasks"
    return f"busy {format_duration(lane.busy_s)} ({lane.share:.0%}){between}"


def _sharing(summary: RunSummary) -> str:
    """What was computed once for several rows."""
    found, shared = [], summary.engine.shared_tokens
    if shared:
        share = shared / (shared + summary.engine.prompt_tokens)
        found.append(f"{shared} prompt tokens ({share:.0%}) were computed for other rows")
    if summary.num_copied:
        found.append(f"{count_of(summary.num_copied, 'row')} got the answer of an equal one")
    return "; ".join(found)


def _gating(use: GatingUse) -> str:
    how = f"[bold yellow]{plain(use.how)}[/]"
    if use.single_share is None:
        return how
    return (
        f"{how}: a single expert in {use.single_share:.1%} of all decisions, "
        f"{use.mean_experts:.2f} experts on average"
    )


def _time(summary: RunSummary) -> str:
    passes = count_of(summary.engine.num_passes, "pass", "passes")
    return (
        f"{format_duration(summary.total_s)} in all: {format_duration(summary.load_s)} to start, "
        f"{format_duration(summary.elapsed_s)} for {passes}"
    )


def _reading(summary: RunSummary) -> str:
    busy_s = next((lane.busy_s for lane in summary.lanes if lane.name == "disk->dram"), 0.0)
    rate = format_rate(summary.bytes_read / busy_s) if busy_s else "no rate"
    how = "" if summary.reads_past_page_cache else ", through the page cache (O_DIRECT refused)"
    return f"{format_bytes(summary.bytes_read)} of experts at {rate}{how}"


def _beside(summary: RunSummary, expected: Prediction) -> Iterator[RenderableType]:
    """Predicted beside measured figures. Where more is known now than before the first pass, the
    ratio is to what would have been predicted with it."""
    again = summary.hindsight
    titles = ("", "predicted", *(["in hindsight"] if again else []), "measured", "ratio")
    table = titled_columns(*titles, dim=("",))
    now = _figures(summary, again or expected)
    for (name, before, measured, shown), (_, known, _, _) in zip(
        _figures(summary, expected), now, strict=True
    ):
        ratio = f"{measured / known:.2f}" if known else ""
        hindsight = [shown(known)] if again else []
        table.add_row(name, shown(before), *hindsight, shown(measured), ratio)
    yield table
    if again:
        yield Paragraph(f"in hindsight: {' and '.join(_known_now(summary))}")


def _known_now(summary: RunSummary) -> Iterator[str]:
    if summary.mean_answer_tokens is not None:
        yield f"answers ended after {format_number(summary.mean_answer_tokens)} tokens on average"
    if summary.disk_rate is not None:
        yield f"the disk gave {format_rate(summary.disk_rate)}"


def _figures(summary: RunSummary, expected: Prediction) -> Iterator[_Figure]:
    """Name, predicted, measured, and how to write them."""
    if expected.job_time_s is not None and expected.num_passes is not None:
        yield "time of all passes", expected.job_time_s, summary.elapsed_s, format_duration
        yield (
            "passes",
            expected.num_passes,
            summary.engine.num_passes,
            lambda number: f"{number:.0f}",
        )
        num_chosen = LayerForesight.total(summary.foresight.values()).num_asked
        if expected.num_chosen is not None and num_chosen:
            yield "experts chosen", expected.num_chosen, num_chosen, format_number
        for lane in summary.lanes:
            busy_s = expected.busy_s.get(lane.name, 0.0)
            yield f"{lane.name} busy", busy_s, lane.busy_s, format_duration
    measured = summary.engine.generated_tokens / summary.elapsed_s
    yield "generated tok/s", expected.tokens_per_s, measured, format_number
    yield from _peaks(summary, expected)


def _peaks(summary: RunSummary, expected: Prediction) -> Iterator[_Figure]:
    peak, name = expected.peak_bytes["dram"], "peak of dram"
    if summary.vram_peak_bytes is not None:
        vram = expected.peak_bytes["vram"]
        yield "peak of vram", vram, summary.vram_peak_bytes, format_bytes
        if summary.emulated is not None:
            # It is memory of the process like any other.
            peak, name = peak + vram, "peak of dram and vram"
    yield name, peak, summary.peak_bytes, format_bytes


def foresight_table(layers: Mapping[int, LayerForesight]) -> RenderableType:
    """By layer: which share of the experts that gates asked for had stayed and was ready; which
    share of the foreseen ones was chosen, was ready in time, and was both."""
    table = titled_columns("layer", *_FORESIGHT, "GoodPred", dim=("layer",))
    for name, counts in _grouped(layers):
        table.add_row(name, *_foresight(counts))
    table.add_section()
    table.add_row("all", *_foresight(LayerForesight.total(layers.values())))
    return table


def _grouped(layers: Mapping[int, LayerForesight]) -> Iterator[tuple[str, LayerForesight]]:
    """Layers, or as many neighbours at a time as make few rows."""
    numbers, together = list(layers), -(-len(layers) // MOST_LAYERS)
    for first in range(0, len(numbers), together):
        some = numbers[first : first + together]
        name = str(some[0]) if len(some) == 1 else f"{some[0]} to {some[-1]}"
        yield name, LayerForesight.total(layers[layer] for layer in some)


def _foresight(counts: LayerForesight) -> Iterator[str]:
    yield str(counts.num_asked)
    yield f"{counts.hit_rate:.1%}"
    yield f"{counts.ready:.1%}"
    if not counts.num_foreseen:
        return
    yield str(counts.num_foreseen)
    for share in (counts.accuracy, counts.fetch_rate, counts.good_prediction):
        yield f"{share:.1%}"
