"""What rows of GGUF files stand for: in torch for the usual types, on whatever device they are; by
the gguf package for the others, in main memory.

Shape letters: N blocks, G groups of a block that share a scale.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moebatch.formats.coded import GGML_BLOCKS, block_numbers

_CHUNK_NUMBERS = 2**20
"""Decoded at a time, so that what it takes on the way stays small."""


def decode_ggml(stored: Tensor, out: Tensor, type_name: str) -> None:
    """Writes rows of ggml's blocks, or of plain numbers, into `out` [O, I]."""
    num_rows, num_columns = out.shape
    step = max(1, _CHUNK_NUMBERS // max(num_columns, 1))
    for start in range(0, num_rows, step):
        rows = stored[start : start + step]
        out[start : start + step] = _numbers(rows, type_name)[:, :num_columns]


def _numbers(rows: Tensor, type_name: str) -> Tensor:
    if rows.dtype != torch.uint8:
        return rows
    known = block_numbers(type_name)
    if known is not None:
        _, num_bytes = GGML_BLOCKS[known]
        return _KNOWN[known](rows.reshape(-1, num_bytes)).view(len(rows), -1)
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[type_name]
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(rows.cpu().numpy(), kind))


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_pairs(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _pairs(blocks[:, 4:]).float() + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _pairs(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _halves(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _pairs(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _halves(blocks, 0) * codes.float() + _halves(blocks, 2)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _looked_up("iq4_nl", _pairs(blocks[:, 2:]))


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    powers = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return powers.view(torch.float32) * _looked_up("mxfp4", _pairs(blocks[:, 1:]))


def _q2_k(blocks: Tensor) -> Tensor:
    scales, offsets = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    codes = _crumbs(blocks[:, 16:80]).view(-1, 16, 16).float()
    steps, zeros = _halves(blocks, 80) * scales, _halves(blocks, 82) * offsets
    return steps[:, :, None] * codes - zeros[:, :, None]


def _q3_k(blocks: Tensor) -> Tensor:
    third = blocks[:, None, :32] >> _shifts(blocks, range(8)) & 1
    codes = _crumbs(blocks[:, 32:96]).view(-1, 8, 32) | third << 2
    low, high = _nibbles(blocks[:, 96:104], 8), blocks[:, None, 104:108]
    high = high >> _shifts(blocks, (0, 2, 4, 6)) & 3
    scales = (low.view(-1, 16) | high.reshape(-1, 16) << 4).float() - 32
    steps = _halves(blocks, 108) * scales
    return steps[:, :, None] * (codes.view(-1, 16, 16).float() - 4)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = blocks[:, None, 16:48] >> _shifts(blocks, range(8)) & 1
    return _scaled(blocks, _nibbles(blocks[:, 48:], 32) | fifth << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128], 64).view(-1, 2, 128)
    high = _crumbs(blocks[:, 128:192]).view(-1, 2, 128)
    codes = (low | high << 4).view(-1, 16, 16).float() - 32
    scales_NG = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return scales_NG[:, :, None] * codes


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = _nibble_pairs(blocks[:, 4:8]) + 16.0 * _quarters(blocks[:, 2:4]) - 32
    steps = _halves(blocks, 0) * scales
    return steps[:, :, None] * _looked_up("iq4_xs", _nibbles(blocks[:, 8:], 16).view(-1, 8, 32))


def _iq3_s(blocks: Tensor) -> Tensor:
    places = _placed(blocks[:, 2:66], _bits(blocks[:, 66:74]))
    scales = 2 * _nibble_pairs(blocks[:, 106:110]) + 1
    return _on_grid("iq3_s", places, _bits(blocks[:, 74:106]), _halves(blocks, 0) * scales)


def _iq3_xxs(blocks: Tensor) -> Tensor:
    negative, scales = _signs_and_scales(blocks[:, 66:98])
    steps = _halves(blocks, 0) * (0.5 + scales) * 0.5
    return _on_grid("iq3_xxs", blocks[:, 2:66].int(), negative, steps)


def _iq2_s(blocks: Tensor) -> Tensor:
    places = _placed(blocks[:, 2:34], _quarters(blocks[:, 66:74]))
    steps = _halves(blocks, 0) * (0.5 + _nibble_pairs(blocks[:, 74:82])) * 0.25
    return _on_grid("iq2_s", places, _bits(blocks[:, 34:66]), steps)


def _iq2_xs(blocks: Tensor) -> Tensor:
    codes = _half_words(blocks[:, 2:66])
    steps = _halves(blocks, 0) * (0.5 + _nibble_pairs(blocks[:, 66:74])) * 0.25
    return _on_grid("iq2_xs", codes & 511, _even_signs(codes >> 9), steps)


def _iq2_xxs(blocks: Tensor) -> Tensor:
    places, signs = blocks[:, 2:66].reshape(-1, 8, 2, 4).unbind(2)
    negative, scales = _signs_and_scales(signs.reshape(-1, 32))
    steps = _halves(blocks, 0) * (0.5 + scales) * 0.25
    return _on_grid("iq2_xxs", places.reshape(-1, 32).int(), negative, steps)


def _iq1_m(blocks: Tensor) -> Tensor:
    above = _nibble_pairs(blocks[:, 32:48]).int()
    words = _half_words(blocks[:, 48:56])
    half = (words >> 12 << torch.arange(0, 16, 4, device=words.device)).sum(1, dtype=torch.int16)
    scales = words[:, :, None] >> torch.tensor((0, 3, 6, 9), device=words.device) & 7
    steps = half.view(torch.float16).float()[:, None] * (2 * scales.view(-1, 16) + 1).float()
    less = (above >> 3).repeat_interleave(8, 1)
    return _shifted("iq1_m", _placed(blocks[:, :32], above & 7), less, steps)


def _iq1_s(blocks: Tensor) -> Tensor:
    words = _half_words(blocks[:, 34:50])
    above = words[:, :, None] >> torch.tensor((0, 3, 6, 9), device=words.device) & 7
    steps = _halves(blocks, 0) * (2 * (words >> 12 & 7) + 1).float()
    less = (words >> 15).repeat_interleave(32, 1)
    return _shifted("iq1_s", _placed(blocks[:, 2:34], above.view(-1, 32)), less, steps)


def _on_grid(numbers: str, places: Tensor, negative: Tensor, steps: Tensor) -> Tensor:
    """What lies in the places [N, P] of the grid, negative where that is 1, [N, 256], with steps
    [N, G]."""
    found = _looked_up(numbers, places).flatten(1) * (1 - 2 * negative.float())
    return steps[:, :, None] * found.view(*steps.shape, -1)


def _shifted(numbers: str, places: Tensor, less: Tensor, steps: Tensor) -> Tensor:
    """The same of eighths, each with one more, or one less where that is 1."""
    found = _looked_up(numbers, places).flatten(1) + 1 - 2 * less
    return steps[:, :, None] * 0.125 * found.view(*steps.shape, -1)


def _looked_up(numbers: str, codes: Tensor) -> Tensor:
    """What codes stand for, in float32; of places in a grid, one dimension more."""
    values = values_of(numbers)
    assert values is not None, "the type has some"
    return values.to(codes.device)[codes.int()].float()


@cache
def values_of(numbers: str) -> Tensor | None:
    """What the gguf package says that codes of the type stand for, int8: numbers, [16], or four or
    eight neighbours by their place in a grid; eighths of types whose steps have such. None of types
    whose codes are numbers."""
    has_grid = numbers.startswith(("iq1", "iq2", "iq3"))
    if not has_grid and numbers not in ("iq4_nl", "iq4_xs", "mxfp4"):
        return None
    import gguf

    kind: Any = getattr(gguf.quants, "IQ4_NL" if numbers == "iq4_xs" else numbers.upper())
    if not has_grid:
        return torch.tensor(kind.kvalues, dtype=torch.int8)
    kind.init_grid()
    grid = torch.from_numpy(kind.grid).view(kind.grid.shape[2:])
    return (grid * 8 if numbers.startswith("iq1") else grid).to(torch.int8)


def _signs_and_scales(words: Tensor) -> tuple[Tensor, Tensor]:
    """Of words [N, 32 bytes]: which of the numbers are negative, [N, 256], and scales, [N, 8]."""
    found = _as(torch.int32, words).view(-1, 8, 1)
    sevens = found >> torch.tensor((0, 7, 14, 21), device=words.device) & 127
    return _even_signs(sevens.view(-1, 32)), (found[:, :, 0] >> 28 & 15).float()


def _even_signs(sevens: Tensor) -> Tensor:
    """Seven signs each, and an eighth one that makes their number even."""
    signs = sevens[:, :, None] >> torch.arange(7, device=sevens.device) & 1
    return torch.cat((signs, signs.sum(2, keepdim=True) & 1), 2).flatten(1)


def _placed(low: Tensor, high: Tensor) -> Tensor:
    """Places whose eight lower bits are bytes."""
    return low.int() | high.int() << 8


def _half_words(codes: Tensor) -> Tensor:
    """Of bytes [N, 2 n], in integers."""
    low, high = codes.reshape(len(codes), -1, 2).int().unbind(2)
    return low | high << 8


def _nibble_pairs(codes: Tensor) -> Tensor:
    """Both halves of each byte one after the other, in float32."""
    return torch.stack((codes & 15, codes >> 4), 2).flatten(1).float()


def _quarters(codes: Tensor) -> Tensor:
    """The four of each byte one after the other."""
    return (codes[:, :, None] >> _shifts(codes, (0, 2, 4, 6)).T & 3).flatten(1)


def _scaled(blocks: Tensor, codes: Tensor) -> Tensor:
    """Codes [N, 8, 32] with scales and offsets of six bits."""
    low, offsets, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales_NG = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1).float()
    offsets_NG = torch.cat((offsets & 63, high >> 4 | offsets >> 2 & 48), 1).float()
    scales_NG, offsets_NG = _halves(blocks, 0) * scales_NG, _halves(blocks, 2) * offsets_NG
    return scales_NG[:, :, None] * codes.float() - offsets_NG[:, :, None]


def _pairs(codes: Tensor) -> Tensor:
    """Halves of bytes [N, 16]: all the low ones, then all the high ones, [N, 32]."""
    return _nibbles(codes, 16).view(-1, 32)


def _crumbs(codes: Tensor) -> Tensor:
    """Quarters of bytes [N, 64]: of 32 bytes all the lowest ones, and so on, [N, 2, 4, 32]."""
    return codes.reshape(-1, 2, 1, 32) >> _shifts(codes, (0, 2, 4, 6)) & 3


def _bits(codes: Tensor) -> Tensor:
    """Those of bytes [N, n], lowest first, [N, 8 n]."""
    return (codes[:, :, None] >> _shifts(codes, range(8)).T & 1).flatten(1)


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """Halves of bytes [N, G, run]: of so many bytes all the low ones, then all the high ones."""
    runs = codes.reshape(len(codes), -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).view(len(codes), -1, run)


def _halves(blocks: Tensor, place: int) -> Tensor:
    """The float16 that begins at a byte of each block, [N, 1] in float32."""
    return _as(torch.float16, blocks[:, place : place + 2]).float()


def _shifts(blocks: Tensor, values: range | tuple[int, ...]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8, device=blocks.device)[:, None]


_KNOWN = {
    decode.__name__.removeprefix("_"): decode
    for decode in (
        *(_q8_0, _q4_0, _q4_1, _q5_0, _q5_1, _q2_k, _q3_k, _q4_k, _q5_k, _q6_k, _mxfp4),
        *(_iq4_nl, _iq4_xs, _iq3_s, _iq3_xxs, _iq2_s, _iq2_xs, _iq2_xxs, _iq1_m, _iq1_s),
    )
}
"""What blocks [N, bytes] are, in float32."""


def _as(dtype: torch.dtype, some_NB: Tensor) -> Tensor:
    """Bytes as numbers, of a copy: those of a single block lie whole, but where numbers may not
    begin."""
    return some_NB.clone(memory_format=torch.contiguous_format).view(dtype)
