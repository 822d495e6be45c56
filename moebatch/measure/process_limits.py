"""What this process may use of the machine it runs on."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SAFE_SHARE = 0.9
"""Of the memory that there is; the system needs some for what it does for a process."""
_UNLIMITED = 2**60
_SLURM_MEGABYTE = 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """The most of something that this process gets."""

    amount: int
    source: str
    """What it is, such as ``all main memory of this machine``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Limits of the process, not the totals of the host."""

    dram_bytes: int
    """Memory that a job may take when the user sets no budget."""
    num_cores: int
    memory: Limit
    """Bytes beyond which the system ends the process, whatever is free now."""
    cpus: Limit
    """Beyond them threads take turns."""


def detect_machine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """Reads what is free and what binds this process: the limits of its cgroups, its CPU affinity,
    and inside a Slurm job what the job was given on this node."""
    cores = len(os.sched_getaffinity(0))
    memory = _smallest(
        Limit(_meminfo(root, "MemTotal"), "all main memory of this machine"),
        *_memory_limits(root),
    )
    cpus = _smallest(Limit(cores, "the CPUs that this process may use"), *_cpu_quotas(root))
    promised = [_meminfo(root, "MemAvailable"), memory.amount, *_slurm_memory(environ, cores)]
    return Machine(
        dram_bytes=int(min(promised) * SAFE_SHARE),
        num_cores=min([cpus.amount, *_slurm_cores(environ)]),
        memory=memory,
        cpus=cpus,
    )


def _smallest(*limits: Limit) -> Limit:
    return min(limits, key=lambda limit: limit.amount)


def _meminfo(root: Path, field: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel reports no {field}")


# --- control groups, versions 1 and 2 ---------------------------------------------------------


def _memory_limits(root: Path) -> Iterator[Limit]:
    for group, version in _groups(root, "memory"):
        file = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        text = _read(file)
        if text.isdigit() and int(text) < _UNLIMITED:
            yield _of_group(int(text), file)


def _cpu_quotas(root: Path) -> Iterator[Limit]:
    """Cores that the CPU time of a group is worth, parts of one rounded up."""
    for group, version in _groups(root, "cpu"):
        if version == 2:
            file = group / "cpu.max"
            words = _read(file).split()
        else:
            file = group / "cpu.cfs_quota_us"
            words = [_read(file), _read(group / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            quota, period = map(int, words)
            yield _of_group(-(-quota // period), file)


def _of_group(amount: int, file: Path) -> Limit:
    return Limit(amount, f"what this process gets by {file}")


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folder and version of the cgroup of this process and of those above it."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        group = base / path.strip("/")
        while group.is_relative_to(base):
            yield group, version
            group = group.parent


def _read(path: Path) -> str:
    """The content of a small file of the kernel, empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- Slurm ------------------------------------------------------------------------------------


def _slurm_memory(environ: Mapping[str, str], cores: int) -> Iterator[int]:
    """Memory of the job on this node. Slurm tells one of the two; 0 stands for all there is."""
    per_node = _slurm_number(environ, "SLURM_MEM_PER_NODE")
    if per_node:
        yield per_node * _SLURM_MEGABYTE
    per_core = _slurm_number(environ, "SLURM_MEM_PER_CPU")
    if per_core:
        yield per_core * _SLURM_MEGABYTE * (_slurm_cores_on_node(environ) or cores)


def _slurm_cores(environ: Mapping[str, str]) -> Iterator[int]:
    """Cores of the job on this node, and of one task."""
    cores = (_slurm_cores_on_node(environ), _slurm_number(environ, "SLURM_CPUS_PER_TASK"))
    yield from (number for number in cores if number)


def _slurm_cores_on_node(environ: Mapping[str, str]) -> int | None:
    """Cores that the job has on this node; ``4(x2),3`` are those of three nodes."""
    here = _slurm_number(environ, "SLURM_CPUS_ON_NODE")
    if here or not _is_slurm_job(environ):
        return here
    nodes: list[int] = []
    for entry in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        nodes += [int(match[1])] * int(match[2] or 1) if match else []
    number = _slurm_number(environ, "SLURM_NODEID") or 0
    return nodes[number] if number < len(nodes) else None


def _slurm_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "") if _is_slurm_job(environ) else ""
    return int(text) if text.isdecimal() else None


def _is_slurm_job(environ: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in environ
