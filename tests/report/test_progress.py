"""What people read while a run goes on, and after it."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import StringIO
from itertools import islice
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from moebatch.engine.statistics import EngineStatistics
from moebatch.job.status import LaneTime, RunStatus
from moebatch.report import progress
from moebatch.report.progress import (
    RecentRates,
    live_view,
    plain_intervals,
    plain_line,
    progress_bar,
    watching,
)

GIB = 2**30


def status(elapsed_s: float, generated: int, done: int = 0) -> RunStatus:
    return RunStatus(
        phase="running",
        num_rows=100,
        num_done=done,
        engine=EngineStatistics(
            num_layers=32,
            layer=16,
            num_passes=3,
            num_running=64,
            prompt_tokens=2 * generated,
            generated_tokens=generated,
        ),
        expected_tokens=10_000,
        elapsed_s=elapsed_s,
        eta_s=80.0 if elapsed_s else None,
        memory_bytes=2 * GIB,
        budget_bytes=3 * GIB,
        lanes=(
            LaneTime(name="disk->dram", busy_s=elapsed_s, elapsed_s=elapsed_s),
            LaneTime(name="cpu", busy_s=elapsed_s / 4, elapsed_s=elapsed_s),
        ),
    )


def test_rates_are_those_of_the_last_half_minute() -> None:
    rates = RecentRates()
    for second in range(0, 301, 10):
        # The last half minute of the run is ten times as fast.
        generated = second if second < 270 else 270 + 10 * (second - 270)
        rates.add(status(second, generated))
    assert rates.tokens_per_s() == (20.0, 10.0)
    assert rates.busy_shares() == {"disk->dram": 1.0, "cpu": 0.25}


def test_rates_start_anew_with_a_new_phase() -> None:
    rates = RecentRates()
    rates.add(replace(status(0, 0), phase="loading weights", lanes=()))
    assert rates.tokens_per_s() == (0.0, 0.0)
    rates.add(status(1, 10))
    assert rates.tokens_per_s() == (20.0, 10.0), "of the run so far"
    assert rates.busy_shares() == {"disk->dram": 1.0, "cpu": 0.25}
    rates.add(status(2, 30))
    assert rates.tokens_per_s() == (40.0, 20.0)


def test_the_plain_line_has_rows_rates_eta_memory_lanes_and_place() -> None:
    rates = RecentRates()
    rates.add(status(10, 1000, done=5))
    now = status(20, 2000, done=10)
    rates.add(now)
    assert plain_line(now, rates) == (
        "moebatch: 10/100 rows (0 failed), 100.0 tok/s generated, 200.0 tok/s prompt, "
        "ETA 1m20s, memory 2.00 GiB of 3.00 GiB, busy: disk->dram 100% cpu 25%, "
        "pass 4, layer 17 of 32"
    )


def test_the_plain_line_has_rows_once_they_are_counted() -> None:
    counted = replace(status(0, 0, done=5), phase="loading weights")
    assert plain_line(counted, RecentRates()) == "moebatch: loading weights, 5/100 rows"
    begun = replace(counted, phase="checking input", num_rows=0)
    assert plain_line(begun, RecentRates()) == "moebatch: checking input"


def test_progress_counts_tokens_while_no_row_is_done_and_is_whole_at_the_end() -> None:
    assert status(10, 5000).fraction == 0.5
    assert status(10, 50_000).fraction == 0.99
    assert status(10, 5000, done=100).fraction == 1.0


def test_lines_come_soon_and_then_more_and_more_rarely() -> None:
    intervals = list(islice(plain_intervals(), 20))
    assert intervals[0] <= 5
    assert intervals == sorted(intervals)
    assert intervals[-1] == intervals[-2] > 30


@pytest.mark.parametrize("width", [140, 80, 50])
def test_the_live_block_leaves_out_no_figure_however_narrow_the_terminal(width: int) -> None:
    now = replace(
        status(7400, 2000, done=1_234_567),
        num_rows=2_000_000,
        errors={"not_json": 12},
        is_emulated=True,
    )
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=width)
    console.print(live_view(replace(now, phase="loading weights"), RecentRates()))
    console.print(live_view(now, RecentRates()))
    lines = screen.getvalue().splitlines()
    assert lines[0] == "loading weights …"
    assert max(map(len, lines)) <= width
    assert "    rows  ███████████████········· " in lines[1]
    words = " ".join(" ".join(lines[1:]).split())
    assert " 62% 1234567 of 2000000, 12 failed, ETA 1m20s, 2h03m so far, emulated GPU" in words
    assert "tokens/s 0.3 generated, 0.5 prompt, 64 sequences running" in words
    assert "memory 2.00 GiB of 3.00 GiB busy disk->dram 100% cpu 25%" in words
    assert words.endswith("pass 4, layer 17 of 32")


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_draw_gets_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(progress, "_PLAIN_INTERVALS_S", (0.0,))
    monkeypatch.setattr(progress, "_SAMPLE_INTERVAL_S", 0.001)
    screen, asked = StringIO(), threading.Event()
    console = Console(file=screen, force_terminal=True, width=40)

    def source() -> RunStatus:
        if screen.getvalue():
            asked.set()
        return replace(status(1, 1), phase="loading weights")

    with watching(source, console, quiet=False):
        assert asked.wait(60)
    assert screen.getvalue() == "moebatch: loading weights, 0/100 rows\n"


@pytest.mark.parametrize("is_quiet", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_shown_suits_the_screen_and_nothing_is_where_it_should_be_quiet(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_quiet: bool
) -> None:
    shown: list[str] = []

    def noted(name: str) -> Callable[..., AbstractContextManager[MagicMock]]:
        def show(*arguments: object, **options: object) -> AbstractContextManager[MagicMock]:
            shown.append(name)
            return nullcontext(MagicMock())

        return show

    for name in ("Live", "Progress", "_plain_lines"):
        monkeypatch.setattr(progress, name, noted(name))
    console = Console(file=StringIO(), force_terminal=is_terminal, width=40)
    with (
        watching(lambda: status(1, 1), console, quiet=is_quiet),
        progress_bar("reading", console, quiet=is_quiet) as advance,
    ):
        advance(0.5)
    on_screen = ["Live", "Progress"] if is_terminal else ["_plain_lines"]
    assert shown == ([] if is_quiet else on_screen)
