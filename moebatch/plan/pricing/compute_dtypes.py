"""In which numbers a machine computes a model best."""

from dataclasses import replace

from moebatch.formats.plain import BFLOAT16, FLOAT16
from moebatch.layout.footprint import Dtypes
from moebatch.layout.ladder import Ladder
from moebatch.plan.pricing.prices import Prices
from moebatch.spec.machine.hardware import Hardware
from moebatch.spec.model.shape import ModelShape

_CLEARLY = 0.8
"""Wider numbers take more memory, so they must save at least the rest of the time."""
_USUAL_ROWS = 256


def fastest_dtypes(shape: ModelShape, dtypes: Dtypes, hardware: Hardware) -> Dtypes:
    """Those in which the CPU computes experts fastest: `dtypes` as stored, or float32 where a
    processor is slow with fewer bits, decoding counted. Never less precise than stored."""
    wider, ladder = replace(dtypes, compute="float32"), Ladder.of(hardware)
    prices = (
        Prices(shape=shape, dtypes=kind, hardware=hardware, ladder=ladder)
        for kind in (dtypes, wider)
    )
    stored_s, wider_s = (each.expert_s(each.cpu, _USUAL_ROWS) for each in prices)
    return wider if wider_s < _CLEARLY * stored_s else dtypes


def without_emulation(dtypes: Dtypes, hardware: Hardware) -> tuple[Dtypes, tuple[str, ...]]:
    """In float16 where a GPU has no bfloat16 of its own, with a note: before compute capability 8.0
    torch emulates it, at a tenth of the speed. Experts become such when they are read."""
    gpu = hardware.vram.processor if hardware.vram else None
    known = gpu.gemm if gpu else {}
    if dtypes.compute != "bfloat16" or "bfloat16" in known or "float16" not in known:
        return dtypes, ()
    note = (
        f"computed in float16, since the GPU of {hardware.name} only emulates the model's "
        "bfloat16; float16 ends at 65504, write model.dtype: float32 if that is too little"
    )
    stored = FLOAT16 if dtypes.stored == BFLOAT16 else dtypes.stored
    return replace(dtypes, compute="float16", stored=stored), (note,)
