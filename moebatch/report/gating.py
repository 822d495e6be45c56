"""What adaptive gating has learnt, as a table."""

from rich.console import RenderableType

from moebatch.calibration.gating_lesson import GatingLesson
from moebatch.model.learnt_gating import GatingPoint, LearntGating
from moebatch.report.console import plain
from moebatch.report.tables import NamedRows, titled_columns
from moebatch.units import format_duration


def gating_rows(grid: NamedRows, lesson: GatingLesson) -> None:
    """Adds where it is, what it was tried on, and what was chosen."""
    learnt = lesson.learnt
    grid.add_row("gating", plain(str(lesson.file)))
    tried = f"{lesson.num_expected} held-out tokens of {lesson.expected}"
    grid.add_row("tried on", f"{tried}, {format_duration(lesson.learn_s)} in all")
    grid.add_row("threshold", _chosen(learnt))


def gating_tables(learnt: LearntGating) -> list[RenderableType]:
    """How much layers matter, and what thresholds cost and save."""
    return [_sensitivities(learnt), "", _curve(learnt)]


def _chosen(learnt: LearntGating) -> str:
    point = learnt.chosen
    if not point.threshold:
        return f"none costs {learnt.wanted_loss:.2%} of perplexity or less; 0, which is exact"
    return (
        f"[bold green]{point.threshold:.4g}[/] for {learnt.wanted_loss:.2%} of perplexity: a "
        f"single expert in {point.single_share:.1%} of all decisions"
    )


def _sensitivities(learnt: LearntGating) -> RenderableType:
    table = titled_columns()
    table.add_column("layer", style="dim", justify="right")
    table.add_column("sensitivity", justify="right")
    for layer, sensitivity in learnt.sensitivities.items():
        table.add_row(str(layer), f"{sensitivity:.3g}")
    return table


def _curve(learnt: LearntGating) -> RenderableType:
    table = titled_columns()
    for title in ("threshold", "single expert", "experts", "perplexity", "loss"):
        table.add_column(title, justify="right")
    for point in learnt.curve:
        style = "bold green" if point.threshold == learnt.threshold else None
        table.add_row(*_cells(learnt, point), style=style)
    return table


def _cells(learnt: LearntGating, point: GatingPoint) -> tuple[str, ...]:
    return (
        f"{point.threshold:.4g}",
        f"{point.single_share:.1%}",
        f"{point.mean_experts:.2f}",
        f"{point.perplexity:.4f}",
        f"{learnt.loss(point):.2%}",
    )
