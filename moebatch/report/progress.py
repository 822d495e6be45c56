"""Progress of a run: a live block on a terminal, a plain line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from moebatch.advance import Advance, unwatched
from moebatch.job.status import RunStatus
from moebatch.periodic import periodically
from moebatch.report.console import say
from moebatch.report.tables import NamedRows, share_bar
from moebatch.units import format_bytes, format_duration

_PLAIN_INTERVALS_S = (3.0, 5.0, 10.0, 20.0, 30.0)
_LONGEST_INTERVAL_S = 60.0
_SAMPLE_INTERVAL_S = 1.0
_WINDOW_S = 30.0
_REFRESHES_PER_S = 4

StatusSource = Callable[[], RunStatus]


@contextmanager
def watching(source: StatusSource, console: Console, *, quiet: bool) -> Iterator[None]:
    """Shows what `source` says while the block runs; nothing when `quiet`."""
    if quiet:
        yield
    elif console.is_terminal and not console.is_dumb_terminal:
        rates = RecentRates()
        with Live(
            get_renderable=lambda: live_view(source(), rates),
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        ):
            yield
    else:
        with _plain_lines(source, console):
            yield


@contextmanager
def progress_bar(what: str, console: Console, *, quiet: bool) -> Iterator[Advance]:
    """A bar on a terminal; yields what is told the share of `what` that is done."""
    if quiet or not console.is_terminal:
        yield unwatched
        return
    columns = TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


class RecentRates:
    """Tokens per second and busy shares over the last half minute, not since the beginning."""

    def __init__(self) -> None:
        self._history: deque[RunStatus] = deque()

    def add(self, status: RunStatus) -> None:
        """Takes in a new moment and forgets those that are too old, or of another phase."""
        if self._history and self._history[-1].phase != status.phase:
            self._history.clear()
        self._history.append(status)
        while len(self._history) > 2 and status.elapsed_s - self._history[1].elapsed_s >= _WINDOW_S:
            self._history.popleft()

    @property
    def _span(self) -> tuple[RunStatus, RunStatus, float]:
        """The first moment and the last, and the seconds between them; from the beginning of the
        run where no time lies between."""
        first, last = self._history[0], self._history[-1]
        if first.elapsed_s >= last.elapsed_s:
            first = RunStatus(budget_bytes=last.budget_bytes)
        return first, last, max(1e-9, last.elapsed_s - first.elapsed_s)

    def tokens_per_s(self) -> tuple[float, float]:
        """Prompt and generated tokens per second."""
        first, last, seconds = self._span
        prompt = last.engine.prompt_tokens - first.engine.prompt_tokens
        generated = last.engine.generated_tokens - first.engine.generated_tokens
        return prompt / seconds, generated / seconds

    def busy_shares(self) -> dict[str, float]:
        """Share of time, 0..1, in which each lane was busy."""
        first, last, seconds = self._span
        before_s = {lane.name: lane.busy_s for lane in first.lanes}
        busy_s = {lane.name: lane.busy_s - before_s.get(lane.name, 0.0) for lane in last.lanes}
        return {name: min(1.0, lane_s / seconds) for name, lane_s in busy_s.items()}


def plain_line(status: RunStatus, rates: RecentRates) -> str:
    """One line for logs: no colours, no control characters."""
    if status.phase != "running":
        rows = f", {status.num_done}/{status.num_rows} rows" if status.num_rows else ""
        return f"moebatch: {status.phase}{rows}"
    prompt, generated = rates.tokens_per_s()
    lanes = " ".join(f"{name} {share:.0%}" for name, share in rates.busy_shares().items())
    name = "moebatch (emulated GPU)" if status.is_emulated else "moebatch"
    return (
        f"{name}: {status.num_done}/{status.num_rows} rows ({status.num_failed} failed), "
        f"{generated:.1f} tok/s generated, {prompt:.1f} tok/s prompt, "
        f"ETA {_eta(status)}, memory {_memory(status)}, busy: {lanes}, pass {_place(status)}"
    )


def live_view(status: RunStatus, rates: RecentRates) -> RenderableType:
    """The newest status, which `rates` take in."""
    rates.add(status)
    if status.phase != "running":
        return Text(f"{status.phase} …", style="dim")
    prompt, generated = rates.tokens_per_s()
    shares = rates.busy_shares()
    busiest = max(shares, key=lambda name: shares[name], default="")
    lanes = "  ".join(
        f"[{'bold yellow' if name == busiest else 'default'}]{name} {share:.0%}[/]"
        for name, share in shares.items()
    )
    tokens = f"[green]{generated:.1f}[/] generated, {prompt:.1f} prompt"
    rows = {
        "rows": f"{share_bar(status.fraction)}  {_rows(status)}",
        "tokens/s": f"{tokens}, {status.engine.num_running} sequences running",
        "memory": _memory(status),
        "busy": lanes,
        "pass": _place(status),
    }
    return NamedRows(rows.items())


def _rows(status: RunStatus) -> str:
    failed = f", [red]{status.num_failed} failed[/]" if status.num_failed else ""
    emulated = ", [yellow]emulated GPU[/]" if status.is_emulated else ""
    so_far = f"[cyan]ETA {_eta(status)}[/], {format_duration(status.elapsed_s)} so far"
    return f"[bold]{status.num_done}[/] of {status.num_rows}{failed}, {so_far}{emulated}"


def plain_intervals() -> Iterator[float]:
    """Seconds between lines: the first come soon, and the log of a night stays short."""
    yield from _PLAIN_INTERVALS_S
    yield from repeat(_LONGEST_INTERVAL_S)


@contextmanager
def _plain_lines(source: StatusSource, console: Console) -> Iterator[None]:
    rates, intervals = RecentRates(), plain_intervals()
    due = time.monotonic() + next(intervals)

    def sample() -> None:
        nonlocal due
        status = source()
        rates.add(status)
        if time.monotonic() >= due:
            due += next(intervals)
            say(console, plain_line(status, rates))

    with periodically(sample, _SAMPLE_INTERVAL_S, thread="progress"):
        yield


def _place(status: RunStatus) -> str:
    """Moves even when a single pass takes minutes."""
    engine = status.engine
    return f"{engine.num_passes + 1}, layer {engine.layer + 1} of {engine.num_layers}"


def _memory(status: RunStatus) -> str:
    return f"{format_bytes(status.memory_bytes)} of {format_bytes(status.budget_bytes)}"


def _eta(status: RunStatus) -> str:
    return "?" if status.eta_s is None else format_duration(status.eta_s)
