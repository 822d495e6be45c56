"""What codes and scales stand for, in torch: the reference for compiled decoders, and what decodes
where there are none. Formats load this module, and with it torch, when they decode.

Shape letters: O outputs, I inputs, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moebatch.formats.coded import E2M1, BlockNumbers, CodedMatrix, Numbers
from moebatch.formats.ggml_decoding import decode_ggml
from moebatch.formats.weight_format import BadParts
from moebatch.quoting import shown

BYTES = torch.uint8
E4M3 = torch.float8_e4m3fn
ROUNDED_TO = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Numbers that weights are rounded to which are computed in those of their scales."""
_STATE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FRACTION_BITS = 23
"""Of float32."""
_LEAST_POWER = 2.0**-127
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
_CHUNK_NUMBERS = 2**20
"""Decoded at a time, so that what it takes on the way stays small."""


def decode(matrix: CodedMatrix, out: Tensor) -> None:
    """Writes the numbers of a matrix into `out` [O, I]."""
    if matrix.scales is None:
        decode_ggml(matrix.codes, out, matrix.numbers, num_heads=0)
        return
    num_rows, num_columns = matrix.shape
    zeros_OG = None if matrix.zeros is None else _zeros(matrix)
    step = max(1, _CHUNK_NUMBERS // max(num_columns, 1))
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        taken_O = torch.arange(rows.start, rows.stop, device=out.device)
        codes = matrix.codes[rows]
        if matrix.is_high_first:
            codes = codes >> 4 | codes << 4
        if matrix.values is None:
            numbers_OI = _numbers(codes, matrix.numbers)[:, :num_columns]
        else:
            numbers_OI = matrix.values[halves(codes).int()][:, :num_columns]
        if zeros_OG is not None:
            numbers_OI = numbers_OI - _spread(zeros_OG[rows], matrix)
        scales_OG = widened(matrix.scales[taken_O // matrix.block[0]])
        if matrix.factor is not None and matrix.divides:
            scales_OG /= matrix.factor
        elif matrix.factor is not None:
            scales_OG *= matrix.factor
        decoded_OI = numbers_OI * _spread(scales_OG, matrix)
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


def _is_in_order(order_I: Tensor, group: int) -> bool:
    """Whether groups are those of neighbouring inputs."""
    return torch.equal(order_I, torch.arange(len(order_I), device=order_I.device).int() // group)


def rows_of_gptq(
    parts: Sequence[Tensor], shape: tuple[int, int], *, bits: int, group: int, is_second: bool
) -> CodedMatrix:
    """A weight in GPTQ's words as a matrix with rows: a copy of the codes (6.5 GB/s on two of our
    cores, where decoding what lies across has 0.1). Raises BadParts for an order that names groups
    that there are not."""
    codes, zeros, scales_GO, *order = parts
    zeros_GO = _gptq_zeros(zeros, bits, shape[0], is_second=is_second)
    rows = _rows(codes.T.contiguous(), zeros_GO, scales_GO, shape, bits, group)
    if not order or _is_in_order(order[0], group):
        return rows
    num_groups = len(scales_GO)
    if not 0 <= int(order[0].min()) <= int(order[0].max()) < num_groups:
        raise BadParts(f"g_idx names groups that there are not; there are {num_groups}")
    return replace(rows, groups=order[0])


def rows_of_awq(parts: Sequence[Tensor], shape: tuple[int, int], *, group: int) -> CodedMatrix:
    """The same of AWQ's, whose words hold the codes of eight outputs in an order of their own."""
    codes, zeros, scales_GO = parts
    O, I = shape
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -I % 8))
    words = padded.view(-1, 8, padded.shape[1]).permute(1, 2, 0).contiguous()  # [8, O / 8, I / 8]
    _exchange_nibbles(words)
    rows = words[_AWQ_ORDER].transpose(0, 1).flatten(0, 1)
    return _rows(rows, _in_awq_words(zeros)[:, :O], scales_GO, shape, 4, group)


def _rows(
    words: Tensor,
    zeros_GO: Tensor,
    scales_GO: Tensor,
    shape: tuple[int, int],
    bits: int,
    group: int,
) -> CodedMatrix:
    """Of words [O, W] of codes along the inputs."""
    is_symmetric = bool((zeros_GO == 1 << bits - 1).all())
    return CodedMatrix(
        numbers="int4" if bits == 4 else "uint8",
        codes=words.view(BYTES),
        scales=scales_GO.T.contiguous(),
        block=(1, group),
        shape=shape,
        zeros=None if is_symmetric else _packed_rows(zeros_GO.T, bits),
        rounds_to=None if scales_GO.dtype == torch.float32 else scales_GO.dtype,
    )


def _exchange_nibbles(words: Tensor) -> None:
    """Of words [8, ...], in place: the j-th nibble of the i-th becomes the i-th of the j-th."""
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        first, second = words.view(-1, 2, distance, *words.shape[1:]).unbind(1)
        different = ((first >> 4 * distance) ^ second) & mask
        second ^= different
        first ^= different << 4 * distance


def _packed_rows(codes_OG: Tensor, bits: int) -> Tensor:
    """Codes as words of neighbouring rows, the first one lowest: int32 [O / codes of a word, G]."""
    of_word = 32 // bits
    padded = torch.nn.functional.pad(codes_OG, (0, 0, 0, -len(codes_OG) % of_word))
    shifts = torch.arange(0, 32, bits, device=codes_OG.device)[:, None]
    words = padded.long().view(-1, of_word, padded.shape[1]) << shifts
    return words.sum(1).int()


def _gptq_zeros(words: Tensor, bits: int, num_outputs: int, *, is_second: bool) -> Tensor:
    """Zero points [G, O]. Symmetric ones show which version they are of."""
    half = 1 << bits - 1
    zeros_GO = _in_words(words, bits)[:, :num_outputs]
    if (zeros_GO == half).all() or (is_second and not (zeros_GO == half - 1).all()):
        return zeros_GO
    return (zeros_GO + 1) & (2 * half - 1)


def rows_of_codebook(parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix | None:
    """A weight of bitsandbytes, whose numbers lie in a row after the other, as a matrix with rows;
    None where blocks run over the ends of rows. Raises BadParts for a text that does not go with
    the other parts."""
    codes, values, text, *_ = parts
    state, (O, I) = _codebook_state(text), shape
    block = _size(state, "blocksize")
    if I % block:
        return None
    return CodedMatrix(
        numbers="codebook",
        codes=codes.view(O, -1),
        scales=_codebook_scales(parts, state, O * I).view(O, -1),
        block=(1, block),
        shape=shape,
        values=values,
        is_high_first=True,
        rounds_to=_STATE_DTYPES[state["dtype"]],
    )


def decode_codebook(parts: Sequence[Tensor], out: Tensor) -> None:
    """Writes any such weight into `out` [O, I]. Raises BadParts likewise."""
    codes, values, text, *_ = parts
    state = _codebook_state(text)
    flat, block = out.view(-1), _size(state, "blocksize")
    scales_B = _codebook_scales(parts, state, len(flat))
    step = max(1, _CHUNK_NUMBERS // block) * block
    for start in range(0, len(flat), step):
        stop = min(start + step, len(flat))
        pairs = codes.flatten()[start // 2 : -(-stop // 2)]
        numbers = values[torch.stack((pairs >> 4, pairs & 15), -1).flatten().int()][: stop - start]
        steps = _repeated(scales_B[start // block : -(-stop // block)], block, stop - start)
        flat[start:stop] = (numbers * steps).to(_STATE_DTYPES[state["dtype"]])


def _codebook_scales(parts: Sequence[Tensor], state: Mapping[str, Any], count: int) -> Tensor:
    """One of each block of so many numbers, in float32."""
    scales_B, *nested = parts[3:]
    _require_scales(scales_B, _size(state, "blocksize"), count)
    if not nested:
        return scales_B
    shared = _repeated(nested[0], _size(state, "nested_blocksize"), len(scales_B))
    return nested[1][scales_B.int()] * shared + _number(state, "nested_offset")


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
    _require_scales(scales, block, count)
    return scales.repeat_interleave(block)[:count]


def _require_scales(scales: Tensor, block: int, count: int) -> None:
    if -(-count // block) != len(scales):
        raise BadParts(f"{len(scales)} scales do not make {count} in blocks of {block}")


def _in_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 32-bit words [N, W], low ones first, as int32."""
    codes = words.flatten().view(torch.uint8).view(len(words), -1)
    return (halves(codes) if bits == 4 else codes).int()


def _in_awq_words(words: Tensor) -> Tensor:
    return _in_words(words, 4).view(len(words), -1, 8)[..., _AWQ_ORDER].flatten(-2)


def _numbers(codes: Tensor, numbers: Numbers | BlockNumbers) -> Tensor:
    """What bytes of codes stand for, in float32."""
    if numbers == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if numbers == "int8":
        return codes.view(torch.int8).float()
    if numbers == "uint8":
        return codes.float() - 128
    if numbers == "int4":
        return halves(codes).float() - 8
    return codes.new_tensor(E2M1, dtype=torch.float32)[halves(codes).int()]


def _zeros(matrix: CodedMatrix) -> Tensor:
    """Zero points [O, G] in float32, which are packed along the outputs."""
    assert matrix.zeros is not None
    packed = matrix.zeros.T.flatten().view(torch.uint8).view(matrix.zeros.shape[1], -1)
    return _numbers(packed, matrix.numbers).T[: matrix.shape[0]]


def _spread(groups_OG: Tensor, matrix: CodedMatrix) -> Tensor:
    """A number for each group as one for each column."""
    if matrix.groups is not None:
        return groups_OG[:, matrix.groups]
    spread = groups_OG[:, :, None].expand(-1, -1, matrix.block[1]).flatten(1)
    return spread[:, : matrix.shape[1]]
