"""A job on a GPU that torch sees: measured, one alone, within what is free of it. None is there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.device import Device
from moebatch.errors import ConfigError, DoesNotFit, Fault, OutOfMemory
from moebatch.job import planning
from moebatch.job.attempt import Attempt
from moebatch.job.check import check_job
from moebatch.job.machine import job_machine, known_device, rough_profile
from moebatch.job.options import RunOptions
from moebatch.job.planning import (
    in_fastest_dtype,
    job_problem,
    measured_machine,
    with_gpu_kernels,
)
from moebatch.job.run import JobRun
from moebatch.measure.saved import save_profile, this_machine_path
from moebatch.spec.job import Job
from moebatch.spec.machine.hardware import CONTEXT_BYTES
from moebatch.spec.machine.profile import HardwareProfile, load_profile
from moebatch.spec.workload import Workload
from tests.job.test_planning import write_job

GIB = 2**30
WORKLOAD = Workload.uniform(prompt_tokens=20, new_tokens=8, num_sequences=50)
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 16 GiB, of which 10 GiB are free."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (10 * GIB, 16 * GIB))


@pytest.fixture
def job(tmp_path: Path, tiny_checkpoint: Checkpoint) -> Job:
    return write_job(tmp_path, tiny_checkpoint("mixtral"))


def test_a_gpu_that_the_saved_profile_lacks_is_measured(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(load_profile("generic-cpu"), this_machine_path())
    told: list[str] = []
    monkeypatch.setattr(planning, "measure_machine", lambda *_, **__: load_profile("t4"))
    assert known_device(job) is None
    machine = measured_machine(job, open_model(job.model.path, "auto"), told.append)
    assert machine.kind == "cuda"
    assert any("lacks the GPU" in line for line in told)
    assert any("lacks the GPU" in note for note in machine.notes)


@pytest.mark.parametrize("reason", [None, "Triton: ImportError"])
def test_a_run_plans_with_the_kernels_that_the_gpu_has(
    job: Job, monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    monkeypatch.setattr(planning.gpu, "prepare", lambda: reason)
    files, hardware = open_model(job.model.path, "auto"), load_profile("rtx4090").hardware()
    checked = job_problem(job, files, WORKLOAD, hardware, "cuda")
    assert checked.prices.launches.is_fused, "a check takes them to be there"
    problem = with_gpu_kernels(checked, "cuda")
    assert problem.prices.launches.is_fused == (reason is None)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_check_plans_for_a_gpu_that_nobody_measured(
    tmp_path: Path, tiny_checkpoint: Checkpoint, device: str
) -> None:
    """As large as it is now."""
    job = write_job(tmp_path, tiny_checkpoint("mixtral"), device=device)
    save_profile(load_profile("generic-cpu"), this_machine_path())
    machine = job_machine(job, lambda: rough_profile(job))
    assert machine.kind == "cuda"
    vram = machine.hardware().vram
    assert vram is not None
    assert vram.capacity_bytes == 10 * GIB + CONTEXT_BYTES
    assert not check_job(tmp_path / "job.yaml").faults


@pytest.mark.parametrize(
    "error",
    [ConfigError([Fault(file="m", message="too short")]), torch.OutOfMemoryError("CUDA: full")],
    ids=["noise", "full"],
)
def test_a_gpu_that_cannot_be_measured_is_not_passed_over_in_silence(
    job: Job, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> HardwareProfile:
        raise error

    monkeypatch.setattr(planning, "measure_machine", refuse)
    machine = measured_machine(job, open_model(job.model.path, "auto"), lambda line: None)
    assert machine.kind == "cpu"
    assert any("could not be measured" in note for note in machine.notes)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_several_gpus_together_are_refused(
    tmp_path: Path, tiny_checkpoint: Checkpoint, device: str
) -> None:
    job = write_job(tmp_path, tiny_checkpoint("mixtral"), device=device, hardware="2xt4")
    with pytest.raises(ConfigError, match="has 2 GPUs, and a run computes on one"):
        job_machine(job, lambda: (load_profile("generic-cpu"), ()))


def test_a_job_takes_no_more_than_is_free_now(job: Job) -> None:
    files, hardware = open_model(job.model.path, "auto"), load_profile("t4").hardware()
    problem = job_problem(job, files, WORKLOAD, hardware, "cuda")
    assert problem.capacity_bytes("vram") == 10 * GIB + CONTEXT_BYTES
    on_cpu = job_problem(job, files, WORKLOAD, hardware, "cpu")
    assert on_cpu.hardware.vram is None


def test_more_than_is_free_is_refused(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    job = write_job(tmp_path, tiny_checkpoint("mixtral"), vram="12GiB", hardware="t4")
    files, hardware = open_model(job.model.path, "auto"), load_profile("t4").hardware()
    with pytest.raises(DoesNotFit, match=r"12\.0 GiB are asked for .* 10\.2 GiB"):
        job_problem(job, files, WORKLOAD, hardware, "cuda")


def test_a_gpu_that_refuses_memory_is_asked_for_less_though_the_job_names_none(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of what was planned; of what is left, where others have taken the rest."""
    planned, asked = [8 * GIB, 6 * GIB], list[int | None]()
    left = iter([(10 * GIB, 16 * GIB), (4 * GIB - CONTEXT_BYTES, 16 * GIB)])

    def refuse(attempt: Attempt) -> None:
        asked.append(attempt.context.job.resources.vram)
        if len(asked) > len(planned):
            raise DoesNotFit("vram: too little")
        raise OutOfMemory("CUDA out of memory")

    monkeypatch.setattr(Attempt, "execute", refuse)
    monkeypatch.setattr(Attempt, "vram_bytes", property(lambda _: planned[len(asked) - 1]))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: next(left))
    with pytest.raises(OutOfMemory, match="nor is there a plan for less"):
        JobRun(job, lambda line: None, RunOptions()).execute()
    assert asked == [None, 6 * GIB, 3 * GIB]


def test_what_torch_takes_of_a_gpu_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", shares.append)
    hardware = load_profile("t4").hardware()
    vram = replace(hardware.levels["vram"], capacity_bytes=4 * GIB)
    hardware = replace(hardware, levels={**hardware.levels, "vram": vram})
    Device(kind="cuda", hardware=hardware).memory()
    assert shares == [(4 * GIB - CONTEXT_BYTES) / (16 * GIB)]


def test_copies_that_no_run_makes_are_not_planned(job: Job) -> None:
    """A run on a GPU pins all of its memory; only an emulated one copies into pinned buffers."""
    files, hardware = (
        open_model(job.model.path, "auto"),
        load_profile("t4-moe-lightning").hardware(),
    )
    assert hardware.has_staging
    assert not job_problem(job, files, WORKLOAD, hardware, "cuda").stages
    assert job_problem(with_dram(job), files, WORKLOAD, hardware, "emulate").stages


@pytest.mark.parametrize(("hardware", "wanted"), [("t4", torch.float16), ("l4", torch.bfloat16)])
def test_bfloat16_is_not_emulated(
    tmp_path: Path, tiny_checkpoint: Checkpoint, hardware: str, wanted: torch.dtype
) -> None:
    job = write_job(tmp_path, tiny_checkpoint("mixtral", dtype="bfloat16"), hardware=hardware)
    machine = job_machine(job, lambda: (load_profile("generic-cpu"), ()))
    told: list[str] = []
    files = in_fastest_dtype(job, open_model(job.model.path, "auto"), machine, told.append)
    assert files.dtype == wanted
    assert not files.dtypes.converts
    assert [line.split(",")[0] for line in told] == ["note: computed in float16"] * (
        wanted == torch.float16
    )


def with_dram(job: Job) -> Job:
    """The same job with room for an emulated GPU."""
    more = job.resources.model_copy(update={"dram": 64 * GIB})
    return job.model_copy(update={"resources": more})
