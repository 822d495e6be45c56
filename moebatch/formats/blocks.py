"""Which numbers of a matrix share a scale: blocks of rows and columns.

Shape letters: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WHOLE = 0
"""As the height or width of a block: however many there are."""
_USUAL_SIZES = (128, 64, 32, 16, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of that many rows and columns; those at the edges may be smaller."""

    rows: int
    columns: int

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of a block of a matrix [..., O, I]."""
        return self.rows or max(shape[-2], 1), self.columns or max(shape[-1], 1)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many there are of a weight [..., O, I], as [..., down, across]."""
        rows, columns = self.size(shape)
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))

    @classmethod
    def found(cls, shape: tuple[int, ...], grid: tuple[int, ...]) -> Blocks | None:
        """The blocks of which a weight [..., O, I] has a grid of scales; None where no size fits.

        Small matrices leave it open how large blocks are: usual sizes come first, and squares
        before rows, for a larger weight in the same blocks then says the same.
        """
        if len(shape) < 2 or len(grid) != len(shape) or 0 in shape[-2:]:
            return None
        return next(
            (blocks for blocks in _candidates(shape, grid) if blocks.grid(shape) == grid), None
        )

    def __str__(self) -> str:
        if self == Blocks(WHOLE, WHOLE):
            return "a scale for the whole matrix"
        if self == Blocks(1, WHOLE):
            return "a scale for each row"
        if self.rows == 1:
            return f"groups of {self.columns}"
        return f"blocks of {self.rows} x {self.columns}"


def columns_of(num_columns: int, num_groups: int = 1) -> int | None:
    """Columns that share a scale, `WHOLE` where there is one for each row; None where no size gives
    so many groups."""
    blocks = Blocks.found((2, num_columns), (2, num_groups))
    return blocks.columns if blocks else None


def _candidates(shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[Blocks]:
    yield from (Blocks(size, size) for size in _USUAL_SIZES)
    yield Blocks(WHOLE, WHOLE)
    yield Blocks(1, WHOLE)
    yield from (Blocks(1, size) for size in _USUAL_SIZES)
    if grid[-1] and shape[-1] % grid[-1] == 0:
        yield Blocks(1, shape[-1] // grid[-1])
    yield from (Blocks(rows, columns) for rows in _USUAL_SIZES for columns in _USUAL_SIZES)
