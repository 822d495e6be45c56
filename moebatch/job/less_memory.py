"""What is done when the system refuses memory that was promised: plan again, for less of it."""

from moebatch.spec.job import Job

_SHARE = 0.75


def with_less_memory(job: Job, dram_bytes: int) -> Job:
    """The same job with three quarters of the memory; it had `dram_bytes` of main memory."""
    resources = job.resources
    less = {"dram": int(dram_bytes * _SHARE)}
    if resources.vram is not None:
        less["vram"] = int(resources.vram * _SHARE)
    return job.model_copy(update={"resources": resources.model_copy(update=less)})
