"""What codes and scales stand for, in torch: the reference for compiled decoders, and what decodes
where there are none. Formats load this module, and with it torch, when they decode.

Shape letters: O outputs, I inputs, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moebatch.formats.coded import BITS, E2M1, WORD_BITS, ZEROS, CodedMatrix, Lies
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
    scales = matrix.scales
    if scales is None:
        decode_ggml(matrix.codes, out, matrix.numbers)
        return
    num_rows, num_columns = matrix.shape
    zeros_OG = None if matrix.zeros is None else _zeros(matrix)
    all_codes = _codes_in_rows(matrix)
    step = max(1, _CHUNK_NUMBERS // max(num_columns, 1))
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        taken_O = torch.arange(rows.start, rows.stop, device=out.device)
        codes = all_codes[rows]
        if matrix.is_high_first:
            codes = codes >> 4 | codes << 4
        if matrix.values is None:
            numbers_OI = _numbers(codes, matrix.numbers)[:, :num_columns]
        else:
            numbers_OI = matrix.values[halves(codes).int()][:, :num_columns]
        if zeros_OG is not None:
            numbers_OI = numbers_OI - _spread(zeros_OG[rows], matrix)
        scales_OG = widened(scales[taken_O // matrix.block[0]])
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


def words_matrix(
    parts: Sequence[Tensor],
    shape: tuple[int, int],
    *,
    bits: int,
    group: int,
    lies: Lies,
    added: int,
) -> CodedMatrix:
    """A weight in words of GPTQ or AWQ, where they lie; to zero points as stored this is `added`.
    Raises BadParts for an order that names groups that there are not."""
    codes, zeros_GW, scales_GO, *order = parts
    neighbours_I = torch.arange(shape[1], device=codes.device).int() // group
    is_in_order = not order or torch.equal(order[0], neighbours_I)
    num_groups = len(scales_GO)
    if not is_in_order and not 0 <= int(order[0].min()) <= int(order[0].max()) < num_groups:
        raise BadParts(f"g_idx names groups that there are not; there are {num_groups}")
    usual = (1 << bits - 1, (1 << bits - 1) - 1)  # in either version of GPTQ, which they then show
    are_usual = lies == "words of inputs" and any(
        _are_all(zeros_GW, code, bits, shape[0]) for code in usual
    )
    return CodedMatrix(
        numbers="int4" if bits == 4 else "uint8",
        lies=lies,
        codes=codes,
        scales=scales_GO.T,
        block=(1, group),
        shape=shape,
        zeros=None if are_usual else zeros_GW.T,
        zero_added=added,
        groups=None if is_in_order else order[0],
        rounds_to=None if scales_GO.dtype == torch.float32 else scales_GO.dtype,
    )


def _are_all(words: Tensor, code: int, bits: int, count: int) -> bool:
    """Whether the first `count` codes of each row of words are this one."""
    of_word = WORD_BITS // bits
    word = sum(code << bits * place for place in range(of_word))
    signed = word - (word >> WORD_BITS - 1 << WORD_BITS)  # as int32 has it
    whole, rest = divmod(count, of_word)
    mask = (1 << bits * rest) - 1
    return bool(
        (words[:, :whole] == signed).all() and (words[:, whole:].long() & mask == word & mask).all()
    )


def _codes_in_rows(matrix: CodedMatrix) -> Tensor:
    """Codes, or a copy of those that lie across. So they are decoded 60 times as fast."""
    if matrix.lies == "in rows":
        return matrix.codes
    words = matrix.codes.T.clone(memory_format=torch.contiguous_format)
    if matrix.lies == "words of outputs":
        padded = torch.nn.functional.pad(words, (0, -words.shape[1] % 8))
        words = padded.view(len(padded), -1, 8).permute(2, 0, 1).contiguous()  # [8, O / 8, I / 8]
        _exchange_nibbles(words)
        words = words[_AWQ_ORDER].transpose(0, 1).flatten(0, 1)
    return words.view(BYTES)


def _exchange_nibbles(words: Tensor) -> None:
    """Of words [8, ...], in place: the j-th nibble of the i-th becomes the i-th of the j-th."""
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        first, second = words.view(-1, 2, distance, *words.shape[1:]).unbind(1)
        different = ((first >> 4 * distance) ^ second) & mask
        second ^= different
        first ^= different << 4 * distance


def rows_of_codebook(parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix | None:
    """A weight of bitsandbytes, whose numbers lie in a row after the other, as a matrix with rows;
    None where blocks run over the ends of rows. Raises BadParts for a text that does not go with
    the other parts."""
    state = _codebook_state(parts[2])
    runs_over = shape[1] % _size(state, "blocksize")
    return None if runs_over else _codebook(parts, shape, state)


def decode_codebook(parts: Sequence[Tensor], out: Tensor) -> None:
    """Writes any such weight into `out` [O, I], block by block. Raises BadParts likewise."""
    state = _codebook_state(parts[2])
    block = _size(state, "blocksize")
    blocks = out.view(-1, block) if out.numel() % block == 0 else out.view(1, -1)
    decode(_codebook(parts, (len(blocks), blocks.shape[1]), state), blocks)


def _codebook(
    parts: Sequence[Tensor], shape: tuple[int, int], state: Mapping[str, Any]
) -> CodedMatrix:
    """Text is read once, since that waits for a GPU; its `state` is what it says."""
    (codes, values, *_), (O, I) = parts, shape
    return CodedMatrix(
        numbers="codebook",
        codes=codes.view(O, -1),
        scales=_codebook_scales(parts, state, O * I).view(O, -1),
        block=(1, _size(state, "blocksize")),
        shape=shape,
        values=values,
        is_high_first=True,
        rounds_to=_STATE_DTYPES[state["dtype"]],
    )


def _codebook_scales(parts: Sequence[Tensor], state: Mapping[str, Any], count: int) -> Tensor:
    """One of each block of so many numbers, in float32."""
    scales_B, *nested = parts[3:]
    _require_scales(scales_B, _size(state, "blocksize"), count)
    if not nested:
        return scales_B
    nested_block = _size(state, "nested_blocksize")
    _require_scales(nested[0], nested_block, len(scales_B))
    shared = nested[0].repeat_interleave(nested_block)[: len(scales_B)]
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


def _require_scales(scales: Tensor, block: int, count: int) -> None:
    if -(-count // block) != len(scales):
        raise BadParts(f"{len(scales)} scales do not make {count} in blocks of {block}")


def _in_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 32-bit words [N, W], low ones first, as bytes."""
    codes = words.flatten().view(torch.uint8).view(len(words), -1)
    return halves(codes) if bits == 4 else codes


def _numbers(codes: Tensor, numbers: str) -> Tensor:
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
    bits = BITS[matrix.numbers]
    codes_GO = _in_words(matrix.zeros.T, bits)
    if matrix.lies == "words of outputs":
        codes_GO = codes_GO.view(len(codes_GO), -1, 8)[..., _AWQ_ORDER].flatten(-2)
    added_GO = (codes_GO + matrix.zero_added) & (1 << bits) - 1
    return (added_GO.float() - ZEROS[matrix.numbers]).T[: matrix.shape[0]]


def _spread(groups_OG: Tensor, matrix: CodedMatrix) -> Tensor:
    """A number for each group as one for each column."""
    if matrix.groups is not None:
        return groups_OG[:, matrix.groups]
    spread = groups_OG[:, :, None].expand(-1, -1, matrix.block[1]).flatten(1)
    return spread[:, : matrix.shape[1]]
