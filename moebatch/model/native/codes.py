"""What the compiled decoder is given: matrices of codes, as addresses.

Shape letters: O outputs, I inputs.
"""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.formats.coded import (
    BITS,
    E2M1,
    GGML_BLOCKS,
    WORD_BITS,
    ZEROS,
    CodedMatrix,
    Lies,
    block_numbers,
)
from moebatch.model.native.kernels import DTYPES, address_of, fields

_NUMBERS: Mapping[str, int] = {
    "codebook": 0,
    "int8": 1,
    "uint8": 2,
    "e4m3": 3,
    "int4": 4,
    "e2m1": 5,
    **{numbers: place for place, numbers in enumerate(GGML_BLOCKS, 6)},
}
"""As the C file counts them."""
_LIES: Mapping[Lies, int] = {"in rows": 0, "words of inputs": 1, "words of outputs": 2}
_VALUES: Mapping[str, Tensor] = {
    "int4": torch.arange(16.0),
    "e2m1": torch.tensor(E2M1),
}
_SCALES = {**DTYPES, torch.float8_e4m3fn: 3, torch.uint8: 4, torch.float8_e8m0fnu: 4}
_STEP_INPUTS = 16
_MOST_GROUPS = 1024
"""Of a row whose inputs name theirs."""


class Coding(ctypes.Structure):
    """``struct coding`` of the C file."""

    _fields_ = (
        *fields(ctypes.c_void_p, "codes scales zeros values groups"),
        *fields(
            ctypes.c_int64,
            "code_row scale_row zero_row scale_column zero_column block_rows block_columns "
            "num_groups",
        ),
        *fields(ctypes.c_float, "factor zero"),
        *fields(
            ctypes.c_int32,
            "divides numbers scale_dtype rounds_to is_high_first lies zero_added",
        ),
    )


class DecodeWork(ctypes.Structure):
    """``struct decode_work`` of the C file."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        *fields(ctypes.c_int64, "num_outputs num_inputs next_row"),
        ("dtype", ctypes.c_int32),
        ("coding", Coding),
    )


def is_compiled(matrix: CodedMatrix) -> bool:
    """Whether the kernels know how to read it: in main memory, codes without gaps, blocks of a
    width that is a multiple of 16 or a whole row."""
    block_rows, block_columns = matrix.block
    scales, zeros, groups = matrix.scales, matrix.zeros, matrix.groups
    parts = (matrix.codes, scales, zeros, groups)
    return (
        all(tensor.device.type == "cpu" for tensor in parts if tensor is not None)
        and all(_column(tensor) == 1 for tensor in (matrix.codes, groups))
        and (scales is None or scales.dtype in _SCALES)
        and (block_columns % _STEP_INPUTS == 0 or block_columns >= matrix.shape[1])
        and (zeros is None or (block_rows == 1 and matrix.numbers in ZEROS))
        and (groups is None or (block_rows == 1 and matrix.numbers in ZEROS))
        and (groups is None or _num_groups(matrix) <= _MOST_GROUPS)
    )


def coding(matrix: CodedMatrix) -> Coding:
    """A matrix that `is_compiled`. Only pointers: its tensors must live while they are used."""
    _require_fit(matrix)
    codes, scales, zeros = matrix.codes, matrix.scales, matrix.zeros
    values = _VALUES.get(matrix.numbers, matrix.values)
    return Coding(
        codes=codes.data_ptr(),
        scales=address_of(scales),
        zeros=address_of(zeros),
        values=address_of(values),
        groups=address_of(matrix.groups),
        code_row=codes.stride(0) * codes.itemsize,
        scale_row=0 if scales is None else scales.stride(0),
        zero_row=0 if zeros is None else zeros.stride(0),
        scale_column=_column(scales),
        zero_column=_column(zeros),
        block_rows=matrix.block[0],
        block_columns=matrix.block[1],
        num_groups=_num_groups(matrix),
        factor=1.0 if matrix.factor is None else float(matrix.factor),
        zero=ZEROS.get(matrix.numbers, 0.0),
        divides=matrix.divides,
        numbers=_NUMBERS[matrix.numbers],
        scale_dtype=0 if scales is None else _SCALES[scales.dtype],
        rounds_to=DTYPES[matrix.rounds_to or torch.float32],
        is_high_first=matrix.is_high_first,
        lies=_LIES[matrix.lies],
        zero_added=matrix.zero_added,
    )


def _column(tensor: Tensor | None) -> int:
    """From a number of a row to the next."""
    return 1 if tensor is None or tensor.shape[-1] == 1 else tensor.stride(-1)


def decode_work(matrix: CodedMatrix, out_OI: Tensor) -> DecodeWork:
    """`matrix` into `out_OI`, which is of its shape and without gaps."""
    assert out_OI.is_contiguous() and out_OI.shape == matrix.shape and out_OI.dtype in DTYPES
    return DecodeWork(
        out=out_OI.data_ptr(),
        num_outputs=matrix.shape[0],
        num_inputs=matrix.shape[1],
        dtype=DTYPES[out_OI.dtype],
        coding=coding(matrix),
    )


def _require_fit(matrix: CodedMatrix) -> None:
    """Nothing is read beyond a tensor."""
    (num_outputs, num_inputs), rows, groups = matrix.shape, matrix.block[0], _num_groups(matrix)
    wanted = [(matrix.codes, *_size(matrix))]
    if matrix.scales is not None:
        wanted.append((matrix.scales, -(-num_outputs // rows), groups))
    if matrix.zeros is not None:
        of_word = WORD_BITS // BITS[matrix.numbers]
        wanted.append((matrix.zeros, -(-num_outputs // of_word), groups))
    for tensor, num_rows, num_columns in wanted:
        size = tuple(tensor.shape)
        assert size[0] >= num_rows and size[1] >= num_columns, "a part holds the whole matrix"
    order = matrix.groups
    assert order is None or (order.shape == (num_inputs,) and order.dtype == torch.int32)


def _num_groups(matrix: CodedMatrix) -> int:
    """Blocks of a row."""
    return -(-matrix.shape[1] // matrix.block[1])


def _size(matrix: CodedMatrix) -> tuple[int, int]:
    """Rows of codes, and bytes or words of one."""
    num_outputs, num_inputs = matrix.shape
    if matrix.lies == "in rows":
        return num_outputs, _row_bytes(matrix)
    of_word = WORD_BITS // BITS[matrix.numbers]
    if matrix.lies == "words of inputs":
        return -(-num_inputs // of_word), num_outputs
    return num_inputs, -(-num_outputs // of_word)


def _row_bytes(matrix: CodedMatrix) -> int:
    num_inputs = matrix.shape[1]
    if matrix.scales is None:
        numbers = block_numbers(matrix.numbers)
        assert numbers is not None, "only blocks of ggml have their scales inside"
        block, num_bytes = GGML_BLOCKS[numbers]
        assert num_inputs % block == 0 and matrix.rounds_to is None, "rows are whole blocks"
        return num_inputs // block * num_bytes
    return -(-num_inputs * BITS[matrix.numbers] // 8)
