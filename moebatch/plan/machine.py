"""What this process may use of the machine it runs on."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHARE_OF_FREE_MEMORY = 0.9
_UNLIMITED = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Limits of the process, not the totals of the host."""

    dram_bytes: int
    """Memory that a job may take when the user sets no budget."""
    num_cores: int


def detect_machine(root: Path = Path("/")) -> Machine:
    """Reads the free memory, the limits of the cgroups and the CPU affinity of this process."""
    free = int(_meminfo(root, "MemAvailable") * _SHARE_OF_FREE_MEMORY)
    return Machine(
        dram_bytes=min([free, *(int(b * _SHARE_OF_FREE_MEMORY) for b in _cgroup_limits(root))]),
        num_cores=len(os.sched_getaffinity(0)),
    )


def _meminfo(root: Path, field: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel reports no {field}")


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Memory limits of the cgroup of this process and of those above it, versions 1 and 2."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        while group.is_relative_to(base):
            limit = _read_limit(group / name)
            if limit is not None:
                yield limit
            group = group.parent


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    limit = int(text) if text.isdigit() else _UNLIMITED
    return limit if limit < _UNLIMITED else None
