"""What codes and scales stand for, in torch: the reference for compiled decoders, and what decodes
where there are none. Formats load this module, and with it torch, when they decode.

Shape letters: O outputs, I inputs, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moebatch.formats.coded import CodedMatrix, Numbers
from moebatch.formats.weight_format import BadParts
from moebatch.quoting import shown

BYTES = torch.uint8
E4M3 = torch.float8_e4m3fn
ROUNDED_TO = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Numbers that weights are rounded to which are computed in those of their scales."""
_STATE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FRACTION_BITS = 23
"""Of float32."""
_LEAST_POWER = 2.0**-127
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
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


def decode_gptq(
    parts: Sequence[Tensor],
    out: Tensor,
    *,
    bits: int,
    group: int,
    order_I: Tensor | None,
    is_second: bool,
) -> None:
    """Writes a weight in GPTQ's words into `out` [O, I]. Raises BadParts for groups that there are
    not."""
    codes, zeros, scales_GO = parts[:3]
    (num_groups, O), I = scales_GO.shape, out.shape[1]
    half = 1 << bits - 1
    zeros_GO = _in_words(zeros, bits)[:, :O]
    if not (zeros_GO == half).all() and (not is_second or (zeros_GO == half - 1).all()):
        zeros_GO = (zeros_GO + 1) & (2 * half - 1)
    if order_I is None:
        order_I = torch.arange(I, device=out.device) // group
    elif I and not 0 <= int(order_I.min()) <= int(order_I.max()) < num_groups:
        raise BadParts(f"g_idx names groups that there are not; there are {num_groups}")
    for inputs, words in _portions(I, O, per_word=32 // bits):
        codes_IO = _in_words(codes[words].T, bits).T[: len(inputs)]
        groups_I = order_I[inputs.start : inputs.stop].long()
        _place(codes_IO, zeros_GO[groups_I], scales_GO[groups_I], out, inputs)


def decode_awq(parts: Sequence[Tensor], out: Tensor, *, group: int) -> None:
    """The same of AWQ's, whose words hold the codes of eight outputs in an order of their own."""
    codes, zeros, scales_GO = parts
    O, I = out.shape
    zeros_GO = _in_awq_words(zeros)[:, :O]
    for inputs, _ in _portions(I, O, per_word=1):
        codes_IO = _in_awq_words(codes[inputs.start : inputs.stop])[:, :O]
        groups_I = torch.arange(inputs.start, inputs.stop, device=out.device) // group
        _place(codes_IO, zeros_GO[groups_I], scales_GO[groups_I], out, inputs)


def decode_codebook(parts: Sequence[Tensor], out: Tensor) -> None:
    """Writes a weight of bitsandbytes into `out` [O, I], numbers in a row after the other. Raises
    BadParts for a text that does not go with the other parts."""
    codes, values, text, *scales = parts
    state = _codebook_state(text)
    scales_B, block = scales[0], _size(state, "blocksize")
    if len(scales) > 1:
        shared = _repeated(scales[1], _size(state, "nested_blocksize"), len(scales_B))
        scales_B = scales[2][scales_B.int()] * shared + _number(state, "nested_offset")
    flat, step = out.view(-1), max(1, _CHUNK_NUMBERS // block) * block
    for start in range(0, len(flat), step):
        stop = min(start + step, len(flat))
        pairs = codes.flatten()[start // 2 : -(-stop // 2)]
        numbers = values[torch.stack((pairs >> 4, pairs & 15), -1).flatten().int()][: stop - start]
        steps = _repeated(scales_B[start // block : -(-stop // block)], block, stop - start)
        flat[start:stop] = (numbers * steps).to(_STATE_DTYPES[state["dtype"]])


def _codebook_state(text: Tensor) -> Mapping[str, Any]:
    try:
        state = json.loads(bytes(text.tolist()))
    except (ValueError, RecursionError):
        raise BadParts("the text of quant_state is no JSON") from None
    if not isinstance(state, dict) or state.get("dtype") not in _STATE_DTYPES:
        raise BadParts(f"quant_state has none of the dtypes {', '.join(_STATE_DTYPES)}")
    return state


def _size(state: Mapping[str, Any], key: str) -> int:
    size = state.get(key)
    if type(size) is not int or size not in range(2, _CHUNK_NUMBERS + 1, 2):
        raise BadParts(f"{key} of quant_state is {shown(size)}, which is no size of blocks")
    return size


def _number(state: Mapping[str, Any], key: str) -> float:
    number = state.get(key)
    if type(number) is not float:
        raise BadParts(f"{key} of quant_state is {shown(number)}, expected a number")
    return number


def _repeated(scales: Tensor, block: int, count: int) -> Tensor:
    """A scale for each number of blocks. Raises BadParts where there are not as many."""
    if -(-count // block) != len(scales):
        raise BadParts(f"{len(scales)} scales do not make {count} in blocks of {block}")
    return scales.repeat_interleave(block)[:count]


def _portions(num_inputs: int, num_outputs: int, *, per_word: int) -> Iterator[tuple[range, slice]]:
    """Inputs that are decoded at a time, and the words that hold them."""
    step = max(1, _CHUNK_NUMBERS // max(num_outputs, 1) // per_word) * per_word
    for start in range(0, num_inputs, step):
        inputs = range(start, min(start + step, num_inputs))
        yield inputs, slice(start // per_word, -(-inputs.stop // per_word))


def _place(
    codes_IO: Tensor, zeros_IO: Tensor, scales_IO: Tensor, out: Tensor, inputs: range
) -> None:
    weight_IO = (codes_IO - zeros_IO).float() * scales_IO.float()
    out[:, inputs.start : inputs.stop] = weight_IO.to(scales_IO.dtype).T


def _in_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 32-bit words [N, W], low ones first, as int32."""
    codes = words.flatten().view(torch.uint8).view(len(words), -1)
    return (halves(codes) if bits == 4 else codes).int()


def _in_awq_words(words: Tensor) -> Tensor:
    return _in_words(words, 4).view(len(words), -1, 8)[..., _AWQ_ORDER].flatten(-2)


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
