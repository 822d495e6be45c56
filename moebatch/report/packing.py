"""Report of a pack."""

from collections.abc import Iterator

from rich.console import Group, RenderableType

from moebatch.packing.pack import PackSummary
from moebatch.report.console import plain
from moebatch.report.tables import NamedRows, titled_columns
from moebatch.units import count_of, format_bytes, format_duration


def pack_view(summary: PackSummary) -> RenderableType:
    """Where the model is, how large it was and is, and how far its weights are from what they
    were."""
    table = titled_columns("layer", "relative error", left=("layer",), dim=("layer",))
    for layer, error in summary.errors.items():
        table.add_row(str(layer), f"{error:.4f}")
    shown: list[RenderableType] = ["", NamedRows(_outcome(summary)), "", table]
    if summary.curve:
        shown += ["", _curve(summary)]
    return Group(*shown)


def _curve(summary: PackSummary) -> RenderableType:
    """What more or fewer bits would have been worth."""
    table = titled_columns("bits", "experts in int8", "loss that remains")
    num_wide = summary.num_experts.get("int8", 0)
    for point in summary.curve:
        style = "bold green" if point.num_wide == num_wide else ""
        cells = f"{point.bits:g}", str(point.num_wide), f"{point.remaining:.0%}"
        table.add_row(*cells, style=style)
    return table


def _outcome(summary: PackSummary) -> Iterator[tuple[str, str]]:
    there = "it was packed before" if summary.was_there else format_duration(summary.run_s)
    yield "packed", f"{plain(str(summary.folder))}, {there}"
    named = (
        f"{count_of(count, 'expert')} in {name}" for name, count in summary.num_experts.items()
    )
    yield "experts", f"{', '.join(named)}: {_shrunk(summary.expert_bytes)}"
    yield "all weights", _shrunk(summary.weight_bytes)
    if summary.perplexities is not None:
        before, after = summary.perplexities
        change = f"{before.value:.4f} before, [bold green]{after.value:.4f}[/] now"
        loss = after.value / before.value - 1
        yield "perplexity", f"{change}, {loss:+.2%}, of {after.num_tokens} tokens"


def _shrunk(num_bytes: tuple[int, int]) -> str:
    before, now = map(format_bytes, num_bytes)
    share = num_bytes[1] / num_bytes[0]
    return f"{before} before, [bold green]{now}[/] now, {share:.0%}"
