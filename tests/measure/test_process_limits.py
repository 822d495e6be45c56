"""The limits of the process count, not the totals of the host."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from moebatch.measure.process_limits import Limit, Machine, detect_machine

GIB = 2**30
CORES = len(os.sched_getaffinity(0))
several_cores = pytest.mark.skipif(CORES < 2, reason="a limit of one core shows on two only")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {128 * 2**20} kB\nMemAvailable: {64 * 2**20} kB\n"
    )
    (tmp_path / "proc/self/cgroup").write_text("")
    return tmp_path


def detect(root: Path, **environ: str) -> Machine:
    return detect_machine(root, environ)


def limit(root: Path, group: str, name: str, value: str) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(value + "\n")


def test_free_memory_less_a_margin_without_limits(root: Path) -> None:
    machine = detect(root)
    assert machine.dram_bytes == int(0.9 * 64 * GIB)
    assert machine.num_cores == CORES


def test_a_limit_of_a_group_above_counts_in_version_2(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    limit(root, "slurm/job_7", "memory.max", str(10 * GIB))
    limit(root, "slurm/job_7/step_0", "memory.max", "max")
    assert detect(root).dram_bytes == int(0.9 * 10 * GIB)


def test_limits_of_version_1_count_and_unlimited_does_not(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("9:memory:/box\n4:cpu,cpuacct:/box\n")
    limit(root, "memory", "memory.limit_in_bytes", str(2**63 - 4096))
    limit(root, "memory/box", "memory.limit_in_bytes", str(3 * GIB))
    assert detect(root).dram_bytes == int(0.9 * 3 * GIB)


def test_the_most_of_memory_is_the_smallest_limit_and_is_named(root: Path) -> None:
    """Whatever is free at the moment."""
    assert detect(root).memory == Limit(128 * GIB, "all main memory of this machine")
    (root / "proc/self/cgroup").write_text("0::/box/inner\n")
    limit(root, "box", "memory.max", str(3 * GIB))
    limit(root, "box/inner", "memory.max", str(5 * GIB))
    memory = detect(root).memory
    assert memory.amount == 3 * GIB
    assert str(root / "sys/fs/cgroup/box/memory.max") in memory.source


# --- CPU time ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("50000 100000", 1),
        ("100000 100000", 1),
        pytest.param("150000 100000", 2, marks=several_cores),
        ("max 100000", CORES),
        (f"{(CORES + 3) * 100000} 100000", CORES),
    ],
)
def test_cpu_time_bounds_the_cores_in_version_2(root: Path, quota: str, cores: int) -> None:
    (root / "proc/self/cgroup").write_text("0::/box/inner\n")
    limit(root, "box", "cpu.max", quota)
    limit(root, "box/inner", "cpu.max", "max 100000")
    machine = detect(root)
    assert machine.num_cores == machine.cpus.amount == cores


@pytest.mark.parametrize(("quota", "cores"), [("20000", 1), ("-1", CORES)])
def test_cpu_time_bounds_the_cores_in_version_1(root: Path, quota: str, cores: int) -> None:
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/box\n")
    limit(root, "cpu/box", "cpu.cfs_quota_us", quota)
    limit(root, "cpu/box", "cpu.cfs_period_us", "100000")
    assert detect(root).num_cores == cores


# --- Slurm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "memory_gib"),
    [
        ({"SLURM_MEM_PER_NODE": "16384"}, 16),
        ({"SLURM_MEM_PER_NODE": "0"}, 64),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}, 8),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_JOB_CPUS_PER_NODE": "4(x2),3"}, 8),
        (
            {
                "SLURM_MEM_PER_CPU": "2048",
                "SLURM_JOB_CPUS_PER_NODE": "4(x2),3",
                "SLURM_NODEID": "2",
            },
            6,
        ),
        ({"SLURM_MEM_PER_CPU": "1024"}, CORES),
        ({"SLURM_MEM_PER_NODE": "much"}, 64),
    ],
)
def test_what_a_slurm_job_was_given_bounds_its_memory(
    root: Path, environ: Mapping[str, str], memory_gib: int
) -> None:
    assert detect(root, SLURM_JOB_ID="7", **environ).dram_bytes == int(0.9 * memory_gib * GIB)


def test_a_smaller_cgroup_counts_inside_a_slurm_job(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/box\n")
    limit(root, "box", "memory.max", str(3 * GIB))
    assert detect(root, SLURM_JOB_ID="7", SLURM_MEM_PER_NODE="9000").dram_bytes == int(2.7 * GIB)


@pytest.mark.parametrize("name", ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"])
@pytest.mark.parametrize(("given", "cores"), [(1, 1), (CORES + 5, CORES), (0, CORES)])
def test_the_cores_of_a_slurm_task_bound_its_threads(
    root: Path, name: str, given: int, cores: int
) -> None:
    assert detect(root, SLURM_JOB_ID="7", **{name: str(given)}).num_cores == cores


def test_slurm_variables_outside_a_job_mean_nothing(root: Path) -> None:
    machine = detect(root, SLURM_MEM_PER_NODE="1024", SLURM_CPUS_PER_TASK="1")
    assert machine == detect(root)


def test_this_machine_can_be_read() -> None:
    machine = detect_machine()
    assert machine.dram_bytes > 0
    assert machine.num_cores >= 1
