"""Instruction sets that kernels are compiled for."""

import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from moebatch.errors import ConfigError
from moebatch.quoting import shown

InstructionSet = Literal["amx", "avx512bf16", "avx512", "avx2", "portable"]
INSTRUCTION_SETS: tuple[InstructionSet, ...] = get_args(InstructionSet)
"""Each has what those behind it have."""
VARIABLE = "MOEBATCH_ISA"
"""Environment variable: an instruction set that is not higher than the processor's."""
_NEEDED: Mapping[InstructionSet, frozenset[str]] = {
    "amx": frozenset({"amx_tile", "amx_bf16", "avx512_bf16"}),
    "avx512bf16": frozenset({"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "portable": frozenset(),
}
"""What the kernel calls the features without which a set cannot be used."""
_FLAGS: Mapping[InstructionSet, tuple[str, ...]] = {
    "amx": ("-march=native",),
    "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mtune=native"),
    "avx512": ("-march=x86-64-v4", "-mtune=native"),
    "avx2": ("-march=x86-64-v3", "-mtune=native"),
    "portable": ("-march=x86-64", "-mtune=native"),
}


def highest() -> InstructionSet:
    """The best that this processor has."""
    features = _features()
    return next(name for name in INSTRUCTION_SETS if _NEEDED[name] <= features)


def chosen(environment: Mapping[str, str]) -> InstructionSet:
    """The one that ``MOEBATCH_ISA`` names, or the best.

    Raises ConfigError for one that is not known, or that this processor lacks.
    """
    best, name = highest(), environment.get(VARIABLE)
    if not name:
        return best
    possible = INSTRUCTION_SETS[INSTRUCTION_SETS.index(best) :]
    for known in possible:
        if name == known:
            return known
    why = "this processor lacks it" if name in INSTRUCTION_SETS else "it is not known"
    message = f"is {shown(name)}, but {why}; write one of {', '.join(possible)}, or nothing"
    raise ConfigError.at(VARIABLE, message)


def compiler_flags(name: InstructionSet) -> tuple[str, ...]:
    """What makes a compiler use this set, and no higher one; all that there is for the best."""
    if name == highest() or platform.machine() not in ("x86_64", "AMD64"):
        return ("-march=native",)
    return _FLAGS[name]


def is_intel() -> bool:
    """Whether the library by which torch multiplies float32 was made for this processor."""
    return _processor().get("vendor_id") == "GenuineIntel"


def _features() -> frozenset[str]:
    return frozenset(_processor().get("flags", "").split())


@functools.cache
def _processor() -> Mapping[str, str]:
    """What the kernel says of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
