"""This machine, measured and written down as a hardware profile."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from moebatch import __version__
from moebatch.checkpoint.model_files import COMPUTE_DTYPES
from moebatch.errors import ConfigError, StorageError
from moebatch.measure.contention import HARMLESS_WAITING, Patience
from moebatch.measure.disk import (
    DiskRates,
    ExpertStream,
    PageTimes,
    files_to_read,
    free_bytes,
    page_times,
    read_rates,
    reading_beside,
    scratch_file,
)
from moebatch.measure.gemm import expert_bytes
from moebatch.measure.gpu import GpuRates, gpu_rates
from moebatch.measure.process_limits import detect_machine
from moebatch.measure.processor import Log, ProcessorBench, curve_of, curve_text
from moebatch.measure.sizes import Sizes
from moebatch.measure.timer import Timer
from moebatch.spec.machine.hardware import Dtype, LevelName, LinkName, Processor, RateCurve
from moebatch.spec.machine.levels import CAPACITIES, LevelFigures, LinkFigures
from moebatch.spec.machine.profile import HardwareProfile
from moebatch.spec.machine.values import DURATION, CurveFigure, Figure
from moebatch.store.memory import Arena, resident_bytes, return_freed_memory
from moebatch.units import format_bytes, format_rate

Name = TypeVar("Name", bound=str)
_SOURCE = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Disk:
    """Room and rates of the disk; what was not measured is None."""

    capacity_bytes: int
    read: DiskRates | None
    write: float | None
    pages: PageTimes | None
    streamed: Mapping[Dtype, RateCurve]
    """FLOP/s of experts that have just been read."""

    def with_more(self, rates: Sequence[float]) -> "_Disk":
        """The same with chunks that were read later: disks drift, so every minute counts."""
        if self.read is None:
            return self
        return replace(self, read=replace(self.read, rates=(*self.read.rates, *rates)))


def measure_machine(
    folder: Path,
    *,
    read: Path | None = None,
    num_threads: int,
    log: Log,
    sizes: Sizes | None = None,
) -> HardwareProfile:
    """Measures this machine: about three minutes, or what other `sizes` take.

    Args:
        folder: on the disk that is meant; a file of 1 GiB is written there and removed.
        read: a file, or a folder of files such as a checkpoint, to read instead of that file.
            Without it, and where `sizes` write nothing, the profile has no rates of the disk.
        num_threads: threads that compute.
        log: gets a line for each step.
        sizes: in place of the usual ones.

    Raises StorageError when the folder cannot be written and there is nothing else to read, or
    when the disk fails, and ConfigError when `read` has nothing to read, or when a figure is
    impossible, such as a rate of nothing.
    """
    sizes = sizes or Sizes()
    with ExitStack() as stack:
        capacity_bytes = detect_machine().dram_bytes
        log(f"memory that a job may take: {format_bytes(capacity_bytes)}")
        stack.enter_context(_threads(num_threads))
        stack.enter_context(torch.inference_mode())
        paths, write = _files(stack, folder, read, sizes, log)
        disk = _disk(folder, paths, write, sizes, log)
        patience, more = Patience(num_threads, sizes.patience_s), list[float]()
        cpu = ProcessorBench(
            sizes=sizes,
            device=torch.device("cpu"),
            free_bytes=capacity_bytes - resident_bytes(),
            allocate=lambda num_bytes: Arena(num_bytes).bytes,
            beside=partial(reading_beside, paths, sizes.disk, more) if paths else None,
            patience=patience,
            log=log,
        ).rates()
        disk = disk.with_more(more)
        gpu = gpu_rates(sizes, patience, log)
    if disk.read is not None:
        log(f"disk->dram: {format_rate(disk.read.mean)}, {_spread(disk.read)}")
    disturbance = _disturbance(patience.share)
    if disturbance:
        log(f"{disturbance}; measure again when the machine is idle")
    return_freed_memory()
    method = _method(num_threads, disk, disturbance)
    profile = _profile(method, capacity_bytes, cpu, disk, gpu)
    profile.require_believable()
    return profile


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the disk ---------------------------------------------------------------------------------


def _files(
    stack: ExitStack, folder: Path, read: Path | None, sizes: Sizes, log: Log
) -> tuple[list[Path], float | None]:
    """What there is to read while `stack` is open, and the rate at which a file was written."""
    given = [] if read is None else files_to_read(read)
    if not sizes.is_written:
        return given, None
    try:
        path, write = stack.enter_context(scratch_file(folder, sizes.disk))
    except StorageError as error:
        if not given:
            raise
        log(f"dram->disk: not measured: {error}")
        return given, None
    log(f"dram->disk: {format_rate(write)}")
    return given or [path], write


def _disk(
    folder: Path, paths: Sequence[Path], write: float | None, sizes: Sizes, log: Log
) -> _Disk:
    pages = None if write is None else page_times(folder)
    if pages is not None:
        read, written = map(DURATION.write, (pages.read_s, pages.write_s))
        log(f"a page of the cache on disk: read in {read}, written in {written}")
    rates, streamed = _streaming(paths, sizes, log) if paths else (None, {})
    return _Disk(
        capacity_bytes=free_bytes(folder), read=rates, write=write, pages=pages, streamed=streamed
    )


def _streaming(
    paths: Sequence[Path], sizes: Sizes, log: Log
) -> tuple[DiskRates, dict[Dtype, RateCurve]]:
    """Rates of the disk, alone and beside the experts that it brings, and of those experts.

    Weights that have just arrived are slower to compute with than those that stay: they come from
    memory, whatever caches the machine has.
    """
    alone = read_rates(paths, sizes.disk)
    timer = Timer(device=torch.device("cpu"), budget_s=sizes.streamed_point_s, beside_reading=True)
    rates, curves = list(alone.rates), {}
    for dtype in sizes.dtypes:
        size = expert_bytes(sizes.model, COMPUTE_DTYPES[dtype])
        try:
            stream = ExpertStream(paths, size, sizes.disk)
        except ConfigError:
            continue  # files shorter than an expert of this type
        with closing(stream):
            curves[dtype] = curve_of(sizes, dtype, stream.experts(), timer)
            rates += stream.rates.rates
        log(f"GEMM {dtype}, weights fresh from disk: {curve_text(curves[dtype])}")
    return DiskRates(rates=tuple(rates), is_direct=alone.is_direct), curves


def _spread(rates: DiskRates) -> str:
    least, most = rates.spread
    how = "past the page cache" if rates.is_direct else "through the page cache"
    return (
        f"mean of {len(rates.rates)} chunks from {format_rate(least)} to {format_rate(most)}, "
        f"read {how}"
    )


# --- the profile ------------------------------------------------------------------------------


def _profile(
    method: str,
    capacity_bytes: int,
    cpu: Processor,
    disk: _Disk,
    gpu: GpuRates | None,
) -> HardwareProfile:
    hostname = socket.gethostname()
    cpu = replace(cpu, gemm_streamed=disk.streamed)
    levels = [_level("dram", capacity_bytes, cpu), _level("disk", disk.capacity_bytes, None)]
    links = []
    if disk.read is not None:
        source = f"{_SOURCE}, {_spread(disk.read)}"
        page_s = disk.pages.read_s if disk.pages else None
        links.append(_link("disk->dram", disk.read.mean, source=source, page_s=page_s))
    if disk.write is not None:
        page_s = disk.pages.write_s if disk.pages else None
        links.append(_link("dram->disk", disk.write, page_s=page_s))
    if gpu is not None:
        levels.insert(0, _level("vram", gpu.free_bytes, gpu.processor))
        links.append(_link("dram->vram", gpu.upload, staging=gpu.staging))
        links.append(_link("vram->dram", gpu.download))
    title = f"{hostname}: {_cpu_model()}, {format_bytes(capacity_bytes)}"
    return HardwareProfile(
        name=hostname,
        title=title + (f", {gpu.title}" if gpu else ""),
        date=date.today().isoformat(),
        method=method,
        source=_SOURCE,
        levels={level.name: level for level in levels},
        links={link.name: link for link in links},
    )


def _method(num_threads: int, disk: _Disk, disturbance: str) -> str:
    """How it was measured, and what speaks against trusting it."""
    parts = [
        f"moebatch {__version__} profile, torch {torch.__version__}, {num_threads} "
        f"thread{'s' * (num_threads > 1)} on {_cpu_model()}; experts, attention and reading as "
        "jobs run them"
    ]
    if disk.read is not None and not disk.read.is_direct:
        parts.append("disk read through the page cache, since the file system refuses O_DIRECT")
    return "; ".join([*parts, *([disturbance] if disturbance else [])])


def _disturbance(waited_share: float) -> str:
    if waited_share < HARMLESS_WAITING:
        return ""
    return (
        f"other programs held up the computing threads for {waited_share:.0%} of the time, so "
        "that figures are too low"
    )


def _cpu_model(root: Path = Path("/")) -> str:
    """What the kernel calls the CPU; ARM has no such line."""
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return os.uname().machine


def _level(name: LevelName, capacity_bytes: int, rates: Processor | None) -> LevelFigures:
    # A full disk has no room at all, and some file systems say more than there is on earth.
    capacity = _figure(CAPACITIES[name].nearest(capacity_bytes))
    if rates is None:
        return LevelFigures(name=name, capacity=capacity)
    coded = {dtype: _figure(rate) for dtype, rate in rates.coded_attention.items()}
    return LevelFigures(
        name=name,
        capacity=capacity,
        bandwidth=_figure(rates.bandwidth),
        gemm=_curves(rates.gemm),
        gemm_streamed=_curves(rates.gemm_streamed),
        attention_bandwidth=_figure(rates.attention_bandwidth),
        attention_bandwidth_int8=coded.get("int8"),
        attention_bandwidth_fp8=coded.get("fp8"),
        attention_flops=_figure(rates.attention_flops),
        elementwise_bandwidth=_figure(rates.elementwise_bandwidth),
        decoding=_curves(rates.decoding),
        sequence_time=_duration(rates.sequence_s),
        launch_time=_duration(rates.launch_s),
        task_time=_duration(rates.task_s),
        expert_time=_duration(rates.another_expert_s),
        pass_time=_duration(rates.pass_s),
        row_time=_duration(rates.row_s),
        instruction_set=rates.instruction_set,
    )


def _curves(curves: Mapping[Name, RateCurve]) -> dict[Name, CurveFigure]:
    return {name: CurveFigure(achieved=curve, source=_SOURCE) for name, curve in curves.items()}


def _link(
    name: LinkName,
    bandwidth: float,
    *,
    source: str = _SOURCE,
    staging: float | None = None,
    page_s: float | None = None,
) -> LinkFigures:
    figure = _figure(bandwidth, source)
    return LinkFigures(name=name, bandwidth=figure, staging=staging, operation_time=page_s)


def _duration(seconds: float) -> Figure:
    """What is too short to be told from nothing is the least that there is: without a figure,
    plans would count what is usual."""
    return _figure(max(seconds, DURATION.least))


def _figure(number: float, source: str = _SOURCE) -> Figure:
    return Figure(achieved=number, source=source)
