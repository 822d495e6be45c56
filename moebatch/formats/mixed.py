"""Several formats, of which a checkpoint has one for each weight of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moebatch.formats.weight_format import StoredPart, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from moebatch.formats.coded import CodedMatrix


@dataclass(frozen=True, kw_only=True)
class MixedFormat(WeightFormat):
    """What stands for all of them where scratch is allocated, as for the one that takes most bytes,
    and where time is planned, as for each by its share."""

    widest: WeightFormat
    mix: tuple[tuple[WeightFormat, float], ...]
    """All of them, with their shares of the bytes of all experts."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.widest.name

    @property
    def is_coded(self) -> bool:  # type: ignore[override]
        return all(stored.is_coded for stored, _ in self.mix)

    @property
    def shares(self) -> tuple[tuple[WeightFormat, float], ...]:
        return self.mix

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        return self.widest.parts(name, shape)

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        self.widest.decode(parts, out)

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix | None:
        return self.widest.coded(parts, shape)

    def __str__(self) -> str:
        return " and ".join(str(stored) for stored, _ in self.mix)
