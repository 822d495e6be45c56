"""MXFP4 as gpt-oss is released in: four bits a number, and a scale for each block of 32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moebatch.formats.weight_format import StoredPart, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 32


class Mxfp4(WeightFormat):
    """Can be planned; no weights are decoded yet."""

    name = quant_method = "mxfp4"
    is_decodable = False

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """Blocks of 16 bytes, and an exponent of one byte for each."""
        blocks = (*shape[:-1], -(-shape[-1] // _BLOCK))
        return (
            StoredPart(f"{name}_blocks", "U8", (*blocks, _BLOCK // 2)),
            StoredPart(f"{name}_scales", "U8", blocks),
        )

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Never asked for: the families that use it cannot be run."""
        raise NotImplementedError("MXFP4 can be planned, not run")


MXFP4 = Mxfp4()
