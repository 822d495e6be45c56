"""How the matrices of experts lie in memory, as the kernels that compute experts together are told:
numbers as they are computed with, or codes and scales.

Shape letters: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.formats.coded import BITS, ZEROS, CodedMatrix
from moebatch.formats.weight_format import StoredMatrix
from moebatch.model.gpu.rows import FLOATS

_ROLES = ("gate", "up", "down")
_SCALES: Mapping[torch.dtype, str] = {
    **FLOATS,
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "e8m0",
    torch.float8_e8m0fnu: "e8m0",
}
_INPUT_BYTES = 128
"""Of a row of inputs that is multiplied at a time."""
_ALIGNMENT = 16
"""Bytes to which addresses have to be aligned."""
_LEAST_BLOCK = 16
"""Inputs that share a scale at least."""
_WHOLE = 2**30
"""Rows or columns of a block that has all of them."""
Parts: TypeAlias = tuple[Tensor | None, ...]
Stored: TypeAlias = Tensor | StoredMatrix | CodedMatrix


class Coding(NamedTuple):
    """What a kernel is compiled for. Distances are in numbers of what lies there."""

    row: int
    """From a row of codes, or of plain numbers, to the next."""
    bits: int = 0
    """Of a code; none where numbers are plain."""
    numbers: str | None = None
    scales: str = ""
    scale_row: int = 0
    block_rows: int = _WHOLE
    block_columns: int = _WHOLE
    alike: int = 0
    """Inputs that share a scale, of those that are multiplied at a time."""
    zero: float = 0.0
    """The code that stands for nothing, where there are no zero points."""
    has_zeros: bool = False
    zero_row: int = 0
    factor: Literal["none", "times", "over"] = "none"
    """What is done to scales by the factor."""
    rounds_to: str = "none"
    is_high_first: bool = False
    bias: str = "none"
    """Its type."""
    bias_row: int = 0


class Described(NamedTuple):
    """A matrix and its bias."""

    coding: Coding
    parts: Parts
    """Numbers or codes, scales, zero points, factor, codebook and bias."""


@dataclass(frozen=True, slots=True)
class GroupedMatrices:
    coding_in: Coding
    """Of gate and up, or of the latter alone."""
    coding_out: Coding
    parts: Parts
    """Matrix by matrix; they live until the kernels have been launched. Where there is no gate, up
    has both places."""
    addresses: Ints
    """Of the parts; 0 for what there is not."""
    width: int
    """F."""


def inputs_at_once(dtype: torch.dtype) -> int:
    """Inputs of a row that a kernel multiplies at a time."""
    return _INPUT_BYTES // dtype.itemsize


def grouped_matrices(matrices: Mapping[str, Stored], dtype: torch.dtype) -> GroupedMatrices | None:
    """Those of an expert, if the kernels take them where they compute in `dtype`."""
    biases = {f"{role}_bias" for role in _ROLES} & matrices.keys()
    first, *others = _ROLES if "gate" in matrices else ("up", *_ROLES[1:])
    if dtype not in FLOATS or matrices.keys() - biases != {first, *others}:
        return None
    gate, up, down = (
        _described(matrices[role], matrices.get(f"{role}_bias"), dtype) for role in (first, *others)
    )
    if gate is None or up is None or down is None or gate.coding != up.coding:
        return None
    parts = gate.parts + up.parts + down.parts
    places = [0 if part is None else part.data_ptr() for part in parts]
    return GroupedMatrices(
        coding_in=gate.coding,
        coding_out=down.coding,
        parts=parts,
        addresses=np.array(places, np.int64),
        width=matrices["up"].shape[0],
    )


def _described(matrix: Stored, bias_O: Stored | None, dtype: torch.dtype) -> Described | None:
    if isinstance(matrix, Tensor):
        found = _plain(matrix) if matrix.dtype == dtype else None
    else:
        coded = matrix if isinstance(matrix, CodedMatrix) else _codes(matrix)
        found = _coded(coded, dtype) if coded else None
    return found if found is None or bias_O is None else _with_bias(found, bias_O)


def _codes(matrix: StoredMatrix) -> CodedMatrix | None:
    stored = matrix.format
    is_viewed = stored.is_viewed(matrix.shape)
    return stored.coded(matrix.parts, matrix.shape) if is_viewed else None


def _plain(matrix_OI: Tensor) -> Described | None:
    if not _is_aligned(matrix_OI, matrix_OI.shape[1] * matrix_OI.itemsize * 8):
        return None
    return Described(Coding(row=matrix_OI.stride(0)), (matrix_OI, None, None, None, None, None))


def _coded(matrix: CodedMatrix, dtype: torch.dtype) -> Described | None:
    """A matrix of codes, if scales lie apart and are those of 16 inputs that are neighbours, or of
    a multiple."""
    if matrix.scales is None or matrix.groups is not None:
        return None
    (block_rows, block_columns), (O, I), bits = matrix.block, matrix.shape, BITS[matrix.numbers]
    is_whole = block_columns >= I
    suits = is_whole or block_columns % _LEAST_BLOCK == 0
    if not suits or not _is_aligned(matrix.codes, I * bits):
        return None
    zeros, columns = matrix.zeros, _WHOLE if is_whole else block_columns
    assert all(part is None or part.stride(-1) == 1 for part in (matrix.scales, zeros)), "by rows"
    coding = Coding(
        row=matrix.codes.stride(0),
        bits=bits,
        numbers=matrix.numbers,
        scales=_SCALES[matrix.scales.dtype],
        scale_row=matrix.scales.stride(0),
        block_rows=_WHOLE if block_rows >= O else block_rows,
        block_columns=columns,
        alike=gcd(columns, inputs_at_once(dtype)),
        zero=ZEROS.get(matrix.numbers, 0.0),
        has_zeros=zeros is not None,
        zero_row=0 if zeros is None else zeros.stride(0),
        factor="none" if matrix.factor is None else "over" if matrix.divides else "times",
        rounds_to="none" if matrix.rounds_to is None else FLOATS[matrix.rounds_to],
        is_high_first=matrix.is_high_first,
    )
    parts = (matrix.codes, matrix.scales, zeros, matrix.factor, matrix.values)
    return Described(coding, (*parts, None))


def _with_bias(described: Described, bias_O: Stored) -> Described | None:
    if not isinstance(bias_O, Tensor) or bias_O.dtype not in FLOATS:
        return None
    coding = described.coding._replace(bias=FLOATS[bias_O.dtype], bias_row=bias_O.stride(0))
    return Described(coding, (*described.parts[:-1], bias_O))


def _is_aligned(rows: Tensor, row_bits: int) -> bool:
    """Whether rows of so many bits can be read 16 bytes at a time."""
    places = rows.data_ptr(), rows.stride(0) * rows.itemsize, row_bits / 8
    return rows.stride(1) == 1 and all(place % _ALIGNMENT == 0 for place in places)
