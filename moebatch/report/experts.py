"""Which experts are foreseen and kept, and what that is worth."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from moebatch.plan.expert_choice import Alternative, ExpertChoice
from moebatch.report.tables import titled_columns
from moebatch.spec.policy import Policy
from moebatch.units import format_duration

_MOST_SHOWN = 6


def experts_view(choice: ExpertChoice) -> RenderableType:
    """The alternatives side by side, the one that was chosen marked, and why."""
    table = titled_columns()
    for column in ("predictor", "cache"):
        table.add_column(column)
    for column in ("at hand", "loads a pass", "job", ""):
        table.add_column(column, justify="right")
    for one in _shown(choice):
        is_chosen = one is choice.chosen
        speedup = choice.plainest.seconds / one.seconds
        table.add_row(
            predictor_text(one.policy),
            cache_text(one.policy),
            f"{one.at_hand:.0%}",
            f"{one.num_loads:.1f}",
            format_duration(one.seconds),
            f"{speedup:.2f}x" + (" [bold green]chosen[/]" if is_chosen else ""),
            style="bold" if is_chosen else "dim",
        )
    return Group(Text("experts", style="bold"), table, Text(why(choice), style="dim"))


def why(choice: ExpertChoice) -> str:
    """One sentence on the choice."""
    chosen, plainest = choice.chosen, choice.plainest
    steps = f"{choice.depth} layer{'s' if choice.depth > 1 else ''} ahead"
    if chosen is plainest:
        return f"nothing else is worth it; experts come up to {steps}"
    return (
        f"{chosen.at_hand:.0%} of what gates ask for is there by then, not {plainest.at_hand:.0%}; "
        f"experts come up to {steps}"
    )


def predictor_text(policy: Policy) -> str:
    """The name of a predictor."""
    return policy.predictor or "correlation"


def cache_text(policy: Policy) -> str:
    """The rule of a cache, and whether layers differ in size."""
    return f"{policy.cache}, divided" if policy.cache_sizes else policy.cache


def _shown(choice: ExpertChoice) -> Iterator[Alternative]:
    """The fastest ones, and always what was chosen and what is plainest."""
    for number, one in enumerate(choice.alternatives):
        if number < _MOST_SHOWN or one in (choice.chosen, choice.plainest):
            yield one
