"""What codes and scales stand for, in torch: the reference for compiled decoders, and what decodes
where there are none. The only module of formats that loads torch; they load it when they decode.

Shape letters: O outputs, I inputs, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moebatch.formats.coded import CodedMatrix, Numbers

BYTES = torch.uint8
E4M3 = torch.float8_e4m3fn
ROUNDED_TO = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Numbers that weights are rounded to which are computed in those of their scales."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FRACTION_BITS = 23
"""Of float32."""
_LEAST_POWER = 2.0**-127
_CHUNK_NUMBERS = 2**20
"""Decoded at a time, so that what it takes on the way stays small."""


def decode(matrix: CodedMatrix, out: Tensor) -> None:
    """Writes the numbers of a matrix into `out` [O, I]."""
    num_rows, num_columns = matrix.shape
    zeros_OG = None if matrix.zeros is None else _zeros(matrix)
    step = max(1, _CHUNK_NUMBERS // max(num_columns, 1))
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        taken_O = torch.arange(rows.start, rows.stop, device=out.device)
        numbers_OI = _numbers(matrix.codes[rows], matrix.numbers)[:, :num_columns]
        if zeros_OG is not None:
            numbers_OI = numbers_OI - _spread(zeros_OG[rows], matrix)
        scales_OG = widened(matrix.scales[taken_O // matrix.block[0]])
        steps_OG = scales_OG / matrix.factor if matrix.divides else scales_OG * matrix.factor
        decoded_OI = numbers_OI * _spread(steps_OG, matrix)
        out[rows] = decoded_OI if matrix.rounds_to is None else decoded_OI.to(matrix.rounds_to)


def widened(scales: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents (ue8m0), of which 255 is no number."""
    if scales.dtype != torch.uint8:
        return scales.float()
    powers = (scales.int() << _FRACTION_BITS).view(torch.float32)
    powers[scales == 0] = _LEAST_POWER
    return powers.masked_fill_(scales == 255, torch.nan)


def halves(codes: Tensor) -> Tensor:
    """The four-bit halves of bytes [..., B], low one first, as bytes [..., 2B]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def nibbles(words: Tensor) -> Tensor:
    """Four-bit parts of 32-bit words [..., W], low ones first, as int32 [..., 8W]."""
    return halves(words.contiguous().view(torch.uint8)).int()


def _numbers(codes: Tensor, numbers: Numbers) -> Tensor:
    """What bytes of codes stand for, in float32."""
    if numbers == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if numbers == "int8":
        return codes.view(torch.int8).float()
    if numbers == "uint8":
        return codes.float() - 128
    if numbers == "int4":
        return halves(codes).float() - 8
    return codes.new_tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32)[
        halves(codes).int()
    ]


def _zeros(matrix: CodedMatrix) -> Tensor:
    """Zero points [O, G] in float32, which are packed along the outputs."""
    assert matrix.zeros is not None
    packed = matrix.zeros.T.flatten().view(torch.uint8).view(matrix.zeros.shape[1], -1)
    return _numbers(packed, matrix.numbers).T[: matrix.shape[0]]


def _spread(groups_OG: Tensor, matrix: CodedMatrix) -> Tensor:
    """A number for each group as one for each column."""
    return groups_OG.repeat_interleave(matrix.block[1], -1)[:, : matrix.shape[1]]
