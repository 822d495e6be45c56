"""Report of a calibration."""

from collections.abc import Iterator

from rich.console import Group, RenderableType

from moebatch.calibration.calibrate import CalibrationSummary
from moebatch.calibration.counting import Comparison
from moebatch.calibration.gate_lessons import GatingLesson, PreGateLesson
from moebatch.model.routing.gating import LearntGating
from moebatch.predict.accuracy import mean_accuracy
from moebatch.report.console import plain
from moebatch.report.tables import NamedRows, titled_columns
from moebatch.units import count_of, format_duration


def calibration_view(summary: CalibrationSummary) -> RenderableType:
    """What was read, where the table is, and how well it predicts."""
    grid = NamedRows(_learnt(summary))
    if not summary.comparisons:
        return Group("", grid, *_pregates(summary.pregates))
    tables = [_accuracy(summary.comparisons)]
    if summary.lessons:
        tables += ["", _lessons(summary)]
    if summary.gating is not None:
        learnt = summary.gating.learnt
        tables += ["", _sensitivities(learnt), "", _curve(learnt)]
    return Group("", grid, "", *tables, *_pregates(summary.pregates))


def _learnt(summary: CalibrationSummary) -> Iterator[tuple[str, str]]:
    tokens = count_of(summary.num_tokens, "token")
    read = f"{tokens} in {count_of(summary.num_sequences, 'sequence')}"
    passes = count_of(summary.num_passes, "pass", "passes")
    yield "read", f"{read}, {passes}, {format_duration(summary.run_s)}"
    yield "table", plain(str(summary.table))
    for lesson in summary.lessons:
        yield lesson.name, plain(str(lesson.file))
    if summary.lessons:
        yield "learning", format_duration(summary.learn_s)
    if summary.trace is not None:
        yield "trace", plain(str(summary.trace))
    if summary.gating is not None:
        yield from _gating(summary.gating)
    if summary.comparisons:
        yield "accuracy", f"on the last {summary.num_held_out} tokens, before they were counted"
    else:
        yield "accuracy", "not measured: the text is too short to hold a tenth out"


def _pregates(lesson: PreGateLesson | None) -> Iterator[RenderableType]:
    """What gates that choose for a later layer cost in quality."""
    if lesson is None:
        return
    learnt = f"{lesson.num_tokens} tokens, {format_duration(lesson.learn_s)}"
    rows = {
        "pre-gates": plain(str(lesson.file)),
        "learnt from": f"{learnt} including what they are compared with",
        "perplexity": f"of {lesson.num_expected} held-out tokens of {lesson.expected}",
    }
    grid = NamedRows(rows.items())
    level = f"level {lesson.activation_level}"
    table = titled_columns(level, "perplexity", left=(level,), dim=(level,))
    for name, figure in lesson.perplexity.items():
        table.add_row(name, f"{figure:.4f}")
    yield from ("", grid, "", table)


def _accuracy(comparisons: tuple[Comparison, ...]) -> RenderableType:
    """Of the K experts that are predicted to be hot: how many took part, how many were hot."""
    titles = ["layer"]
    for one in comparisons:
        is_one = one.group_tokens == 1
        several = f"{one.group_tokens} tokens: took part", "hottest"
        titles += [*(["1 token: chosen"] if is_one else several), "by marginal"]
    table = titled_columns(*titles, dim=("layer", "by marginal"))
    layers = [layer.layer for layer in comparisons[0].correlation]
    for position, layer in enumerate(layers):
        table.add_row(str(layer), *_cells(comparisons, position))
    table.add_section()
    table.add_row("mean", *_cells(comparisons, None))
    return table


def _lessons(summary: CalibrationSummary) -> RenderableType:
    """Of the K experts that a predictor names for a token, the share that is chosen."""
    by_table = {layer.layer: layer.hot for layer in summary.comparisons[0].correlation}
    columns = {"correlation": by_table} | {one.name: one.accuracy for one in summary.lessons}
    table = titled_columns("layer", *columns, dim=("layer",))
    for layer in by_table:
        of_layer = (accuracy.get(layer) for accuracy in columns.values())
        table.add_row(str(layer), *("" if one is None else f"{one:.1%}" for one in of_layer))
    table.add_section()
    means = (sum(accuracy.values()) / max(1, len(accuracy)) for accuracy in columns.values())
    table.add_row("mean", *(f"{mean:.1%}" for mean in means))
    return table


def _cells(comparisons: tuple[Comparison, ...], position: int | None) -> Iterator[str]:
    """Figures of a layer, or their means."""
    for one in comparisons:
        if position is None:
            took_part, hot = mean_accuracy(one.correlation)
            marginal = mean_accuracy(one.marginal)[1]
        else:
            layer = one.correlation[position]
            took_part, hot = layer.took_part, layer.hot
            marginal = one.marginal[position].hot
        if one.group_tokens > 1:
            yield f"{took_part:.1%}"
        yield f"{hot:.1%}"
        yield f"{marginal:.1%}"


def _gating(lesson: GatingLesson) -> Iterator[tuple[str, str]]:
    """Where the threshold is, what it was tried on, and which one was chosen."""
    yield "gating", plain(str(lesson.file))
    tried = f"{lesson.num_expected} held-out tokens of {lesson.expected}"
    yield "tried on", f"{tried}, {format_duration(lesson.learn_s)} in all"
    point, loss = lesson.learnt.chosen, f"{lesson.learnt.wanted_loss:.2%} of perplexity"
    if not point.threshold:
        yield "threshold", f"none costs {loss} or less; 0, which is exact"
        return
    chosen = f"[bold green]{point.threshold:.4g}[/] for {loss}: a single expert in"
    yield "threshold", f"{chosen} {point.single_share:.1%} of all decisions"


def _sensitivities(learnt: LearntGating) -> RenderableType:
    table = titled_columns("layer", "sensitivity", dim=("layer",))
    for layer, sensitivity in learnt.sensitivities.items():
        table.add_row(str(layer), f"{sensitivity:.3g}")
    return table


def _curve(learnt: LearntGating) -> RenderableType:
    table = titled_columns("threshold", "single expert", "experts", "perplexity", "loss")
    for point in learnt.curve:
        style = "bold green" if point.threshold == learnt.threshold else None
        table.add_row(
            f"{point.threshold:.4g}",
            f"{point.single_share:.1%}",
            f"{point.mean_experts:.2f}",
            f"{point.perplexity:.4f}",
            f"{learnt.loss(point):.2%}",
            style=style,
        )
    return table
