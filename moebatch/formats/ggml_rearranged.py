"""Weights that GGUF files hold otherwise than the model has them: llama.cpp's converter puts rows
and columns in the order in which its kernels take them, and works out some numbers beforehand.

Each arrangement says how the tensors of such a weight are shaped, and puts the weight back. Shape
letters: R rows, C columns, H heads, K heads of keys, V heads of values that share one of keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from moebatch.formats.ggml import GgmlRows
from moebatch.formats.weight_format import StoredPart, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Arrangement(ABC):
    """What has been done to a weight. Those that are equal do the same."""

    tensors: ClassVar[tuple[str, ...]] = ()
    """Those that hold it, without the name of its layer; empty is one of its own name."""

    def stored_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Of the tensors that hold a weight of that shape."""
        return (shape,)

    @abstractmethod
    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        """Writes the weight that these float32 numbers are into `out`, of its shape and any
        type."""


@dataclass(frozen=True, kw_only=True)
class Rearranged(WeightFormat):
    """Rows of ggml's blocks or numbers, in one tensor or several, that are put back all at once."""

    stored: tuple[tuple[str, GgmlRows], ...]
    """The tensors by their names, in the order in which the arrangement takes them."""
    arrangement: Arrangement

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.stored[0][1].name

    def parts(self, name: str, shape: Shape) -> tuple[StoredPart, ...]:
        """Those of each tensor, under its own name."""
        shapes = self.arrangement.stored_shapes(shape)
        return tuple(
            part
            for (own, rows), size in zip(self.stored, shapes, strict=True)
            for part in rows.parts(own, size)
        )

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Each in float32, then as the model has them."""
        shapes = self.arrangement.stored_shapes(tuple(out.shape))
        numbers = []
        for (_, rows), part, size in zip(self.stored, parts, shapes, strict=True):
            decoded = out.new_empty(size).float()
            rows.decode([part.view(-1, part.shape[-1])], decoded.view(-1, size[-1]))
            numbers.append(decoded)
        self.arrangement.restore(numbers, out)

    def heights(self, shape: Shape) -> tuple[int, ...]:
        """All rows are put back together."""
        return ()


@dataclass(frozen=True)
class Interleaved(Arrangement):
    """Queries or keys [H x C, R] whose two halves of a head are interleaved, so that those numbers
    lie side by side that llama.cpp rotates by one angle."""

    num_heads: int

    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        """[H, C/2, 2] become [H, 2, C/2]."""
        in_pairs = stored[0].view(self.num_heads, -1, 2, *out.shape[1:])
        out.view(self.num_heads, 2, -1, *out.shape[1:]).copy_(in_pairs.transpose(1, 2))


@dataclass(frozen=True)
class LatentHalves(Arrangement):
    """What makes keys and values of latents (``kv_b_proj``, [H x (keys + values), C]), as two
    tensors: keys [H, C, keys], which queries are multiplied with, and values [H, values, C]."""

    tensors = ("attn_k_b.weight", "attn_v_b.weight")
    num_heads: int
    key_width: int
    """Numbers of a head's key that are made of a latent."""

    def stored_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        rows, rank = shape
        value_width = rows // self.num_heads - self.key_width
        return (self.num_heads, rank, self.key_width), (self.num_heads, value_width, rank)

    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        """Head by head, keys before values."""
        by_head = out.view(self.num_heads, -1, out.shape[1])
        by_head[:, : self.key_width].copy_(stored[0].transpose(1, 2))
        by_head[:, self.key_width :].copy_(stored[1])


@dataclass(frozen=True)
class CountedFromZero(Arrangement):
    """A norm that multiplies by one more than its weight, with that one added."""

    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(stored[0] - 1)


@dataclass(frozen=True)
class ByKeyHead(Arrangement):
    """Projections of Qwen3-Next's recurrent layers (``in_proj_qkvz``), in which the rows of a head
    of keys lie together: queries, keys, values, gates of the output. As two tensors: all heads of
    queries, keys and values, then all of gates."""

    tensors = ("attn_qkv.weight", "attn_gate.weight")
    num_heads: int
    """Of keys."""
    key_head_dim: int

    def stored_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Gates are as wide as values."""
        rows, columns = shape
        gates = rows // 2 - self.num_heads * self.key_head_dim
        return (rows - gates, columns), (gates, columns)

    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        keys, columns = self.num_heads * self.key_head_dim, out.shape[1]
        qkv, gates = stored
        start = 0
        by_head = out.view(self.num_heads, -1, columns)
        for part in (qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], gates):
            of_head = part.view(self.num_heads, -1, columns)
            by_head[:, start : start + of_head.shape[1]].copy_(of_head)
            start += of_head.shape[1]


@dataclass(frozen=True)
class AsRows(Arrangement):
    """Numbers in the model's order, as a matrix of so many columns, or a vector where that has one
    row."""

    num_columns: int

    def stored_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        rows = prod(shape) // self.num_columns
        return ((rows, self.num_columns) if rows > 1 else (self.num_columns,),)

    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(stored[0].view(out.shape))


@dataclass(frozen=True)
class Fading(Arrangement):
    """What a state fades by, -exp(weight), in place of the weight; arranged as others are."""

    arrangement: Arrangement

    def stored_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return self.arrangement.stored_shapes(shape)

    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        self.arrangement.restore([numbers.neg().log() for numbers in stored], out)


@dataclass(frozen=True, kw_only=True)
class ByTurns(Arrangement):
    """Heads of values in turns: the first of each head of keys, then the second of each, in place
    of all that share a head of keys [K, V]. Sizes of one in the middle are left out."""

    num_key_heads: int
    num_shared: int
    """Heads of values that share one of keys."""
    num_rows_before: int = 0
    """Of others, which stay."""
    has_columns: bool = False
    """Columns are of heads, not rows."""

    def stored_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Without dimensions of one in the middle."""
        first, *others = shape
        return ((first, *(size for size in others[:-1] if size > 1), *others[-1:]),)

    def restore(self, stored: Sequence[Tensor], out: Tensor) -> None:
        """[V, K] become [K, V]."""
        (numbers,) = stored
        outer = len(out) if self.has_columns else 1
        before = self.num_rows_before
        out[:before].copy_(numbers[:before].view(out[:before].shape))
        in_turns = numbers[before:].view(outer, self.num_shared, self.num_key_heads, -1)
        by_key = out[before:].view(outer, self.num_key_heads, self.num_shared, -1)
        by_key.copy_(in_turns.transpose(1, 2))
