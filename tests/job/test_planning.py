"""A job is planned with the figures of its machine, runs what a policy file says, and teaches the
machine's profile."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.statistics import EngineStatistics
from moebatch.errors import ConfigError, DoesNotFit
from moebatch.folder.shard import ALL
from moebatch.job.check import check_job
from moebatch.job.limits import fills_disk_of_model
from moebatch.job.machine import JobMachine
from moebatch.job.options import RunOptions
from moebatch.job.planning import (
    JobPlan,
    in_fastest_dtype,
    job_problem,
    measured_machine,
    plan_job,
)
from moebatch.job.question import job_question
from moebatch.job.run import JobRun, lesson
from moebatch.job.status import LaneTime, RunSummary, shown_waits
from moebatch.measure.saved import load_saved, save_profile, this_machine_path
from moebatch.model.native import loader
from moebatch.plan.options import PlanOptions
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.statistics import Statistics
from moebatch.schedule.timeline.timeline import LAUNCH, Span
from moebatch.spec.job import Job, load_job
from moebatch.spec.machine.hardware import Level
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.machine.values import (
    MEMORY_RATE,
    SPEED,
    CurveFigure,
    level_curve,
)
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.file import PolicyFile
from moebatch.spec.policy.policy import OpenPolicy, Placement
from moebatch.spec.workload import Workload
from tests.plan.problems import SHAPE, cpu_machine, gpu_machine, problem

Checkpoint = Callable[..., Path]
WORKLOAD = Workload.uniform(prompt_tokens=20, new_tokens=8, num_sequences=50)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of the machine that runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def job(tmp_path: Path, tiny_checkpoint: Checkpoint) -> Job:
    return write_job(tmp_path, tiny_checkpoint("mixtral"))


def write_job(folder: Path, model: Path, *, num_rows: int = 7, **resources: object) -> Job:
    rows = [{"prompt": [3 + i % 200] * (5 + i % 40) + [3 + i // 200]} for i in range(num_rows)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "model": {"path": str(model)},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"max_tokens": 5, "temperature": 0},
        "resources": {"dram": "4GiB", "threads": 1, **resources},
    }
    (folder / "job.yaml").write_text(json.dumps(content))
    return load_job(folder / "job.yaml")


class TestDtype:
    """What ``model.dtype: auto`` means."""

    @pytest.mark.parametrize(
        ("speed", "widening", "wanted"),
        [
            ("60GFLOP/s", "20GB/s", torch.float32),
            ("60GFLOP/s", "0.2GB/s", torch.bfloat16),
            ("190GFLOP/s", "200GB/s", torch.bfloat16),
            ("2TFLOP/s", "20GB/s", torch.bfloat16),
        ],
    )
    def test_auto_is_float32_only_where_that_is_clearly_faster(
        self,
        speed: str,
        widening: str,
        wanted: torch.dtype,
        tmp_path: Path,
        tiny_checkpoint: Checkpoint,
    ) -> None:
        job = write_job(tmp_path, tiny_checkpoint("mixtral", dtype="bfloat16"))
        assert computed(job, machine_of(speed, widening)) == wanted

    def test_what_the_job_says_is_not_questioned(
        self, tmp_path: Path, tiny_checkpoint: Checkpoint
    ) -> None:
        model = {"path": str(tiny_checkpoint("mixtral", dtype="bfloat16")), "dtype": "bfloat16"}
        write_job(tmp_path, Path(model["path"]))
        content = json.loads((tmp_path / "job.yaml").read_text()) | {"model": model}
        (tmp_path / "job.yaml").write_text(json.dumps(content))
        job = load_job(tmp_path / "job.yaml")
        assert computed(job, machine_of("60GFLOP/s", "20GB/s")) == torch.bfloat16

    def test_more_precise_checkpoints_stay_so(self, job: Job) -> None:
        assert computed(job, machine_of("60GFLOP/s", "20GB/s")) == torch.float32

    def test_auto_stays_what_the_first_run_has_found(
        self, tmp_path: Path, tiny_checkpoint: Checkpoint
    ) -> None:
        model = tiny_checkpoint("mixtral", dtype="bfloat16")
        for name, speed in (("a.yaml", "60GFLOP/s"), ("b.yaml", "2TFLOP/s")):
            (tmp_path / name).write_text(machine_of(speed, "20GB/s").profile.to_yaml())
        told: list[str] = []
        for name, num_rows in (("a.yaml", 7), ("b.yaml", 9)):
            job = write_job(tmp_path, model, hardware=name, num_rows=num_rows)
            output = job.output.model_copy(update={"format": "openai"})
            JobRun(job.model_copy(update={"output": output}), told.append).execute()
        notes = [line for line in told if "computed in" in line]
        assert notes == [
            "note: computed in float32, which is faster here than the model's bfloat16",
            "note: computed in float32, as in earlier runs of this job; bfloat16 is faster here",
        ]
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        prints = [row["response"]["body"]["system_fingerprint"] for row in rows]
        assert len(prints) == 9 and len(set(prints)) == 1


def machine_of(bfloat16: str, widening: str) -> JobMachine:
    """A CPU that multiplies float32 with 200 GFLOP/s."""
    profile = load_profile("generic-cpu")
    dram = profile.levels["dram"]
    gemm = {
        "float32": CurveFigure(achieved=level_curve(2e11), source="test"),
        "bfloat16": CurveFigure(achieved=level_curve(SPEED.read(bfloat16)), source="test"),
    }
    decoding = CurveFigure(achieved=level_curve(MEMORY_RATE.read(widening)), source="test")
    dram = replace(dram, gemm=gemm, gemm_streamed={}, decoding={"bfloat16": decoding})
    profile = replace(profile, levels={**profile.levels, "dram": dram})
    return JobMachine(kind="cpu", profile=profile)


def computed(job: Job, machine: JobMachine) -> torch.dtype:
    files = open_model(job.model.path, job.model.dtype)
    said: list[str] = []
    found = in_fastest_dtype(job, files, machine, said.append)
    assert bool(said) == (found.dtype != files.dtype)
    return found.dtype


def planned(job: Job, given: PolicyFile | None = None) -> JobPlan:
    files = open_model(job.model.path, job.model.dtype)
    machine = measured_machine(job, files, print)
    problem = job_problem(job, files, WORKLOAD, machine.hardware(), machine.kind)
    return plan_job(problem, given)


def a_policy(**changes: object) -> PolicyFile:
    policy = OpenPolicy(
        batch_size=4, micro_batch_size=2, weights=Placement(dram=0.5, disk=0.5), tokens_per_pass=16
    )
    return PolicyFile(title="mine", policy=replace(policy, **changes), path="mine.yaml")


def test_a_machine_without_profile_is_planned_with_rough_figures_and_a_note(job: Job) -> None:
    files = open_model(job.model.path, job.model.dtype)
    machine = measured_machine(job, files, print)
    assert machine.profile.name == "generic-cpu"
    assert any("moebatch profile" in note for note in machine.notes)


def test_the_profile_that_a_job_names_is_used(tmp_path: Path, job: Job) -> None:
    text = load_profile("generic-cpu").to_yaml().replace("generic-cpu", "mine")
    (tmp_path / "mine.yaml").write_text(text)
    named = write_job(tmp_path, job.model.path, hardware="mine.yaml")
    files = open_model(job.model.path, job.model.dtype)
    assert measured_machine(named, files, print).profile.name == "mine"
    t4 = write_job(tmp_path, job.model.path, hardware="t4")
    assert planned(t4).problem.hardware.vram is None, "runs are computed in main memory"


def test_a_given_policy_is_run(job: Job) -> None:
    told: list[str] = []
    summary = JobRun(job, told.append, RunOptions(policy=a_policy())).execute()
    assert summary.num_rows == 7 and summary.num_failed == 0
    assert summary.policy is not None and summary.policy.batch_size == 4
    assert any("up to 4 sequences" in line for line in told)


def test_planned_and_given_policies_give_the_same_answers(job: Job) -> None:
    def answers(given: PolicyFile | None) -> list[str]:
        JobRun(job, lambda line: None, RunOptions(policy=given)).execute()
        lines = job.output.path.read_text().splitlines()
        return [json.loads(line)["response"]["text"] for line in lines]

    assert answers(a_policy()) == answers(None)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"attention_on_gpu": True}, "policy.attention_on_gpu"),
        ({"ffn_on_gpu": True, "weights": Placement(vram=0.5, dram=0.5)}, "policy.weights.vram"),
        ({"ffn_on_gpu": True, "kv_cache": Placement(vram=0.5, dram=0.5)}, "policy.kv_cache.vram"),
        ({"batching": "static", "tokens_per_pass": None}, "policy.batching"),
        ({"num_slots": 0}, "policy.num_slots"),
    ],
)
def test_policies_that_cannot_be_run_are_refused_by_their_keys(
    job: Job, changes: dict[str, object], where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(job, a_policy(**changes))
    assert any(fault.where == where for fault in caught.value.faults), str(caught.value)


def test_a_policy_too_large_for_the_budget_is_refused_with_figures(job: Job) -> None:
    with pytest.raises(
        DoesNotFit, match=r"mine.yaml: dram: the policy needs .* there are 4.00 GiB"
    ):
        planned(job, a_policy(num_kv_pages=10**7))


def test_a_policy_that_is_a_little_too_large_is_refused_with_figures_that_differ(job: Job) -> None:
    files = open_model(job.model.path, job.model.dtype)
    machine = measured_machine(job, files, print)
    asked = job_problem(job, files, WORKLOAD, machine.hardware(), machine.kind)
    needed = asked.footprints(plan_job(asked, a_policy()).policy)["dram"].total_bytes
    with pytest.raises(DoesNotFit) as caught:
        plan_job(asked.with_capacity("dram", needed - 2**16), a_policy())
    figures = re.search(r"needs (.*), there are (.*)\. Largest", str(caught.value))
    assert figures is not None and figures[1] != figures[2]


def test_a_policy_that_was_planned_for_a_job_fits_into_its_run(job: Job) -> None:
    """Which has looked at all rows when it counts what it holds."""
    files = open_model(job.model.path, job.model.dtype)
    machine = measured_machine(job, files, print)
    in_run = job_problem(job, files, WORKLOAD, machine.hardware(), machine.kind)
    asked = job_question(job, PlanOptions(has_job=True)).problem
    assert asked.program_bytes["dram"] >= in_run.program_bytes["dram"] + 7 * 2**20


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_plan_shares_the_beginnings_of_prompts_only_where_its_run_does(
    is_dynamic: bool, tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    model = tiny_checkpoint("qwen3_moe", **({"rope_parameters": scaling} if is_dynamic else {}))
    job = write_job(tmp_path, model)
    rows = [{"prompt": [3] * 40 + [4 + number]} for number in range(8)]
    job.input.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = job_question(job, PlanOptions(has_job=True)).problem
    assert (asked.workload.mean_shared_tokens == 0) == is_dynamic


@pytest.mark.parametrize(("disk_bytes", "is_on_disk"), [(2**40, True), (2**20, False)])
def test_keys_and_values_of_a_job_go_to_disk_as_far_as_it_may_fill_it(
    disk_bytes: int, is_on_disk: bool, job: Job
) -> None:
    machine, files = cpu_machine(8, disk=6e9), open_model(job.model.path, job.model.dtype)
    rows = Workload.uniform(prompt_tokens=300, new_tokens=200, num_sequences=1000)
    small = job_problem(job, files, rows, machine).with_capacity("dram", 8 * 2**30)
    limited = small.with_capacity("disk", disk_bytes)
    asked = replace(limited, shape=SHAPE, dtypes=problem().dtypes)
    assert (plan_job(asked).policy.kv_cache.disk > 0) == is_on_disk


def test_a_job_that_says_nothing_of_the_disk_leaves_some_of_it_free(job: Job) -> None:
    machine, files = cpu_machine(8), open_model(job.model.path, job.model.dtype)
    vast = Level(name="disk", capacity_bytes=2**60)
    machine = replace(machine, levels={**machine.levels, "disk": vast})
    asked = job_problem(job, files, Workload.uniform(prompt_tokens=8, new_tokens=8), machine)
    status = os.statvfs(job.output.path.parent)
    assert asked.capacity_bytes("disk") <= 0.95 * status.f_bavail * status.f_frsize


@pytest.mark.parametrize(("disk", "is_known"), [(None, False), (2**30, True)])
def test_a_disk_other_than_that_of_the_model_is_known_where_a_job_says_so(
    disk: int | None, is_known: bool, job: Job
) -> None:
    elsewhere = job.output.model_copy(update={"path": Path("/proc/answers.jsonl")})
    limits = job.resources.model_copy(update={"disk": disk})
    there = job.model_copy(update={"output": elsewhere, "resources": limits})
    assert fills_disk_of_model(job)
    assert fills_disk_of_model(there) == is_known


def test_a_policy_is_checked_with_the_schedule_that_it_is_run_with() -> None:
    asked = problem(gpu_machine(60), shape=load_model("qwen3-next-80b-a3b").shape)
    on_gpu = {"attention_on_gpu": True, "ffn_on_gpu": True}
    given = a_policy(weights=Placement(dram=1), **on_gpu)
    assert plan_job(asked, given, schedule="flexgen").policy.schedule == "flexgen"
    with pytest.raises(ConfigError, match=r"cgopipe.* attends on the CPU, but recurrent layers"):
        plan_job(asked, given, schedule="cgopipe")


def test_a_policy_that_only_another_schedule_makes_runnable_is_run_with_that_one() -> None:
    asked = problem(gpu_machine(60), shape=load_model("qwen3-next-80b-a3b").shape)
    given = a_policy(weights=Placement(dram=1), ffn_on_gpu=True)
    with pytest.raises(ConfigError, match="recurrent layers are computed on the GPU"):
        plan_job(asked, given)
    assert plan_job(asked, given, schedule="flexgen").policy.attention_on_gpu


def test_prediction_stands_beside_what_was_measured(job: Job) -> None:
    summary = JobRun(job, lambda line: None).execute()
    expected = summary.prediction
    assert expected is not None and expected.job_time_s is not None
    assert expected.num_passes == summary.engine.num_passes
    assert set(expected.peak_bytes) == {"dram", "disk"}


def test_a_question_about_a_job_samples_its_rows(tmp_path: Path, job: Job) -> None:
    long = write_job(tmp_path, job.model.path, num_rows=2500)
    question = job_question(long, PlanOptions(has_job=True))
    workload = question.problem.workload
    assert workload.num_sequences == 2500
    assert len(workload.lengths) <= 1000
    assert workload.mean_prompt_tokens == pytest.approx(24.5, abs=1)
    assert any("at most 1000 rows" in note for note in question.notes)


def test_a_question_about_a_job_on_another_machine_has_all_of_it(job: Job) -> None:
    question = job_question(job, PlanOptions(has_job=True, hw="t4"))
    assert question.problem.hardware.vram is not None
    assert question.problem.capacity_bytes("dram") == 2**32, "the job's budget still holds"
    more = PlanOptions(has_job=True, hw="t4", what_if=("dram=64GiB",))
    assert job_question(job, more).problem.capacity_bytes("dram") == 64 * 2**30


@pytest.mark.parametrize("hw", [None, "t4"])
def test_a_question_about_a_job_supposes_other_weights(job: Job, hw: str | None) -> None:
    asked = PlanOptions(has_job=True, hw=hw)
    for options in (replace(asked, weights="int8"), replace(asked, what_if=("weights=int8",))):
        supposed = job_question(job, options).problem.dtypes.stored
        assert str(supposed) == "packed int8, a scale for each row"


def test_checks_and_plans_say_first_that_kernels_are_compiled(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "log_compiling", lambda log: log("compiling"))
    said: list[str] = []
    assert not check_job(tmp_path / "job.yaml", log=said.append).faults
    job_question(job, PlanOptions(has_job=True), said.append)
    assert said == ["compiling"] * 2


SUMMARY = RunSummary(
    output="out.jsonl",
    of_failed="out.jsonl",
    shard=ALL,
    num_rows=1,
    num_ended=1,
    engine=EngineStatistics(prompt_tokens=1, generated_tokens=1, num_passes=3),
    load_s=1.0,
    elapsed_s=100.0,
    total_s=101.0,
    lanes=(
        LaneTime(name="disk->dram", busy_s=90.0, elapsed_s=100.0),
        LaneTime(name="cpu", busy_s=50.0, elapsed_s=100.0),
    ),
    waited_s={"experts": 50.0},
    bytes_read=int(180e9),
    peak_bytes=1,
    budget_bytes=2,
    policy=None,
    reads_past_page_cache=True,
)


def test_a_run_teaches_the_rate_of_the_disk_and_the_speed_of_the_cpu(job: Job) -> None:
    prediction = replace(planned(job).prediction, busy_s={"cpu": 40.0})
    before = load_profile("generic-cpu")
    learnt = lesson(before, replace(SUMMARY, prediction=prediction))
    after = learnt.profile.hardware()
    assert after.links["disk->dram"].bandwidth == pytest.approx(2e9)
    slow, fast = before.hardware().dram.processor, after.dram.processor
    assert slow is not None and fast is not None
    assert fast.gemm_for("bfloat16").at(128) == pytest.approx(
        0.8 * slow.gemm_for("bfloat16").at(128)
    )
    assert fast.sequence_s == pytest.approx(slow.sequence_s / 0.8)
    assert len(learnt.lines) == 2


def test_answers_that_ended_early_are_not_taken_for_a_fast_cpu(job: Job) -> None:
    """Without what was to be expected of them it would seem eight times as fast."""
    prediction = replace(planned(job).prediction, busy_s={"cpu": 400.0})
    early = replace(
        SUMMARY, prediction=prediction, hindsight=replace(prediction, busy_s={"cpu": 50.0})
    )
    assert lesson(load_profile("generic-cpu"), early).lines[-1].startswith("the CPU achieves 1.00 ")


def test_hindsight_knows_how_long_answers_were(tmp_path: Path, job: Job) -> None:
    content = json.loads((tmp_path / "job.yaml").read_text())
    content["sampling"] = {"max_tokens": 60, "temperature": 0}
    (tmp_path / "job.yaml").write_text(json.dumps(content))
    whole = JobRun(load_job(tmp_path / "job.yaml"), lambda line: None).execute()
    content["sampling"]["stop_token_ids"] = list(range(320))
    content["output"] = {"path": "early.jsonl"}
    (tmp_path / "job.yaml").write_text(json.dumps(content))
    early = JobRun(load_job(tmp_path / "job.yaml"), lambda line: None).execute()
    assert early.mean_answer_tokens == 1.0
    assert early.prediction is not None and early.prediction.num_passes == 60
    assert (
        early.hindsight is not None and early.hindsight.num_passes == early.engine.num_passes == 1
    )
    assert whole.mean_answer_tokens is None or whole.mean_answer_tokens > 1


def test_what_the_cpu_does_between_tasks_is_work_and_no_wait(job: Job) -> None:
    summary = JobRun(job, lambda line: None).execute()
    cpu = next(lane for lane in summary.lanes if lane.name == "cpu")
    assert 0 < cpu.between_s < cpu.busy_s <= cpu.elapsed_s
    assert summary.waits is not None
    assert LAUNCH not in summary.waits.lanes["cpu"].idle_s


@pytest.mark.parametrize(("name", "longest_s"), [("cpu", [1]), ("gpu", [2, 1])])
def test_waits_for_launches_are_shown_unless_the_lane_launches(
    name: str, longest_s: list[int]
) -> None:
    statistics, task = Statistics(num_layers=1), Task(Kind.EXPERT, 0, expert=0)
    for start_s, waited_for in ((2, None), (4, "chunk(0, e0)")):
        statistics.add(Span(task, name, start_s, start_s + 1, waited_for=waited_for))
    assert [bubble.seconds for bubble in shown_waits(statistics).lanes[name].longest] == longest_s


def test_a_short_run_teaches_nothing(job: Job) -> None:
    lanes = tuple(replace(lane, busy_s=1.0) for lane in SUMMARY.lanes)
    summary = replace(SUMMARY, lanes=lanes, prediction=planned(job).prediction)
    assert lesson(load_profile("generic-cpu"), summary).lines == ()


def test_rough_figures_are_not_kept_as_those_of_this_machine(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moebatch.job.run._LEAST_BUSY_S", 0.0)
    run = JobRun(job, lambda line: None)
    with pytest.raises(ConfigError, match="run `moebatch profile` first"):
        run.recalibrate(run.execute())
    assert not this_machine_path().exists()


def test_what_was_learnt_is_kept_as_the_profile_of_this_machine(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moebatch.job.run._LEAST_BUSY_S", 0.0)
    save_profile(load_profile("generic-cpu"), this_machine_path())
    told: list[str] = []
    run = JobRun(job, told.append)
    run.recalibrate(run.execute())
    assert this_machine_path().is_file()
    saved = load_saved()
    assert saved is not None and saved.levels["dram"].bandwidth is not None
    assert "a run of" in saved.levels["dram"].bandwidth.source
    assert any(str(this_machine_path()) in line for line in told)
