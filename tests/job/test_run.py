"""Jobs under every schedule, on the CPU and on a GPU that is emulated: the same answers, pictures
that can be opened, and refusals that say what to do."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from moebatch.checkpoint.model_files import open_model
from moebatch.cli import app
from moebatch.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFit,
    MoebatchError,
    Stopped,
    StorageError,
)
from moebatch.job.check import check_job
from moebatch.job.machine import emulated_hardware, job_machine
from moebatch.job.options import RunOptions
from moebatch.job.planning import job_problem, plan_job
from moebatch.job.question import job_question
from moebatch.job.run import JobRun
from moebatch.job.status import RunSummary
from moebatch.measure.saved import save_profile, this_machine_path
from moebatch.plan.options import PlanOptions
from moebatch.predict.learnt_files import TABLE, empty_table, save_table
from moebatch.report.summary import summary_view
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.job import Job, load_job
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.policy.file import PolicyFile
from moebatch.spec.policy.policy import OpenPolicy, Placement
from moebatch.spec.workload import Workload
from tests.tiny import write_checkpoint

OWN = str(Path(__file__).parents[1] / "schedule" / "own_schedule.py") + ":mine"
"""A schedule in a file of the user's own."""

Checkpoint = Callable[..., Path]
PROFILE = """
name: small
title: a small GPU
source: made up
levels:
  vram:
    capacity: {achieved: 240MB}
    bandwidth: {achieved: 1TB/s}
    gemm: {float32: {achieved: 1TFLOP/s}}
  dram:
    capacity: {achieved: 4GB}
    bandwidth: {achieved: 20GB/s}
    gemm: {float32: {achieved: 0.1TFLOP/s}}
  disk: {capacity: {achieved: 10GB}}
links:
  dram->vram: {achieved: 1GB/s, staging: 2GB/s}
  vram->dram: {achieved: 1GB/s}
  disk->dram: {achieved: 1GB/s}
  dram->disk: {achieved: 1GB/s}
"""
EMULATED = {"device": "emulate", "hardware": "small.yaml", "threads": 2}
ROWS = [{"prompt": [3 + (7 * i) % 200] * (4 + 3 * i)} for i in range(6)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of the machine that runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, model: Path, **resources: object) -> Path:
    """A job with what it needs; its resources may be given."""
    (folder / "small.yaml").write_text(PROFILE)
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    job = {
        "model": {"path": str(model), "dtype": "float32"},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"max_tokens": 4, "temperature": 0},
        "resources": {"dram": "4GiB", "threads": 1, **resources},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


@pytest.fixture
def write_job(tmp_path: Path, tiny_checkpoint: Checkpoint) -> Callable[..., Path]:
    """`write` in a folder of the test."""
    return lambda model=None, **resources: write(
        tmp_path, model or tiny_checkpoint("mixtral"), **resources
    )


def policy(**changes: object) -> PolicyFile:
    """Weights that stream, and more than one micro-batch."""
    chosen = OpenPolicy(
        batch_size=4,
        micro_batch_size=2,
        weights=Placement(dram=0.34, disk=0.66),
        tokens_per_pass=24,
        num_slots=3,
    )
    return PolicyFile(title="mine", policy=replace(chosen, **changes), path="mine.yaml")


def on_gpu(**changes: object) -> PolicyFile:
    """The same with a GPU."""
    places = {"weights": Placement(vram=0.34, dram=0.66), "kv_cache": Placement(dram=1.0)}
    return policy(**{"ffn_on_gpu": True, "attention_on_gpu": True, **places, **changes})


def run(path: Path, **options: object) -> tuple[RunSummary, list[str]]:
    """The summary, and what the user was told. What an earlier run has done is done again."""
    told: list[str] = []
    shutil.rmtree(path.with_name("out.jsonl.moebatch"), ignore_errors=True)
    path.with_name("out.jsonl").unlink(missing_ok=True)
    return JobRun(load_job(path), told.append, RunOptions(**options)).execute(), told


def texts(path: Path) -> list[str]:
    lines = path.with_name("out.jsonl").read_text().splitlines()
    return [json.loads(line)["response"]["text"] for line in lines]


def shown(summary: RunSummary) -> str:
    screen = StringIO()
    console = Console(file=screen, width=160)
    console.print(summary_view(summary, Path("job.yaml"), details=True))
    return screen.getvalue()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoint) -> list[str]:
    """Answers of the plain driver."""
    path = write(tmp_path_factory.mktemp("plain"), tiny_checkpoint("mixtral"))
    summary, _ = run(path, is_plain=True, policy=policy())
    assert [lane.name for lane in summary.lanes] == ["cpu", "disk->dram"]
    assert summary.waits is None
    return texts(path)


@pytest.mark.few(name=("klotski", "cgopipe", "flexgen", "pregated", "promoe", OWN))
@pytest.mark.parametrize("name", [*SCHEDULES, OWN])
def test_every_schedule_gives_the_answers_of_the_plain_driver(
    write_job: Callable[..., Path], reference: list[str], name: str
) -> None:
    path = write_job()
    summary, _ = run(path, schedule=name, policy=policy())
    assert texts(path) == reference
    assert summary.policy is not None and summary.policy.schedule == name
    path = write_job(**EMULATED)
    summary, told = run(path, schedule=name, policy=on_gpu())
    assert texts(path) == reference
    assert {"gpu", "dram->vram"} <= {lane.name for lane in summary.lanes}
    assert any(line.startswith("expected on the emulated GPU") for line in told)


def test_keys_and_values_may_live_on_every_level(
    write_job: Callable[..., Path], reference: list[str], tmp_path: Path
) -> None:
    path = write_job()
    summary, _ = run(path, policy=policy(kv_cache=Placement(dram=0.34, disk=0.66)))
    assert texts(path) == reference
    path = write_job(**EMULATED)
    cache = Placement(vram=0.34, dram=0.33, disk=0.33)
    weights = Placement(vram=0.34, dram=0.33, disk=0.33)
    summary, _ = run(path, policy=on_gpu(kv_cache=cache, weights=weights))
    assert texts(path) == reference
    assert "dram->disk" in {lane.name for lane in summary.lanes}
    left = sorted(p.name for p in (tmp_path / "out.jsonl.moebatch").iterdir())
    kept = ["journal", "lock", "manifest.json", "status-1-of-1.json"]
    assert left == kept, "nothing of the cache is left behind"


def test_a_planned_job_on_an_emulated_gpu_says_so_everywhere(
    write_job: Callable[..., Path], reference: list[str]
) -> None:
    path = write_job(**EMULATED)
    job_run = JobRun(load_job(path), print)
    summary = job_run.execute()
    assert texts(path) == reference
    assert summary.policy is not None and summary.policy.ffn_on_gpu
    assert job_run.status().is_emulated
    report = shown(summary)
    first = report.strip().splitlines()[0]
    assert first.split()[0] == "emulated" and "the CPU computes everything" in first
    assert "gpu  busy" in report and "peak of vram" in report and "waited" in report
    assert summary.vram_peak_bytes is not None and summary.prediction is not None
    assert 0 < summary.vram_peak_bytes <= summary.prediction.peak_bytes["vram"]


@pytest.mark.parametrize("resources", [{}, EMULATED], ids=["cpu", "emulated"])
def test_without_a_gpu_nobody_is_told_of_memory_that_is_not_pinned(
    write_job: Callable[..., Path], resources: dict[str, object]
) -> None:
    _, told = run(write_job(**resources), policy=on_gpu() if resources else policy())
    assert told and not any("pin" in line for line in told)


def test_an_emulated_run_teaches_nothing_about_the_machine(
    write_job: Callable[..., Path],
) -> None:
    told: list[str] = []
    job_run = JobRun(load_job(write_job(**EMULATED)), told.append)
    job_run.recalibrate(job_run.execute())
    assert "teaches nothing" in told[-1]


# --- the command line ---------------------------------------------------------------------------


def invoke(*arguments: object) -> str:
    """What the command prints to standard error. Raises what it fails with."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if isinstance(result.exception, MoebatchError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.mark.parametrize("emulated", [False, True])
def test_a_trace_has_predicted_and_measured_passes_side_by_side(
    write_job: Callable[..., Path], tmp_path: Path, emulated: bool
) -> None:
    path = write_job(**(EMULATED if emulated else {}))
    trace, picture = tmp_path / "trace.json", tmp_path / "lanes.svg"
    said = invoke(
        *("run", path, "--schedule", "multi", "--trace", trace, "--trace-passes", 3),
        *("--gantt", picture),
    )
    assert "schedule multi" in said and f"trace: {trace}" in said
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["predicted", "measured"]
    for pid in names:
        ends = [e for e in events if e["pid"] == pid and e["name"].startswith("end of pass")]
        assert len(ends) == 3
        assert any(e["ph"] == "X" and e["cat"] == "expert" for e in events if e["pid"] == pid)
    assert all(e["ts"] >= 0 for e in events)
    assert picture.read_text().startswith("<svg")


def test_a_profile_that_is_to_be_corrected_is_looked_for_before_the_first_row(
    write_job: Callable[..., Path],
) -> None:
    path = write_job()
    with pytest.raises(ConfigError, match="run `moebatch profile` first"):
        invoke("run", path, "--recalibrate")
    assert not list(path.parent.glob("out.jsonl*"))


def test_a_picture_that_cannot_be_written_takes_nothing_from_a_run_that_has_ended(
    write_job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_timelines(*arguments: object, **options: object) -> None:
        raise StorageError("lanes.svg: no room left")

    monkeypatch.setattr("moebatch.report.pictures.drawings.write_timelines", write_timelines)
    path = write_job()
    said = invoke("run", path, "--gantt", tmp_path / "lanes.svg")
    assert "warning: lanes.svg: no room left" in said
    assert texts(path)


def test_what_was_measured_before_a_stop_is_drawn(
    write_job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, trace = JobRun.execute, tmp_path / "trace.json"

    def stopped(job_run: JobRun) -> None:
        execute(job_run)
        raise Stopped("the test")

    monkeypatch.setattr(JobRun, "execute", stopped)
    with pytest.raises(Stopped, match="the test"):
        invoke("run", write_job(), "--trace", trace)
    assert json.loads(trace.read_text())["traceEvents"]


def test_sync_on_a_gpu_is_refused_before_rows_are_looked_at(
    write_job: Callable[..., Path],
) -> None:
    told: list[str] = []
    job_run = JobRun(load_job(write_job(**EMULATED)), told.append, RunOptions(is_plain=True))
    with pytest.raises(ConfigError, match=r"set resources\.device to cpu"):
        job_run.execute()
    assert told == []


def test_sync_on_the_machines_own_gpu_is_refused_before_rows_are_looked_at(
    write_job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    told: list[str] = []
    path = write_job()
    save_profile(load_profile(str(tmp_path / "small.yaml")), this_machine_path())
    job_run = JobRun(load_job(path), told.append, RunOptions(is_plain=True))
    with pytest.raises(ConfigError, match=r"set resources\.device to cpu"):
        job_run.execute()
    assert told == []


def test_sync_runs_the_plain_driver(write_job: Callable[..., Path], reference: list[str]) -> None:
    path = write_job()
    said = invoke("run", path, "--sync", "--details")
    assert texts(path) == reference
    assert "busy" in said and "longest waits" not in said


@pytest.mark.parametrize(
    ("work", "instead"),
    [
        ("attention.of(k)", "()"),
        ("for e in chosen:", "for e in ():"),
        ("yield combine(i)", "pass"),
        ("for e in chosen:", "for e in list(chosen):"),
    ],
    ids=["attention", "experts", "combine", "slots"],
)
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_a_schedule_that_leaves_work_out_is_refused_and_no_row_is_answered(
    write_job: Callable[..., Path], tmp_path: Path, work: str, instead: str, place: str
) -> None:
    path, own = write_job(**(EMULATED if place == "gpu" else {})), tmp_path / "own.py"
    whole = Path(OWN.partition(":")[0]).read_text()
    assert work in whole
    own.write_text(whole.replace(work, instead))
    with pytest.raises(ConfigError, match=r", line \d+: "):
        run(path, schedule=f"{own}:mine", policy=on_gpu() if place == "gpu" else policy())
    assert not path.with_name("out.jsonl").exists()


def test_a_schedule_may_listen_to_a_gate_before_it_asks_for_what_that_has_chosen(
    write_job: Callable[..., Path], reference: list[str], tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    whole = (
        Path(OWN.partition(":")[0])
        .read_text()
        .replace("import Arrivals", "import GateChosen, Arrivals")
    )
    own.write_text(
        whole.replace("yield Route(i, k)", "assert (yield GateChosen(i, k)) == (yield Route(i, k))")
    )
    path = write_job()
    run(path, schedule=f"{own}:mine", policy=policy())
    assert texts(path) == reference


@pytest.mark.parametrize("share", [1, 0.5])
def test_sync_keeps_the_same_experts_whatever_the_cache(
    write_job: Callable[..., Path], reference: list[str], share: float
) -> None:
    path = write_job()
    weights = Placement(dram=share, disk=1 - share)
    changing = policy(cache="lru", weights=weights, num_slots=None)
    summary, _ = run(path, is_plain=True, policy=changing)
    assert texts(path) == reference
    assert summary.policy is not None and summary.policy.cache == "static"


REFUSED = {
    "no such schedule": (
        ["--schedule", "klotsky"],
        {},
        r"did you mean klotski\? 'list' in its place",
    ),
    "plain with a schedule": (["--sync", "--schedule", "hot"], {}, "leave --schedule out"),
    "plain with a trace": (["--sync", "--trace", "t.json"], {}, "has no lanes to draw"),
    "plain on a GPU": (["--sync"], EMULATED, "set resources.device to cpu"),
    "nothing to emulate": ([], {"device": "emulate"}, "needs a GPU to emulate; name one by"),
    "no GPU in the profile": (
        [],
        {"device": "emulate", "hardware": "generic-cpu"},
        "the profile generic-cpu has no vram",
    ),
    "no such device": ([], {"device": "gpu"}, "must be one of auto, cpu, cuda, emulate"),
}


@pytest.mark.parametrize(("options", "resources", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_with_a_way_out(
    write_job: Callable[..., Path],
    tmp_path: Path,
    options: list[str],
    resources: dict[str, str],
    message: str,
) -> None:
    path = write_job(**resources)
    with pytest.raises(ConfigError, match=message):
        invoke("run", path, *options)
    assert not (tmp_path / "out.jsonl").exists()
    if not options:
        assert any(message in str(fault) for fault in check_job(path).faults)


def test_a_real_gpu_is_asked_for_in_vain_where_torch_sees_none(
    write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = write_job(device="cuda", hardware="small.yaml")
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        run(path)
    job = load_job(write_job(hardware="small.yaml"))
    machine = job_machine(job, lambda: (load_profile("generic-cpu"), ()))
    assert machine.kind == "cpu" and machine.hardware().vram is None
    assert "the GPU of small is not used" in machine.notes[0]


# --- planning -----------------------------------------------------------------------------------


def test_an_emulated_machine_has_the_gpus_memory_and_links_and_this_cpu() -> None:
    t4, own = load_profile("t4").hardware(), load_profile("generic-cpu").hardware()
    made = emulated_hardware(t4, own)
    assert made.vram is not None and t4.vram is not None
    assert made.vram.capacity_bytes == t4.vram.capacity_bytes
    assert made.dram.capacity_bytes == t4.dram.capacity_bytes
    assert made.vram.processor == made.dram.processor == own.dram.processor
    assert made.links["dram->vram"] == t4.links["dram->vram"]
    assert made.links["disk->dram"] == own.links["disk->dram"], "the disk is read for real"


def test_two_processors_share_the_cores() -> None:
    own = load_profile("generic-cpu").hardware()
    sharing = own.with_processors(lambda processor: processor.scaled(0.5))
    whole, half = own.dram.processor, sharing.dram.processor
    assert whole is not None and half is not None
    assert half.gemm_for("float32").at(64) == pytest.approx(whole.gemm_for("float32").at(64) / 2)
    assert half.attention_bandwidth == whole.attention_bandwidth / 2


def test_a_question_about_a_job_is_planned_as_it_will_run(write_job: Callable[..., Path]) -> None:
    question = job_question(load_job(write_job(**EMULATED)), PlanOptions(has_job=True))
    assert question.problem.hardware.name == "small (emulated)"
    assert question.problem.stages == ("staging" in PROFILE)
    assert any("is emulated" in note for note in question.notes)


WORKLOAD = Workload.uniform(prompt_tokens=8, new_tokens=4, num_sequences=20)


def problem_of(job: Job) -> object:
    files = open_model(job.model.path, job.model.dtype)
    machine = job_machine(job, lambda: (load_profile("generic-cpu"), ()))
    return job_problem(job, files, WORKLOAD, machine.hardware(), machine.kind)


def test_budgets_bound_all_levels_and_an_emulated_gpu_counts_as_main_memory(
    write_job: Callable[..., Path],
) -> None:
    problem = problem_of(load_job(write_job(**EMULATED, vram="100MB", disk="3GB", dram="1GiB")))
    assert problem.capacity_bytes("vram") == 10**8
    assert problem.capacity_bytes("disk") == 3 * 10**9
    assert problem.capacity_bytes("dram") == 2**30 - 10**8
    with pytest.raises(DoesNotFit, match=r"lower resources\.vram or raise resources\.dram"):
        problem_of(load_job(write_job(**EMULATED | {"dram": "200MB"})))


NOT_RUNNABLE = [
    ({"ffn_on_gpu": False}, "policy.ffn_on_gpu", "experts are computed on the GPU"),
    ({"ffn_on_gpu": False, "num_slots": 0}, "policy.ffn_on_gpu", "experts are computed on the GPU"),
    ({"batching": "static", "tokens_per_pass": None}, "policy.batching", "write mixed"),
    ({"num_slots": 0}, "policy.num_slots", "experts below the GPU need slots"),
]


@pytest.mark.parametrize(("changes", "where", "message"), NOT_RUNNABLE)
def test_policies_that_a_gpu_cannot_run_are_refused_by_their_keys(
    write_job: Callable[..., Path], changes: dict[str, object], where: str, message: str
) -> None:
    problem = problem_of(load_job(write_job(**EMULATED)))
    with pytest.raises(ConfigError) as caught:
        plan_job(problem, on_gpu(**changes))
    (fault,) = caught.value.faults
    assert fault.where == where and message in fault.message


def test_a_cache_on_disk_needs_a_link_to_it_and_lanes(write_job: Callable[..., Path]) -> None:
    problem = problem_of(load_job(write_job()))
    on_disk = policy(kv_cache=Placement(dram=0.5, disk=0.5))
    with pytest.raises(ConfigError, match="--sync keeps keys and values in main memory"):
        plan_job(problem, on_disk, is_plain=True)
    links = {name: link for name, link in problem.hardware.links.items() if name != "dram->disk"}
    read_only = replace(problem, hardware=replace(problem.hardware, links=links))
    with pytest.raises(ConfigError, match="has no link dram->disk"):
        plan_job(read_only, on_disk)


def test_plans_on_a_gpu_compute_experts_there(write_job: Callable[..., Path]) -> None:
    problem = problem_of(load_job(write_job(**EMULATED)))
    assert plan_job(problem).policy.ffn_on_gpu
    paged = plan_job(problem, on_gpu(num_slots=1), schedule="cgopipe").policy
    assert paged.num_slots == 2 * 4 and not paged.attention_on_gpu, "two halves of four experts"
    few = plan_job(problem, on_gpu(num_slots=1), schedule="multi")
    assert "multi wants 8 slots" in few.notes[0]


# --- hints --------------------------------------------------------------------------------------


def test_a_correlation_table_is_used_and_a_stale_one_is_told_and_left_aside(
    write_job: Callable[..., Path], tmp_path: Path, reference: list[str]
) -> None:
    model = write_checkpoint(tmp_path / "model")
    owner = open_model(model, "float32").owner
    TABLE.path(model).parent.mkdir()
    save_table(TABLE.path(model), empty_table(owner, 1), owner)
    path = write_job(model)
    _, told = run(path, policy=policy())
    assert texts(path) == reference
    assert not any("correlation table" in line for line in told)
    assert not check_job(path).warnings

    stale = replace(owner, fingerprint="another")
    save_table(TABLE.path(model), empty_table(stale, 1), stale)
    _, told = run(path, policy=policy())
    assert texts(path) == reference
    warning = next(line for line in told if "correlation table" in line)
    assert warning.startswith("warning: going on without")
    assert "made for another model" in warning and "moebatch calibrate" in warning
    assert any("correlation table" in line for line in check_job(path).warnings)


def test_equal_greedy_rows_are_computed_once_unless_nothing_is_to_be_shared(
    write_job: Callable[..., Path],
) -> None:
    path = write_job()
    content = [{"id": number, "prompt": [5, 6, 7]} for number in range(3)]
    path.with_name("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    shared, _ = run(path)
    assert (shared.num_ended, shared.num_copied) == (3, 2)
    assert len(set(texts(path))) == 1
    apart, _ = run(path, no_share=True)
    assert (apart.num_ended, apart.num_copied) == (3, 0)
    assert len(set(texts(path))) == 1


def test_messages_for_a_model_without_a_chat_template_are_refused_before_anything_is_answered(
    write_job: Callable[..., Path], tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    """It is no fault of the rows, so others are not answered either."""
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("mixtral"), model)
    (model / "chat_template.jinja").unlink()
    path = write_job(model)
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    path.with_name("in.jsonl").write_text(f"{json.dumps(ROWS[0])}\n{json.dumps(chat)}\n")
    with pytest.raises(CheckpointError, match=r"no chat template, but .*2 has messages"):
        run(path)
    assert not path.with_name("out.jsonl").exists()
