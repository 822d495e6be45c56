"""Where a table's figures come from."""

import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

from moebatch.measure.process_limits import detect_machine
from moebatch.model.native import loader
from tests.benchmarks.jobs.peer import REPOSITORY


def machine_in_words() -> str:
    """Processor, cores, what kernels make of them, and memory."""
    machine = detect_machine()
    memory = f"{machine.dram_bytes / 2**30:.0f} GiB"
    kernels = loader.kernels()
    used = f"{kernels.instruction_set} kernels" if kernels else "no kernels"
    return f"{_processor()}, {machine.num_cores} cores, {used}, {memory}"


def commit() -> str:
    """Of the repository; a plus says that files have been changed since."""
    head = _git("rev-parse", "--short", "HEAD")
    return f"{head}+" if head and _git("status", "--porcelain") else head or "unknown commit"


def command_in_words() -> str:
    """As it was called."""
    spec = sys.modules["__main__"].__spec__
    module = "tests.benchmarks.jobs" if spec is None else spec.name.removesuffix(".__main__")
    return f"python -m {module} {shlex.join(sys.argv[1:])}".strip()


def today() -> str:
    return date.today().isoformat()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
