"""What a matrix of an expert is written as: tensors that other programs know.

Shape letters: O rows (outputs), I columns (inputs), G groups of a row, C columns of a group.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.errors import CheckpointError
from moebatch.formats import packed_integers
from moebatch.formats.blocks import WHOLE
from moebatch.formats.scaled_bytes import FP8
from moebatch.formats.weight_format import StoredPart, WeightFormat
from moebatch.packing import half_quadratic
from moebatch.spec.model.named_formats import int4_group
from moebatch.spec.model.precision import GROUPS, Precision

_BLOCK = 128
_FP8_MAX = 448.0
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Encoding(ABC):
    """A way to write matrices [O, I]."""

    name: Precision
    format: WeightFormat
    """As which it is read."""
    code_bits: Literal[4, 8]
    """Bits of a code; scales come on top."""
    rows = 1
    """Rows that are encoded together; others beside them change nothing."""

    def parts(self, name: str, size: tuple[int, int]) -> tuple[StoredPart, ...]:
        """The tensors of the weight `name` that have a row for each of its own or for some."""
        return self.format.parts(name, size)

    @abstractmethod
    def encode(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        """What `parts` names, of float32 rows of a matrix, a multiple of `rows` of them unless they
        are its last."""

    def decoded(self, tensors: Sequence[Tensor], size: tuple[int, ...]) -> Tensor:
        """What readers make of encoded rows, in float32."""
        decoded_OI = torch.empty(size)
        self.format.decode(tensors, decoded_OI)
        return decoded_OI

    def constants(self, name: str, size: tuple[int, int]) -> Mapping[StoredPart, Tensor]:
        """Tensors beside those that are known without the weight."""
        return {}

    @property
    @abstractmethod
    def scheme(self) -> Mapping[str, Any]:
        """Under ``weights`` in a config group of compressed-tensors; of fp8, what stands in
        ``quantization_config`` itself."""


class PackedIntegers(Encoding):
    """Integers in words of 32 bits, as compressed-tensors' ``pack-quantized`` has them."""

    def __init__(self, scale_dtype: torch.dtype, group: int = WHOLE) -> None:
        """Scales are in `scale_dtype`, in which readers round the products."""
        self._scale_dtype = scale_dtype
        self.format = packed_integers.PackedIntegers(
            bits=self.code_bits, group=group, scale_dtype=DTYPE_NAMES[scale_dtype]
        )

    def constants(self, name: str, size: tuple[int, int]) -> Mapping[StoredPart, Tensor]:
        return {StoredPart(f"{name}_shape", "I64", (2,)): torch.tensor(size, dtype=torch.int64)}

    def _encoded(self, codes_OI: Tensor, scale_OG: Tensor) -> tuple[Tensor, ...]:
        unsigned = (codes_OI + 2 ** (self.code_bits - 1)).to(torch.uint8)
        unsigned = F.pad(unsigned, (0, -codes_OI.shape[1] % (32 // self.code_bits)))
        if self.code_bits == 4:
            unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
        return unsigned.view(torch.int32), scale_OG


class Int4(PackedIntegers):
    """Groups of four-bit codes without zero points."""

    name: Precision = "int4"
    code_bits = 4

    def __init__(self, group: int, scale_dtype: torch.dtype) -> None:
        super().__init__(scale_dtype, group)
        self._group = group

    def encode(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        """With the scales of least error."""
        groups_OGC = weight_OI.view(len(weight_OI), -1, self._group)
        codes_OGC, scale_OG1 = half_quadratic.solve(groups_OGC, self._scale_dtype)
        return self._encoded(codes_OGC.flatten(1), scale_OG1.squeeze(-1))

    @property
    def scheme(self) -> Mapping[str, Any]:
        """W4A16."""
        return {**_integers(4), "strategy": "group", "group_size": self._group}


class Int8(PackedIntegers):
    """Eight-bit codes with a scale for each row."""

    name: Precision = "int8"
    code_bits = 8

    def encode(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        """The largest number of a row is 127 steps."""
        largest_O1 = weight_OI.abs().amax(1, keepdim=True)
        scale_O1 = (largest_O1 / 127).to(self._scale_dtype)
        # Subnormal scales are coarse: one rounded down by much would clip its row, or be 0.
        numbers = torch.finfo(self._scale_dtype)
        scale_O1[largest_O1 > 127.5 * scale_O1.float()] += numbers.smallest_normal * numbers.eps
        scale_O1[scale_O1 == 0] = 1
        codes_OI = (weight_OI / scale_O1.float()).round_().clamp_(-128, 127)
        return self._encoded(codes_OI, scale_O1)

    @property
    def scheme(self) -> Mapping[str, Any]:
        """W8A16."""
        return {**_integers(8), "strategy": "channel", "group_size": None}


class Fp8Blocks(Encoding):
    """Floats of eight bits (e4m3) with a float32 scale for each block of 128 x 128, as DeepSeek
    and Qwen publish them."""

    name: Precision = "fp8"
    code_bits = 8
    format = FP8
    rows = _BLOCK

    def encode(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        """The largest number of a block is the largest that e4m3 has."""
        rows, columns = weight_OI.shape
        padded = F.pad(weight_OI, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
        blocks = padded.view(-1, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK)
        scale = blocks.abs().amax((1, 3)) / _FP8_MAX
        scale[scale == 0] = 1.0
        wide = scale.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        numbers = (weight_OI / wide).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return numbers, scale

    @property
    def scheme(self) -> Mapping[str, Any]:
        """Only weights are rounded by what reads them, as far as it can."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        }


def group_of(widths: Sequence[int], wanted: int | None) -> int:
    """Columns of a group that matrices of these widths can have. Raises CheckpointError."""
    options = GROUPS if wanted is None else (wanted,)
    group = int4_group(widths, options)
    if group is not None:
        return group
    named = ", ".join(map(str, sorted(set(widths))))
    raise CheckpointError(
        f"int4 needs widths of experts that are multiples of {options[-1]}; here they are {named}; "
        + ("choose --to int8 or fp8" if options[-1] == GROUPS[-1] else "choose another --group")
    )


def _integers(num_bits: int) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "int", "symmetric": True, "dynamic": False}
