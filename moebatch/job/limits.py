"""Budgets of a job that are more than there is."""

from collections.abc import Collection, Iterator

from moebatch.errors import DoesNotFit, StorageError
from moebatch.measure.disk import free_bytes
from moebatch.measure.process_limits import SAFE_SHARE, Limit, Machine, detect_machine
from moebatch.spec.job import Job
from moebatch.spec.machine.hardware import LEVELS, Hardware, LevelName
from moebatch.units import format_unlike

_GIB, _MIB = 2**30, 2**20
_PRECISE_BELOW = 10 * _GIB


def num_threads(job: Job) -> int:
    """Threads that compute: as the job says, or a thread for each core."""
    return job.resources.threads or detect_machine().num_cores


def dram_bytes(job: Job) -> int:
    """Main memory of the process: as the job says, or what is free."""
    return job.resources.dram or detect_machine().dram_bytes


def free_on_disk(job: Job) -> Limit:
    """Room in the folder of the output; without end where that cannot be asked, since
    `require_writable` says what is wrong with it."""
    folder = job.output.path.parent
    try:
        return Limit(free_bytes(folder), f"what is free in {folder}")
    except StorageError:
        return Limit(2**62, "")


def disk_to_spare(job: Job) -> int:
    """Bytes that a job which says nothing may fill: the rest of what is free is for its output."""
    return int(free_on_disk(job).amount * SAFE_SHARE)


def fills_disk_of_model(job: Job) -> bool:
    """Whether what the job fills on disk lies on the file system of its model, or on one that the
    job names a budget for."""
    if job.resources.disk is not None:
        return True
    try:
        return job.output.path.parent.stat().st_dev == job.model.path.stat().st_dev
    except OSError:
        return True  # `require_writable` says what is wrong with it


def require_within_machine(job: Job, machine: Machine | None = None) -> None:
    """Raises DoesNotFit, with the real limit, for main memory, threads and room on disk that a run
    on this machine would not get."""
    asked, machine = job.resources, machine or detect_machine()
    found: list[str] = []
    if asked.dram is not None:
        found += _too_many_bytes("dram", asked.dram, machine.memory, share=SAFE_SHARE)
    if asked.threads is not None and asked.threads > machine.cpus.amount:
        have = machine.cpus
        found.append(
            f"resources.threads: {asked.threads} is more than {have.amount}, {have.source}; write "
            f"threads: {have.amount} or less, or leave it out"
        )
    if asked.disk is not None:
        found += _too_many_bytes("disk", asked.disk, free_on_disk(job))
    if found:
        raise DoesNotFit("\n".join(found))


def require_within_levels(
    job: Job, hardware: Hardware, levels: Collection[LevelName] = LEVELS
) -> None:
    """Raises DoesNotFit for budgets that are larger than the levels of a machine that need not be
    this one."""
    found: list[str] = []
    for name in levels:
        asked, level = getattr(job.resources, name), hardware.levels.get(name)
        if asked is not None and level is not None:
            there = Limit(level.capacity_bytes, f"what {hardware.name} has of it by its profile")
            found += _too_many_bytes(name, asked, there)
    if found:
        raise DoesNotFit("\n".join(found))


def _too_many_bytes(level: str, asked: int, have: Limit, *, share: float = 1.0) -> Iterator[str]:
    """What is wrong, and the most that should be written instead: a `share` of what there is."""
    if asked <= have.amount:
        return
    advice = f"write {level}: {_written(share * have.amount)} or less, or leave it out"
    too_many, there = format_unlike(asked, have.amount)
    yield f"resources.{level}: {too_many} is more than {there}, {have.source}; {advice}"


def _written(num_bytes: float) -> str:
    """Rounded down, as a job file has it."""
    if num_bytes >= _PRECISE_BELOW:
        return f"{int(num_bytes) // _GIB}GiB"
    return f"{int(num_bytes) // _MIB}MiB" if num_bytes >= _MIB else f"{max(1, int(num_bytes))}B"
