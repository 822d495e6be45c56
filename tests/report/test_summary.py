"""The report of a run: three lines always, the rest on request, like beside like."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from moebatch.engine.statistics import EngineStatistics
from moebatch.folder.shard import ALL, Shard
from moebatch.job.status import LaneTime, RunSummary
from moebatch.plan.prediction import Prediction
from moebatch.report.console import show
from moebatch.report.summary import failed_rows, summary_view
from moebatch.schedule.drivers.foresight import LayerForesight
from moebatch.spec.policy.policy import Placement, Policy

GIB = 2**30
JOB = Path("my job.yaml")
SUMMARY = RunSummary(
    output="answers.jsonl",
    of_failed="answers.jsonl",
    shard=ALL,
    num_rows=100,
    num_ended=100,
    errors={"nan_logits": 1, "invalid_json_line": 2},
    engine=EngineStatistics(prompt_tokens=2000, generated_tokens=1000, num_passes=20, num_shrunk=1),
    load_s=5,
    elapsed_s=50,
    total_s=56,
    lanes=(
        LaneTime(name="cpu", busy_s=50, elapsed_s=50, between_s=5.68),
        LaneTime(name="disk->dram", busy_s=49, elapsed_s=50),
    ),
    waited_s={"experts": 30.0, "keys and values": 4.0},
    bytes_read=98 * 10**9,
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
PREDICTION = Prediction(
    tokens_per_s=1000,
    decode_tokens_per_s=1000,
    prefill_tokens_per_s=1000,
    layer_time_s=1,
    lanes_s={},
    bottleneck="cpu",
    peak_bytes={"dram": GIB},
    capacity_bytes={"dram": GIB},
    busy_s={"cpu": 400.0},
    num_passes=256,
    job_time_s=400.0,
)
HINDSIGHT = replace(
    PREDICTION, tokens_per_s=25, busy_s={"cpu": 40.0}, num_passes=20, job_time_s=40.0
)


def lines(summary: RunSummary, *, details: bool = False) -> list[str]:
    screen = StringIO()
    show(Console(file=screen, width=160), summary_view(summary, JOB, details=details))
    return screen.getvalue().splitlines()


def test_first_come_rows_with_their_time_speed_and_where_the_output_is() -> None:
    assert lines(SUMMARY) == [
        "",
        "      rows  100 done in 56.0s, 3 of 100 rows failed (2 invalid_json_line, 1 nan_logits); "
        "see answers.jsonl",
        "     speed  20 tokens/s generated, 40 tokens/s of prompts",
        "    output  answers.jsonl",
        "backed off  passes were halved 1 time, since the system refused memory",
        "      more  --details shows lanes, memory, and predicted beside measured",
    ]
    assert lines(SUMMARY, details=True)[:5] == lines(SUMMARY)[:5]


def test_a_run_that_had_nothing_to_compute_has_no_details_to_show() -> None:
    idle = lines(replace(SUMMARY, num_ended=0))
    assert idle[1].endswith("100 done before; nothing had to be computed")
    assert not any("--details" in line for line in idle)


def test_details_name_lanes_bytes_memory_and_policy() -> None:
    text = "\n".join(lines(SUMMARY, details=True))
    for part in (
        "1000 generated, 2000 of prompts",
        "busy 49.0s (98%)",
        "compute waited 30.0s for experts, 4.0s for keys and values",
        "91.3 GiB of experts at 2.00 GB/s",
        "2.25 GiB of 2.50 GiB",
        "experts 25 % dram, 75 % disk, 6 slots",
    ):
        assert part in text


def test_a_busy_lane_says_what_was_between_its_tasks() -> None:
    (line,) = [line for line in lines(SUMMARY, details=True) if line.strip().startswith("cpu")]
    assert line.split("  ")[-1] == "busy 50.0s (100%), 5.7s of it for logits and between tasks"


def test_answers_that_end_early_are_compared_with_what_was_to_be_expected_of_them() -> None:
    early = replace(
        SUMMARY, prediction=PREDICTION, hindsight=HINDSIGHT, mean_answer_tokens=10.0, bytes_read=0
    )
    shown = lines(early, details=True)
    rows = {line[:18].strip(): line[18:].split() for line in shown[-8:]}
    assert rows["time of all passes"] == ["6m40s", "40.0s", "50.0s", "1.25"]
    assert rows["generated tok/s"] == ["1,000", "25", "20", "0.80"]
    assert shown[-1] == "in hindsight: answers ended after 10 tokens on average"
    plain = lines(replace(SUMMARY, prediction=PREDICTION), details=True)
    assert plain[-2].split() == ["generated", "tok/s", "1,000", "20", "0.02"]


def test_how_many_experts_tokens_chose_stands_beside_what_even_routing_would_choose() -> None:
    expected = replace(PREDICTION, num_chosen=5120.0)
    asked = {0: LayerForesight(num_asked=1200), 1: LayerForesight(num_asked=848)}
    shown = lines(replace(SUMMARY, prediction=expected, foresight=asked), details=True)
    rows = {line[:18].strip(): line[18:].split() for line in shown}
    assert rows["experts chosen"] == ["5,120", "2,048", "0.40"]
    for unknown in (
        replace(SUMMARY, prediction=expected),
        replace(SUMMARY, prediction=PREDICTION, foresight=asked),
    ):
        assert not any("experts chosen" in line for line in lines(unknown, details=True)[-6:])


def test_a_run_that_began_again_says_what_its_figures_are_of() -> None:
    assert lines(replace(SUMMARY, num_begun_again=2))[4] == (
        "begun again  2 times in less memory, since the system refused it; tokens, speed and all "
        "that --details shows are of the last time"
    )


def test_answers_that_were_cut_off_are_counted_and_those_that_are_empty_said() -> None:
    assert not any("cut off" in line for line in lines(SUMMARY))
    cut = replace(SUMMARY, num_ended=40, num_cut_off=12)
    assert "   cut off  12 of 40 rows reached max_tokens" in lines(cut)
    said = " ".join(lines(replace(cut, num_cut_thinking=5)))
    assert "12 of 40 rows reached max_tokens, 5 of them while the model still thought: " in said


def test_what_was_done_before_is_said() -> None:
    assert lines(replace(SUMMARY, errors={}, num_ended=40))[1].endswith(
        "100 done in 56.0s, 60 of them by earlier runs"
    )
    nothing = replace(
        SUMMARY, errors={}, num_ended=0, engine=EngineStatistics(), elapsed_s=0.0, policy=None
    )
    assert lines(nothing)[1].endswith("100 done before; nothing had to be computed")


def test_a_shard_names_the_command_that_writes_the_output() -> None:
    text = "\n".join(lines(replace(SUMMARY, shard=Shard(2, 3), errors={})))
    assert "100 of shard 2/3 done" in text
    assert "when all shards have ended, moebatch merge 'my job.yaml' writes answers.jsonl" in text


def test_kernels_are_a_line_only_where_there_are_none() -> None:
    assert not any("kernels" in line for line in lines(SUMMARY))
    without = lines(replace(SUMMARY, torch_only="there is no C compiler"))
    assert any("torch only: there is no C compiler" in line for line in without)


def test_brackets_in_a_path_are_no_markup() -> None:
    text = "\n".join(lines(replace(SUMMARY, output="out[red].jsonl", of_failed="out[red].jsonl")))
    assert text.count("out[red].jsonl") == 2


def test_a_summary_without_any_good_row_has_no_policy() -> None:
    text = "\n".join(lines(replace(SUMMARY, policy=None, elapsed_s=0.0), details=True))
    assert "policy" not in text


def test_failed_rows_are_named_by_their_codes() -> None:
    assert failed_rows(SUMMARY).startswith("3 of 100 rows failed")
    assert failed_rows(replace(SUMMARY, of_failed="f.jsonl")).endswith("; see f.jsonl")
