"""What rows of GGUF files stand for: in torch for the usual types, on whatever device they are; by
the gguf package for the others, in main memory.

Shape letters: N blocks, G groups of a block that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moebatch.formats.coded import GGML_BLOCKS, BlockNumbers, block_numbers

_CHUNK_NUMBERS = 2**20
"""Decoded at a time, so that what it takes on the way stays small."""


def decode_ggml(stored: Tensor, out: Tensor, type_name: str, *, num_heads: int) -> None:
    """Writes rows of ggml's blocks, or of plain numbers, into `out` [O, I]; with `num_heads` the
    rows of each head, which come as [C/2, 2], become [2, C/2]."""
    num_rows, num_columns = out.shape
    step = max(1, _CHUNK_NUMBERS // max(num_columns, 1))
    decoded = torch.empty_like(out) if num_heads else out
    for start in range(0, num_rows, step):
        rows = stored[start : start + step]
        decoded[start : start + step] = _numbers(rows, type_name)[:, :num_columns]
    if num_heads:
        in_pairs = decoded.view(num_heads, -1, 2, num_columns)
        out.view(num_heads, 2, -1, num_columns).copy_(in_pairs.transpose(1, 2))


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
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:], 16).view(-1, 32).float() - 8)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = blocks[:, None, 16:48] >> _shifts(blocks, range(8)) & 1
    return _scaled(blocks, _nibbles(blocks[:, 48:], 32) | fifth << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128], 64).view(-1, 2, 128)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> _shifts(blocks, (0, 2, 4, 6)) & 3
    codes = (low | high.view(-1, 2, 128) << 4).view(-1, 16, 16).float() - 32
    scales_NG = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return scales_NG[:, :, None] * codes


def _scaled(blocks: Tensor, codes: Tensor) -> Tensor:
    """Codes [N, 8, 32] with scales and offsets of six bits."""
    low, offsets, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales_NG = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1).float()
    offsets_NG = torch.cat((offsets & 63, high >> 4 | offsets >> 2 & 48), 1).float()
    scales_NG, offsets_NG = _halves(blocks, 0) * scales_NG, _halves(blocks, 2) * offsets_NG
    return scales_NG[:, :, None] * codes.float() - offsets_NG[:, :, None]


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """Halves of bytes [N, G, run]: of so many bytes all the low ones, then all the high ones."""
    runs = codes.reshape(len(codes), -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).view(len(codes), -1, run)


def _halves(blocks: Tensor, place: int) -> Tensor:
    """The float16 that begins at a byte of each block, [N, 1] in float32."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _shifts(blocks: Tensor, values: range | tuple[int, ...]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8, device=blocks.device)[:, None]


_KNOWN: Mapping[BlockNumbers, Callable[[Tensor], Tensor]] = {
    "q4_0": _q4_0,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
"""What blocks [N, bytes] are, in float32."""
