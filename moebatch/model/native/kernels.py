"""The compiled functions."""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moebatch.model.native.instruction_set import INSTRUCTION_SETS, InstructionSet, is_intel
from moebatch.spec.model.cache_layout import CacheDtype

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the C files for types of numbers."""
CACHE_DTYPES: Mapping[CacheDtype, int] = {"int8": 3, "fp8": 4}
"""The same for codes of keys and values."""


_CACHED = (
    *((str(dtype).removeprefix("torch."), number) for dtype, number in DTYPES.items()),
    *CACHE_DTYPES.items(),
)

Work = ctypes.Structure | ctypes.Array[Any]
"""What a kernel is given; several that lie one behind the other, where it knows such."""


def fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Fields of one type that follow each other in a structure of a C file."""
    return [(name, kind) for name in names.split()]


def address_of(tensor: Tensor | None) -> int | None:
    """Where its numbers lie."""
    return None if tensor is None else tensor.data_ptr()


def threads_for(size: int, least_shared: int) -> int:
    """Threads for a work of that size: one alone has done what is smaller than `least_shared`
    before another one would be awake."""
    return torch.get_num_threads() if size >= least_shared else 1


class Kernel:
    """A function of the library that computes parts of a work until none is left.

    Any number of threads may call it, with the same work or others. A work is done when all that
    were given it have returned. The GIL is free meanwhile.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        """Raises AttributeError where the library has none of that name."""
        self._function = library[name]
        self._share = library.moebatch_share
        self._share.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self._share.restype = None

    def __call__(self, work: Work, num_threads: int = 1) -> None:
        """Does all of `work` on so many threads, the calling one among them: those of the library,
        which keeps them; on the calling one alone while they are at another one's work."""
        self._share(self._function, ctypes.addressof(work), num_threads)


class Kernels:
    def __init__(self, library: ctypes.CDLL, *, is_forced: bool = False) -> None:
        """`is_forced` says that the instruction set is not the best that there is.

        Raises OSError where the library is another one.
        """
        self.is_forced = is_forced
        self.is_intel = is_intel()
        try:
            self.multiply = Kernel(library, "moebatch_multiply")
            self.decode = Kernel(library, "moebatch_decode")
            self.attend = {
                number: Kernel(library, f"moebatch_attend_{name}") for name, number in _CACHED
            }
            """By the number of what is cached."""
            self.attend_slices = Kernel(library, "moebatch_attend_slices")
            self.gate = Kernel(library, "moebatch_gate")
            self.gate_clamped = Kernel(library, "moebatch_gate_clamped")
            self.place = Kernel(library, "moebatch_place")
            self.add = Kernel(library, "moebatch_add")
            self.norm = Kernel(library, "moebatch_norm")
            self.norm_gated = Kernel(library, "moebatch_norm_gated")
            self.rotate = Kernel(library, "moebatch_rotate")
            self.delta_rule = Kernel(library, "moebatch_delta_rule")
            self.selective_scan = Kernel(library, "moebatch_selective_scan")
            self.convolve = Kernel(library, "moebatch_convolve")
            self._supports = library.moebatch_supports
            self._supports_slices = library.moebatch_supports_slices
            instruction_set = library.moebatch_instruction_set
        except AttributeError as error:
            raise OSError(str(error)) from error
        for function in (self._supports, self._supports_slices):
            function.argtypes = (ctypes.c_int,)
            function.restype = ctypes.c_int
        instruction_set.restype = ctypes.c_char_p
        name = instruction_set().decode()
        self.instruction_set: InstructionSet = next(
            known for known in INSTRUCTION_SETS if known == name
        )
        """What the compiler has made use of."""

    def attends(self, dtype: torch.dtype) -> bool:
        """Whether queries, keys and values may be of that type; those that attend to nothing know
        float32 and bfloat16."""
        return dtype in DTYPES and bool(self._supports(DTYPES[dtype]))

    def attends_slices(self, dtype: torch.dtype) -> bool:
        """Whether slices of that type are best left to `attend_slices`."""
        return dtype in DTYPES and bool(self._supports_slices(DTYPES[dtype]))
