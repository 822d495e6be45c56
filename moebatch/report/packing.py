"""Report of a pack."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType

from moebatch.packing.pack import PackSummary
from moebatch.packing.precision import TradeOffPoint
from moebatch.report.console import plain
from moebatch.report.tables import NamedRows, titled_columns
from moebatch.units import count_of, format_bytes, format_duration


def pack_view(summary: PackSummary) -> RenderableType:
    """Where the model is, how large it was and is, and how far its weights are from what they
    were."""
    table = titled_columns("layer", "relative error", left=("layer",), dim=("layer",))
    for layer, error in summary.record.relative_errors.items():
        table.add_row(str(layer), f"{error:.4f}")
    shown: list[RenderableType] = ["", NamedRows(_outcome(summary)), "", table]
    if summary.record.trade_off:
        shown += ["", _curve(summary.record.trade_off, summary.contents.num_experts)]
    return Group(*shown)


def _curve(points: Sequence[TradeOffPoint], num_experts: Mapping[str, int]) -> RenderableType:
    """What more or fewer bits would have been worth."""
    table = titled_columns("bits", "experts in int8", "loss that remains")
    for point in points:
        style = "bold green" if point.num_wide == num_experts.get("int8", 0) else ""
        cells = f"{point.bits:g}", str(point.num_wide), f"{point.remaining:.0%}"
        table.add_row(*cells, style=style)
    return table


def _outcome(summary: PackSummary) -> Iterator[tuple[str, str]]:
    contents = summary.contents
    there = "it was packed before" if summary.was_there else format_duration(summary.run_s)
    yield "packed", f"{plain(str(summary.folder))}, {there}"
    named = (
        f"{count_of(count, 'expert')} in {name}" for name, count in contents.num_experts.items()
    )
    yield "experts", f"{', '.join(named)}: {_shrunk(contents.expert_bytes)}"
    yield "all weights", _shrunk(contents.weight_bytes)
    if summary.perplexities is not None:
        before, after = summary.perplexities
        change = f"{before.value:.4f} before, [bold green]{after.value:.4f}[/] now"
        loss = after.value / before.value - 1
        yield "perplexity", f"{change}, {loss:+.2%}, of {after.num_tokens} tokens"


def _shrunk(num_bytes: tuple[int, int]) -> str:
    before, now = map(format_bytes, num_bytes)
    share = num_bytes[1] / num_bytes[0]
    return f"{before} before, [bold green]{now}[/] now, {share:.0%}"
