"""Budgets that this machine, or another one, cannot give are refused with the limit that binds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moebatch.errors import DoesNotFit, ExitCode
from moebatch.job.check import check_job
from moebatch.job.limits import require_within_machine
from moebatch.job.question import job_question
from moebatch.job.run import JobRun
from moebatch.measure.process_limits import Limit, Machine
from moebatch.plan.options import PlanOptions
from moebatch.spec.job import Job, load_job

GIB = 2**30
TOO_MUCH = {
    "dram": ("900000TiB", "all main memory of this machine"),
    "disk": ("900000TiB", "what is free in"),
    "threads": (4096, "the CPUs that this process may use"),
}
SMALL = Machine(
    dram_bytes=2 * GIB,
    num_cores=2,
    memory=Limit(40 * GIB, "what this process gets by memory.max"),
    cpus=Limit(2, "the CPUs that this process may use"),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of the machine that runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def job_file(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    def write(**resources: object) -> Path:
        (tmp_path / "in.jsonl").write_text('{"prompt": [3, 4, 5]}\n')
        job = {
            "model": {"path": str(tiny_checkpoint("mixtral"))},
            "input": {"path": "in.jsonl"},
            "output": {"path": "out.jsonl"},
            "sampling": {"max_tokens": 3},
            "resources": {"dram": "1GiB", "threads": 1, **resources},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        return tmp_path / "job.yaml"

    return write


def asked(job_file: Callable[..., Path], **resources: object) -> Job:
    return load_job(job_file(**resources))


@pytest.mark.parametrize("name", TOO_MUCH)
def test_run_check_and_plan_refuse_what_this_machine_has_not(
    job_file: Callable[..., Path], name: str
) -> None:
    value, limit = TOO_MUCH[name]
    path = job_file(**{name: value})
    job = load_job(path)
    found = check_job(path)
    assert found.exit_code is ExitCode.DOES_NOT_FIT
    said = [found.faults[0].message]
    for attempt in (
        lambda: JobRun(job, lambda line: None).execute(),
        lambda: job_question(job, PlanOptions(has_job=True)),
    ):
        with pytest.raises(DoesNotFit) as refused:
            attempt()
        said.append(str(refused.value))
    assert len(set(said)) == 1
    assert said[0].startswith(f"resources.{name}: ")
    assert limit in said[0] or "what this process gets by /sys/fs/cgroup" in said[0]
    assert f"write {name}: " in said[0]
    assert not path.with_name("out.jsonl.moebatch").exists()


def test_a_budget_may_be_all_there_is_and_no_more(job_file: Callable[..., Path]) -> None:
    require_within_machine(asked(job_file, dram="40GiB", threads=2), SMALL)
    with pytest.raises(DoesNotFit) as refused:
        require_within_machine(asked(job_file, dram="41GiB", threads=3), SMALL)
    assert str(refused.value).splitlines() == [
        "resources.dram: 41.0 GiB is more than 40.0 GiB, what this process gets by memory.max; "
        "write dram: 36GiB or less, or leave it out",
        "resources.threads: 3 is more than 2, the CPUs that this process may use; "
        "write threads: 2 or less, or leave it out",
    ]


def test_what_the_message_says_to_write_is_accepted(job_file: Callable[..., Path]) -> None:
    with pytest.raises(DoesNotFit) as refused:
        require_within_machine(asked(job_file, dram="41GiB"), SMALL)
    advised = str(refused.value).partition("write dram: ")[2].split()[0]
    require_within_machine(asked(job_file, dram=advised), SMALL)


@pytest.mark.parametrize("level", ["vram", "dram"])
def test_on_another_machine_its_levels_are_the_limit(
    job_file: Callable[..., Path], level: str
) -> None:
    """A T4 has 15 GiB, and 184 GiB beside it: more than this machine may have."""
    fits = asked(job_file, dram="100GiB", vram="10GiB")
    problem = job_question(fits, PlanOptions(has_job=True, hw="t4")).problem
    assert problem.capacity_bytes("dram") == 100 * GIB
    job = asked(job_file, **{level: "300GiB"})
    with pytest.raises(DoesNotFit, match=rf"resources.{level}: 300 GiB is more than .* t4 has"):
        job_question(job, PlanOptions(has_job=True, hw="t4"))
    more = PlanOptions(has_job=True, hw="t4", what_if=(f"{level}=400GiB",))
    assert job_question(job, more).problem.capacity_bytes(level) == 400 * GIB  # type: ignore[arg-type]


def test_an_emulated_gpu_has_no_more_than_its_profile(job_file: Callable[..., Path]) -> None:
    path = job_file(hardware="t4", device="emulate", vram="16GiB")
    found = check_job(path)
    assert found.exit_code is ExitCode.DOES_NOT_FIT
    assert "resources.vram: 16.0 GiB is more than 15.0 GiB" in found.faults[0].message
