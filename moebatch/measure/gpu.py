"""A GPU and its links to main memory."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moebatch.engine.lanes.streams import use_attention_of_torch
from moebatch.measure.contention import Patience
from moebatch.measure.processor import Log, ProcessorBench
from moebatch.measure.sizes import Sizes, gpu_sizes
from moebatch.measure.timer import Timer
from moebatch.spec.machine.hardware import CONTEXT_BYTES, Dtype, Processor
from moebatch.store.memory import Arena
from moebatch.units import format_rate

_COPIED_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRates:
    """What the current CUDA device achieves."""

    title: str
    free_bytes: int
    """What a job may take, the context of its process included."""
    processor: Processor
    upload: float
    """Bytes per second from pinned main memory."""
    download: float
    """Bytes per second into pinned main memory."""
    staging: float
    """Bytes per second of copying within main memory into a pinned buffer."""


def gpu_rates(sizes: Sizes, patience: Patience, log: Log) -> GpuRates | None:
    """Measures the current CUDA device; None where there is none."""
    if not torch.cuda.is_available():
        return None
    use_attention_of_torch()  # as runs do
    device = torch.device("cuda", torch.cuda.current_device())
    title = torch.cuda.get_device_name(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)

    def allocate(num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    processor = ProcessorBench(
        sizes=supported(gpu_sizes(sizes), has_bfloat16=torch.cuda.is_bf16_supported(False)),
        device=device,
        free_bytes=free_bytes,
        allocate=allocate,
        beside=None,
        patience=patience,
        log=lambda line: log(f"{title}: {line}"),
    ).rates()
    upload, download, staging = _link_rates(device, Timer(device=device, budget_s=sizes.point_s))
    log(
        f"dram->vram: {format_rate(upload)}, vram->dram: {format_rate(download)}, "
        f"staging: {format_rate(staging)}"
    )
    torch.cuda.empty_cache()
    return GpuRates(
        title=title,
        free_bytes=free_bytes + CONTEXT_BYTES,
        processor=processor,
        upload=upload,
        download=download,
        staging=staging,
    )


def supported(sizes: Sizes, *, has_bfloat16: bool) -> Sizes:
    """The sizes without bfloat16 where a device only emulates it; float16 takes its place."""
    if has_bfloat16:
        return sizes
    named: tuple[Dtype, ...] = (*sizes.dtypes, sizes.attention_dtype)
    *dtypes, attention = ("float16" if dtype == "bfloat16" else dtype for dtype in named)
    return replace(sizes, dtypes=tuple(dict.fromkeys(dtypes)), attention_dtype=attention)


def _link_rates(device: torch.device, timer: Timer) -> tuple[float, float, float]:
    """Upload, download and staging."""
    pageable = Arena(_COPIED_BYTES).bytes
    pinned = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    copies = ((on_gpu, pinned), (pinned, on_gpu), (pinned, pageable))
    upload, download, staging = (
        _COPIED_BYTES / timer.seconds(lambda to=to, source=source: to.copy_(source))  # type: ignore[misc]
        for to, source in copies
    )
    return upload, download, staging
