"""On a real cluster of one node: arrays, time limits, cancelled tasks, and shards run again."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import NOT_TESTED
from tests.slurm.cluster import PATIENCE_S, Cluster, Missing, one_node_cluster

pytestmark = pytest.mark.slurm
NUM_ROWS = 24
HARDWARE = """\
name: slow-link
title: A GPU behind a slow link, so that a job takes long without keeping a processor busy
date: "2026-11-21"
method: made up for tests
levels:
  vram:
    capacity: {{achieved: 96MiB}}
    bandwidth: {{achieved: 100GB/s}}
    gemm: {{float32: {{achieved: 1TFLOP/s}}}}
    attention_bandwidth: {{achieved: 100GB/s}}
    elementwise_bandwidth: {{achieved: 100GB/s}}
  dram:
    capacity: {{achieved: 8GB}}
    bandwidth: {{achieved: 10GB/s}}
    gemm: {{float32: {{achieved: 100GFLOP/s}}}}
    attention_bandwidth: {{achieved: 5GB/s}}
  disk:
    capacity: {{achieved: 100GB}}
links:
  disk->dram: {{achieved: 1GB/s}}
  dram->disk: {{achieved: 1GB/s}}
  dram->vram: {{achieved: {rate}}}
  vram->dram: {{achieved: 100MB/s}}
"""
"""Experts of 85 MB in all have to cross the link in every pass."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    with ExitStack() as stack:
        try:
            made = one_node_cluster(tmp_path_factory.mktemp("cluster"), base / "moebatch/slurm")
            running = stack.enter_context(made)
        except Missing as why:
            pytest.skip(f"{NOT_TESTED} on a real Slurm: {why}")
        yield running


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 1536, "head_dim": 64}
    return tiny_checkpoint("mixtral", num_attention_heads=4, num_key_value_heads=2, **sizes)


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the job gives when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = write_job(folder, model, rate=None)
    assert subprocess.run([sys.executable, "-m", "moebatch", "run", job, "--quiet"]).returncode == 0
    return (folder / "out.jsonl").read_bytes()


def write_job(folder: Path, model: Path, *, rate: str | None) -> Path:
    """On the emulated GPU behind a link of that rate, or on the CPU."""
    rows = [
        {"custom_id": f"row-{n}", "prompt": "the river counts " * (n % 7 + 1), "max_tokens": 40}
        for n in range(NUM_ROWS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    resources = {"dram": "1GiB", "threads": 1, "hardware": "generic-cpu"}
    if rate is not None:
        (folder / "hardware.yaml").write_text(HARDWARE.format(rate=rate))
        resources |= {"device": "emulate", "hardware": str(folder / "hardware.yaml")}
    job = {
        "model": {"path": str(model)},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"temperature": 0.7, "ignore_eos": True},
        "resources": resources,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def submit(
    cluster: Cluster, job: Path, *, shards: int, limit: str | None = None, array: str | None = None
) -> tuple[str, str]:
    """Numbers of the array and of the merge."""
    script = job.parent / "submit.sh"
    options = ["--time", limit] if limit else []
    cluster.run(
        *(sys.executable, "-m", "moebatch", "sbatch", str(job), "--shards", str(shards)),
        *("-o", str(script), *options),
    )
    said = cluster.run("sh", str(script), *([f"--array={array}"] if array else []), cwd=job.parent)
    shards_part, merge_part = said.split(", ")
    return shards_part.split()[-1], merge_part.split()[-1]


def logs(job: Path) -> str:
    files = sorted((job.parent / "out.jsonl.moebatch").glob("slurm-*.log"))
    return "\n".join(f"{file.name}: {file.read_text()}" for file in files)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.2)


def test_an_array_and_its_merge_give_what_one_run_gives(
    cluster: Cluster, model: Path, answers: bytes, tmp_path: Path
) -> None:
    job = write_job(tmp_path, model, rate="1GB/s")
    array, merge = submit(cluster, job, shards=4)
    assert cluster.wait(array) == ["COMPLETED"] * 4, logs(job)
    assert cluster.wait(merge) == ["COMPLETED"], logs(job)
    assert (tmp_path / "out.jsonl").read_bytes() == answers


def test_a_task_that_runs_out_of_time_is_queued_again_until_it_is_done(
    cluster: Cluster, model: Path, answers: bytes, tmp_path: Path
) -> None:
    """Slurm looks at its clock twice a minute: the signal comes after 60 to 90 seconds, and the
    link alone needs 100."""
    job = write_job(tmp_path, model, rate="35MB/s")
    array, merge = submit(cluster, job, shards=1, limit="2")
    assert cluster.wait(array) == ["COMPLETED"], logs(job)
    assert int(cluster.field(array, "Restarts")) >= 1
    assert "stopped early" in logs(job)
    assert cluster.wait(merge) == ["COMPLETED"], logs(job)
    assert (tmp_path / "out.jsonl").read_bytes() == answers


def test_a_task_that_is_cancelled_keeps_what_it_has(
    cluster: Cluster, model: Path, answers: bytes, tmp_path: Path
) -> None:
    job = write_job(tmp_path, model, rate="200MB/s")
    array, merge = submit(cluster, job, shards=1)
    journal = tmp_path / "out.jsonl.moebatch/journal"
    wait_for(lambda: any(f.stat().st_size for f in journal.glob("*")))
    cluster.run("scancel", array)
    cluster.wait(array)
    assert "stopped early (SIGTERM)" in logs(job)
    assert cluster.wait(merge) == ["FAILED"], "there is nothing to merge yet"
    assert "rows have not ended yet" in logs(job)
    assert not (tmp_path / "out.jsonl").exists()
    array, merge = submit(cluster, job, shards=1)
    assert cluster.wait(array) == ["COMPLETED"], logs(job)
    assert cluster.wait(merge) == ["COMPLETED"], logs(job)
    assert (tmp_path / "out.jsonl").read_bytes() == answers


def test_two_shards_that_were_lost_are_run_again_alone(
    cluster: Cluster, model: Path, answers: bytes, tmp_path: Path
) -> None:
    job = write_job(tmp_path, model, rate="300MB/s")
    array, merge = submit(cluster, job, shards=8)
    cluster.run("scancel", f"{array}_[3,7]")
    cluster.wait(array)
    assert cluster.wait(merge) == ["FAILED"], logs(job)
    array, merge = submit(cluster, job, shards=8, array="3,7")
    assert cluster.wait(array) == ["COMPLETED"] * 2, logs(job)
    assert cluster.wait(merge) == ["COMPLETED"], logs(job)
    assert (tmp_path / "out.jsonl").read_bytes() == answers


def test_the_example_runs_as_it_stands(cluster: Cluster, tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    (tmp_path / "jobs").mkdir()
    for name in ("slurm.sh", "demo.yaml", "demo.jsonl"):
        shutil.copy(repository / "jobs" / name, tmp_path / "jobs")
    (tmp_path / "demo").symlink_to(repository / "demo")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m moebatch \"$@\"\n")
    program.chmod(0o755)
    said = cluster.run(
        "env", f"MOEBATCH={program}", "sh", str(tmp_path / "jobs/slurm.sh"), cwd=repository
    )
    merge = said.split()[-1]
    assert cluster.wait(merge) == ["COMPLETED"]
    answers = (tmp_path / "jobs/demo.answers.jsonl").read_text()
    assert answers.count("\n") == (tmp_path / "jobs/demo.jsonl").read_text().count("\n")
