"""What people read while a run goes on, and after it."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from moebatch.job.status import LaneTime, RunStatus, RunSummary
from moebatch.report.progress import RecentRates, plain_line
from moebatch.report.summary import failed_rows, stopped_early, summary_table
from moebatch.spec.policy import Placement, Policy

GIB = 2**30


def status(elapsed_s: float, generated: int, done: int = 0) -> RunStatus:
    return RunStatus(
        phase="running",
        run_folder="/data/out.jsonl.moebatch",
        num_rows=100,
        num_done=done,
        num_failed=0,
        num_ended=0,
        num_running=64,
        num_passes=3,
        layer=16,
        num_layers=32,
        prompt_tokens=2 * generated,
        generated_tokens=generated,
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


SUMMARY = RunSummary(
    output="answers.jsonl",
    num_rows=100,
    num_failed=3,
    errors={"nan_logits": 1, "invalid_json_line": 2},
    prompt_tokens=2000,
    generated_tokens=1000,
    load_s=5,
    run_s=50,
    total_s=56,
    lanes=(LaneTime(name="disk->dram", busy_s=49, elapsed_s=50),),
    waited_s=30,
    bytes_read=98 * 10**9,
    num_passes=20,
    num_preempted=0,
    num_shrunk=1,
    peak_bytes=int(2.25 * GIB),
    budget_bytes=int(2.5 * GIB),
    policy=Policy(
        batch_size=64,
        micro_batch_size=32,
        tokens_per_pass=512,
        num_slots=6,
        weights=Placement(dram=0.25, disk=0.75),
        num_kv_pages=100,
    ),
    reads_past_page_cache=True,
)


def test_rates_are_those_of_the_last_half_minute() -> None:
    rates = RecentRates()
    for second in range(0, 301, 10):
        # The second half of the run is ten times as fast.
        generated = second if second < 150 else 150 + 10 * (second - 150)
        rates.add(status(second, generated))
    assert rates.tokens_per_s() == (20.0, 10.0)
    assert rates.busy_shares() == {"disk->dram": 1.0, "cpu": 0.25}


def test_rates_start_anew_with_a_new_phase() -> None:
    rates = RecentRates()
    rates.add(replace(status(0, 0), phase="loading weights", lanes=()))
    rates.add(status(1, 10))
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


def test_progress_counts_tokens_while_no_row_is_done_and_is_whole_at_the_end() -> None:
    assert status(10, 5000).fraction == 0.5
    assert status(10, 50_000).fraction == 0.99
    assert status(10, 5000, done=100).fraction == 1.0


def test_the_summary_names_speed_lanes_bytes_memory_and_failures() -> None:
    screen = StringIO()
    Console(file=screen, width=160).print(summary_table(SUMMARY))
    text = screen.getvalue()
    for part in (
        "3 of 100 rows failed (2 invalid_json_line, 1 nan_logits); see answers.jsonl",
        "1000 generated (20.0 tok/s)",
        "2000 prompt (40.0 tok/s)",
        "busy 49.0s (98%)",
        "compute waited 30.0s",
        "91.3 GiB of experts at 2.00 GB/s",
        "2.25 GiB of 2.50 GiB",
        "experts 25 % dram, 75 % disk, 6 slots",
        "passes were halved 1 times",
    ):
        assert part in text


def test_kernels_are_a_line_only_where_there_are_none() -> None:
    screen = StringIO()
    Console(file=screen, width=160).print(summary_table(SUMMARY))
    assert "kernels" not in screen.getvalue()
    without = replace(SUMMARY, torch_only="there is no C compiler")
    Console(file=screen, width=160).print(summary_table(without))
    assert "torch only: there is no C compiler" in screen.getvalue()


def test_brackets_in_a_path_are_no_markup() -> None:
    screen = StringIO()
    Console(file=screen, width=160).print(summary_table(replace(SUMMARY, output="out[red].jsonl")))
    assert screen.getvalue().count("out[red].jsonl") == 2


def test_a_summary_without_any_good_row_has_no_policy() -> None:
    screen = StringIO()
    Console(file=screen, width=160).print(summary_table(replace(SUMMARY, policy=None, run_s=0.0)))
    assert "policy" not in screen.getvalue()


def test_short_messages() -> None:
    assert failed_rows(SUMMARY).startswith("3 of 100 rows failed")
    assert "5 of 100 rows done; they are in /data/out" in stopped_early(status(1, 1, done=5))
