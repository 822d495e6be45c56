"""Scales of four-bit codes by half-quadratic splitting, without data (HQQ, Badri and Shaji, 2023).

HQQ looks for codes Q and parameters s, z that bring |W - s (Q - z)|_p down by turns: the shrunk
residual E, the codes, the parameter. With its published settings (p = 0.7, beta = 10) a residual
below 0.17 shrinks to E = 0, and those of language models are some 0.001: what is left is least
squares for one parameter between two roundings. HQQ solves for z; codes without a zero point are
solved for s instead:

    Q = round(W / s), -8..7      s = <Q, W> / <Q, Q>

A scale may be negative: the outlier of a group then has the code -8, of which there is no +8.
Relative error of normally distributed weights in groups of 64, scales in bfloat16: 0.108 for
|w| / 7, 0.095 for -8, 0.090 here; 0.092 with HQQ's shrinkage kept alive by normed weights, at eight
times the work, and 0.091 with a zero point. In groups of 32: 0.097, 0.086, 0.082, 0.083, 0.081.

Shape letters: O rows, G groups of a row, C columns of a group.
"""

import torch
from torch import Tensor

LOWEST, HIGHEST = -8, 7
_STARTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of the scale that holds the outlier: clipping it makes the other steps finer."""
_TURNS = 2
"""More change the error by less than a hundredth of it."""


def solve(weight_OGC: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [O, G, C] and scales [O, G, 1] of float32 groups, codes as whole float32 numbers,
    scales in `scale_dtype`. The same for a group whatever is beside it."""
    outlier = weight_OGC.gather(-1, weight_OGC.abs().argmax(-1, keepdim=True))
    first = outlier / LOWEST
    best = _usable(first, scale_dtype)
    least = torch.full_like(best, torch.inf)
    for start in _STARTS:
        scale = first * start
        for _ in range(_TURNS):
            codes = _codes(weight_OGC, scale)
            fit = (codes * weight_OGC).sum(-1, keepdim=True)
            scale = fit / codes.square().sum(-1, keepdim=True)
        scale = _usable(scale, scale_dtype)
        codes = _codes(weight_OGC, scale)
        error = (weight_OGC - codes.mul_(scale)).square_().sum(-1, keepdim=True)
        is_better = error < least
        best = torch.where(is_better, scale, best)
        least = torch.where(is_better, error, least)
    return _codes(weight_OGC, best), best.to(scale_dtype)


def _codes(weight_OGC: Tensor, scale_OG1: Tensor) -> Tensor:
    return (weight_OGC / scale_OG1).round_().nan_to_num_(0.0).clamp_(LOWEST, HIGHEST)


def _usable(scale_OG1: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is stored; 1 for a group of zeros, whose codes are 0."""
    stored = scale_OG1.to(dtype).float()
    return torch.where(stored.isfinite() & (stored != 0), stored, 1.0)
