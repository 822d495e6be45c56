"""Matrices of codes with scales: what the compiled kernels decode where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Numbers = Literal["int4", "e2m1", "codebook", "int8", "uint8", "e4m3"]
"""What a code stands for. Of four bits: int4 is u - 8, e2m1 a float (OCP MX 1.0), codebook the u-th
of the matrix's own values. Of eight bits: two's complement; u - 128; a float without infinities."""

GGML_BLOCKS: Mapping[str, tuple[int, int]] = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "iq4_nl": (32, 18),
    "mxfp4": (32, 17),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_xs": (256, 136),
    "iq3_s": (256, 110),
    "iq3_xxs": (256, 98),
    "iq2_s": (256, 82),
    "iq2_xs": (256, 74),
    "iq2_xxs": (256, 66),
    "iq1_m": (256, 56),
    "iq1_s": (256, 50),
}
"""Types of ggml, whose blocks hold codes and scales side by side: numbers of a block and its bytes,
in the order of the C file that decodes them."""


def block_numbers(type_name: str) -> str | None:
    """A type by ggml's name, such as ``Q4_K``; None where it is none of these."""
    return type_name.lower() if type_name.lower() in GGML_BLOCKS else None


Lies = Literal["in rows", "words of inputs", "words of outputs"]
"""How codes do: each output's in a row, or across in words of 32 bits, low ones first. A word is of
neighbouring inputs of an output (GPTQ), or of eight outputs of an input, even ones first (AWQ)."""

WORD_BITS = 32


def words_of(count: int, bits: int) -> int:
    """Words that so many codes take."""
    return -(-count * bits // WORD_BITS)


BITS: Mapping[str, int] = {
    **dict.fromkeys(("int4", "e2m1", "codebook"), 4),
    **dict.fromkeys(("int8", "uint8", "e4m3"), 8),
}
"""Of a code whose scale lies elsewhere."""
ZEROS: Mapping[str, float] = {"int4": 8.0, "uint8": 128.0}
"""Codes that stand for nothing where the matrix has no zero points."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What its codes stand for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedMatrix:
    """A matrix [O, I] of codes; block [r, c] of `block` numbers shares a scale.

    ``weight[o, i] = (number(codes[o, i]) - zero[o, c]) * step[r, c]`` in float32, then rounded to
    `rounds_to`; ``step`` is ``scales * factor``, or ``scales / factor``, in float32. Blocks of ggml
    say by themselves what they stand for, as the gguf package decodes them.
    """

    numbers: str
    """One of `Numbers`, or of `GGML_BLOCKS`."""
    codes: Tensor
    """uint8 [O, bytes of a row]; rows may be longer than needed, and apart. Those that lie across,
    int32: [words of I, O], or [I, words of O]."""
    scales: Tensor | None
    """[ceil(O / rows of a block), ceil(I / columns of a block)]: float32, bfloat16, float16,
    float8_e4m3fn, or uint8, which stands for 2^(u - 127), and NaN at 255 (ue8m0). None in blocks of
    ggml."""
    block: tuple[int, int]
    """Rows and columns."""
    shape: tuple[int, int]
    zeros: Tensor | None = None
    """Of int4 and uint8: int32 [ceil(O / n), groups], n numbers of as many bits as codes in a word,
    those of the first row lowest, or in AWQ's order, offset as the codes are. Blocks then have one
    row."""
    zero_added: int = 0
    """To each of the zero points, which keep their number of bits."""
    lies: Lies = "in rows"
    groups: Tensor | None = None
    """Of int4 and uint8: int32 [I], the block whose scale and zero point a column has, where it is
    not that of its neighbours. Blocks then have one row."""
    factor: Tensor | None = None
    """Float32, one number; 1 if None."""
    divides: bool = False
    """Whether scales are divided by the factor."""
    values: Tensor | None = None
    """Of codebook: float32 [16]. Of blocks of ggml, int8: what their codes stand for, [16], or
    neighbours by their place in a grid, [places, 8 or 4]."""
    is_high_first: bool = False
    """Of two neighbours of four bits, which lie in one byte."""
    rounds_to: torch.dtype | None = None
    """bfloat16, float16, or None for float32."""
