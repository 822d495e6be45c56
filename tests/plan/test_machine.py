"""The limits of the process count, not the totals of the host."""

from pathlib import Path

import pytest

from moebatch.plan.machine import detect_machine

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {128 * 2**20} kB\nMemAvailable: {64 * 2**20} kB\n"
    )
    (tmp_path / "proc/self/cgroup").write_text("")
    return tmp_path


def limit(root: Path, group: str, name: str, value: str) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(value + "\n")


def test_free_memory_less_a_margin_without_limits(root: Path) -> None:
    assert detect_machine(root).dram_bytes == int(0.9 * 64 * GIB)


def test_a_limit_of_a_group_above_counts_in_version_2(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    limit(root, "slurm/job_7", "memory.max", str(10 * GIB))
    limit(root, "slurm/job_7/step_0", "memory.max", "max")
    assert detect_machine(root).dram_bytes == int(0.9 * 10 * GIB)


def test_limits_of_version_1_count_and_unlimited_does_not(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("9:memory:/box\n4:cpu,cpuacct:/box\n")
    limit(root, "memory", "memory.limit_in_bytes", str(2**63 - 4096))
    limit(root, "memory/box", "memory.limit_in_bytes", str(3 * GIB))
    assert detect_machine(root).dram_bytes == int(0.9 * 3 * GIB)


def test_this_machine_can_be_read() -> None:
    machine = detect_machine()
    assert machine.dram_bytes > 0
    assert machine.num_cores >= 1
