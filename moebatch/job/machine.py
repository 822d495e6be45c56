"""The machine that a job runs on: its figures, and where it computes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moebatch.errors import ConfigError
from moebatch.measure.saved import load_saved, machine_profile
from moebatch.spec.job import Job
from moebatch.spec.machine.hardware import (
    CONTEXT_BYTES,
    GPU_LINKS,
    Basis,
    DeviceKind,
    Hardware,
)
from moebatch.spec.machine.profile import HardwareProfile, load_profile
from moebatch.spec.machine.values import Figure

NotedProfile = tuple[HardwareProfile, tuple[str, ...]]
"""A profile and what to know about it."""
_SOME_GPU = "l4"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMachine:
    """Profiles that a job is planned with."""

    kind: DeviceKind
    profile: HardwareProfile
    """The one that the job names, or that of this machine."""
    own: HardwareProfile | None = None
    """That of this machine, where the GPU of `profile` is emulated on it."""
    notes: tuple[str, ...] = ()

    def hardware(self, basis: Basis = "achieved") -> Hardware:
        """What the job has: without the GPU, if it is not used."""
        hardware = self.profile.hardware(basis)
        if self.own is not None:
            return emulated_hardware(hardware, self.own.hardware(basis))
        return hardware.without("vram") if self.kind == "cpu" else hardware


def job_machine(job: Job, own: Callable[[], NotedProfile]) -> JobMachine:
    """Where the job computes, by its ``resources.device``. `own` gives this machine's profile.

    Raises ConfigError if a profile is missing, wrong, or lacks the GPU that is asked for.
    """
    named = _named_profile(job)
    profile, notes = own() if named is None else (named, ())
    kind = _kind(job, profile)
    if kind == "emulate":
        mine, known = own()
        emulated = (
            f"the GPU of {profile.name} is emulated: its memory is main memory and counts against "
            "resources.dram, its links are paced, and this machine's CPU computes what it would"
        )
        return JobMachine(kind=kind, profile=profile, own=mine, notes=(*known, emulated))
    if kind == "cpu" and "vram" in profile.levels:
        unused = f"runs are computed in main memory; the GPU of {profile.name} is not used"
        notes = (*notes, unused)
    return JobMachine(kind=kind, profile=profile, notes=notes)


def known_device(job: Job) -> DeviceKind | None:
    """Where the job computes, as far as that is known before this machine is measured: None if it
    depends on the GPU that may then be found.

    Raises ConfigError for what is wrong with the device, whatever the machine may be measured to
    do.
    """
    profile = _named_profile(job) or load_saved()
    if profile is not None and not has_unmeasured_gpu(job, profile):
        return _kind(job, profile)
    asked = job.resources.device
    if asked != "auto":
        return asked
    return None if torch.cuda.is_available() else "cpu"


def has_unmeasured_gpu(job: Job, profile: HardwareProfile | None) -> bool:
    """Whether the job may compute on a GPU of this machine of which its own profile knows nothing,
    as when the GPU, or a torch that sees it, came later."""
    wanted = job.resources.device in ("auto", "cuda") and job.resources.hardware == "auto"
    known = profile is not None and "vram" in profile.levels
    return wanted and not known and torch.cuda.is_available()


def rough_profile(job: Job) -> NotedProfile:
    """This machine's profile without measuring anything. A GPU that it lacks is as large as it is
    now, and as fast as some other one."""
    own, notes = machine_profile()
    if not has_unmeasured_gpu(job, load_saved()):
        return own, notes
    known = load_profile(_SOME_GPU)
    free = float(torch.cuda.mem_get_info()[0] + CONTEXT_BYTES)
    vram = replace(known.levels["vram"], capacity=Figure(achieved=free, source="asked for now"))
    links = {name: known.links[name] for name in GPU_LINKS}
    return replace(own, levels={"vram": vram, **own.levels}, links={**own.links, **links}), notes


def emulated_hardware(gpu: Hardware, own: Hardware) -> Hardware:
    """A machine with a GPU, as far as this one can be it.

    Capacities of ``vram`` and ``dram``, and links of the GPU, are those of `gpu`: they are enforced
    and paced. Arithmetic is that of this machine's CPU at both levels, and the disk is its own.
    """
    assert gpu.vram is not None, "there is a GPU to emulate"
    levels = {
        "vram": replace(gpu.vram, processor=own.dram.processor),
        "dram": replace(own.dram, capacity_bytes=gpu.dram.capacity_bytes),
        "disk": own.disk,
    }
    links = {name: link for name, link in own.links.items() if "vram" not in name}
    links |= {name: gpu.links[name] for name in GPU_LINKS}
    return Hardware(
        name=f"{gpu.name} (emulated)",
        title=f"{gpu.title}, emulated on {own.name}",
        levels={name: level for name, level in levels.items() if level is not None},  # type: ignore[misc]
        links=links,
    )


def _named_profile(job: Job) -> HardwareProfile | None:
    asked, named = job.resources.device, job.resources.hardware
    if asked == "cuda" and not torch.cuda.is_available():
        raise _wrong_device("torch sees no GPU; write auto or cpu, or emulate to try schedules")
    if asked == "emulate" and named == "auto":
        raise _wrong_device(
            "needs a GPU to emulate; name one by resources.hardware, such as t4, or give the path "
            "of a profile with vram"
        )
    return None if named == "auto" else load_profile(named)


def _kind(job: Job, profile: HardwareProfile) -> DeviceKind:
    asked, has_vram = job.resources.device, "vram" in profile.levels
    if asked == "auto":
        asked = "cuda" if has_vram and torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return "cpu"
    if not has_vram:
        advice = "run `moebatch profile`, or name" if asked == "cuda" else "name"
        raise _wrong_device(f"the profile {profile.name} has no vram; {advice} one that has")
    missing = [link for link in GPU_LINKS if link not in profile.links]
    if missing:
        raise _wrong_device(f"the profile {profile.name} has no link {' and no '.join(missing)}")
    if asked == "cuda":
        _require_one_gpu(profile)
    return asked


def _require_one_gpu(profile: HardwareProfile) -> None:
    """What a profile says of several GPUs is what all of them have together."""
    count = profile.levels["vram"].devices
    if count > 1:
        raise _wrong_device(
            f"the profile {profile.name} has {count} GPUs, and a run computes on one; name a "
            "profile of one of them, or write cpu"
        )


def _wrong_device(message: str) -> ConfigError:
    return ConfigError.at("resources.device", message)
