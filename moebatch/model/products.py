"""Products of rows with stored weights: the one place where matrices are multiplied.

Weights stay as they are stored. The compiled kernel widens plain numbers on the way, and decodes
codes, tile by tile; torch, and weights in other formats, need a matrix of the compute dtype, which
is decoded into a buffer that all products share.

Shape letters: N rows, O outputs, I inputs, P parts.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.formats.coded import CodedMatrix
from moebatch.formats.weight_format import Matrix, StoredMatrix, WeightFormat
from moebatch.layout.scratch import (
    bucket_rows,
    kernel_multiplies,
    kernel_multiplies_codes,
    library_multiplies,
    needs_matrix,
    product_rows,
)
from moebatch.model.layers import linear
from moebatch.model.native import loader
from moebatch.model.native.codes import decode_work, is_compiled
from moebatch.model.native.kernels import Kernels, Work, threads_for
from moebatch.model.native.products import ProductWork, lies_whole, multipliable, product_work
from moebatch.model.scratch import Frame
from moebatch.spec.machine.levels import DTYPES

Weights = Mapping[str, Tensor]
"""Those of a layer beside its experts, or those that no layer owns, by role."""
_LEAST_SHARED_PRODUCTS = 2**18
"""What one thread has multiplied before another one would be awake."""


class Products:
    """Owns a buffer for weights that are decoded, so one thread may use it at a time."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        stored: WeightFormat | None = None,
        largest_matrix: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        """For rows of `dtype`.

        Args:
            stored: format of stored weights; None is `dtype`.
            largest_matrix: numbers of the largest one.
            kernels: instead of those that there are.
        """
        self._kernels = (kernels or loader.kernels()) if device.type == "cpu" else None
        self._dtype = dtype
        self._name = next(name for name in DTYPES if getattr(torch, name) == dtype)
        self.device = device
        known = "portable" if self._is_forced else self.instruction_set
        decodes = stored is not None and needs_matrix(stored, self._name, known)
        self._matrix = torch.empty(decodes * largest_matrix, device=device, dtype=dtype)

    @property
    def _is_forced(self) -> bool:
        return self._kernels is not None and self._kernels.is_forced

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return self._matrix.nbytes

    @property
    def instruction_set(self) -> str:
        """That of the kernel; empty where there is none."""
        return self._kernels.instruction_set if self._kernels else ""

    def rows(self, num_rows: int) -> int:
        """Rows of a product that needs so many."""
        if self.device.type != "cpu" or self._is_forced:
            return num_rows
        return product_rows(num_rows, self._name, self.instruction_set)

    def bucketed(self, frame: Frame, x: Tensor, num_rows: int | None = None) -> Tensor:
        """So many rows of x, all if None, and some that hold garbage where a product needs more."""
        needed = self.rows(len(x) if num_rows is None else num_rows)
        if needed <= len(x):
            return x[:needed]
        room = frame.take(needed, *x.shape[1:])
        room[: len(x)] = x
        return room

    def linear(
        self, x_NI: Tensor, weight_OI: Matrix, bias_O: Tensor | None, out_NO: Tensor
    ) -> Tensor:
        """``x @ weight.T + bias`` into `out_NO`. Raises MemoryError if scratch is refused."""
        read_OI = self._read(weight_OI, len(x_NI))
        if not self._multiplies(x_NI, read_OI, bias_O, out_NO):
            return linear(x_NI, self._as_matrix(read_OI), bias_O, out_NO)
        self._multiply(x_NI, read_OI, bias_O, out_NO)
        return out_NO

    def of_role(self, frame: Frame, x_NI: Tensor, weights: Weights, role: str) -> Tensor:
        """The same with the weight of that role, and its bias if there is one, into room of the
        frame."""
        out_NO = frame.take(len(x_NI), len(weights[role]))
        return self.linear(x_NI, weights[role], weights.get(f"{role}_bias"), out_NO)

    def run(self, works: Work, first: ProductWork) -> None:
        """Has products computed that lie one behind the other in memory, by as many threads as the
        first one says. Raises MemoryError if scratch is refused."""
        assert self._kernels is not None, "works are for kernels"
        self._kernels.multiply(works, first.num_threads)
        if first.has_failed:
            raise MemoryError("no memory for the scratch of products")

    def taken(self, weight_OI: Matrix) -> Tensor | CodedMatrix | None:
        """The weights as the kernel multiplies rows with them where they are, codes as many rows as
        `multiplies_codes` says; None of others."""
        if isinstance(weight_OI, StoredMatrix):
            return self._coded(weight_OI)
        return weight_OI if self._is_ours(weight_OI.dtype) and lies_whole(weight_OI) else None

    def by_head(self, x_NHI: Tensor, weights_HIO: Tensor, out_NHO: Tensor) -> None:
        """``x[:, h] @ weights[h]`` of every head into `out_NHO`, any rows and heads apart. torch's
        library is the faster one where it has more than loops: all heads are one call (Zen 5, two
        cores, bfloat16, 16 heads of 64 rows: 294 GFLOP/s, and 90 to 133 head by head in the
        kernel)."""
        if len(x_NHI) and self._by_library:
            torch.bmm(x_NHI.transpose(0, 1), weights_HIO, out=out_NHO.transpose(0, 1))
        elif len(x_NHI):
            for head, weight_OI in enumerate(weights_HIO.mT):
                rows_OI = weight_OI
                if not lies_whole(weight_OI):
                    rows_OI = self._room(weight_OI.shape).copy_(weight_OI)
                self.linear(x_NHI[:, head], rows_OI, None, out_NHO[:, head])

    def in_parts(self, x_NI: Tensor, weights_POI: Tensor, out_NPO: Tensor) -> None:
        """``x @ weights[p].T`` of every part into ``out[:, p]``, which may lie apart. One product
        where the kernel multiplies (16 parts of 128 outputs, 77 rows of 512 numbers, two cores of a
        Zen 4: 364 GFLOP/s, and 210 part by part)."""
        weight_OI = weights_POI.flatten(0, 1)
        if self._multiplies(x_NI, weight_OI, None, out_NPO):
            self._multiply(x_NI, weight_OI, None, out_NPO)
        else:
            for part, part_OI in enumerate(weights_POI):
                self.linear(x_NI, part_OI, None, out_NPO[:, part])

    def library_rows(self, num_rows: int) -> int:
        """Rows of a product by head that needs so many."""
        is_counted = self.device.type == "cpu" and self._dtype != torch.float32
        return bucket_rows(num_rows) if is_counted and self._by_library else num_rows

    @property
    def _by_library(self) -> bool:
        """Whether products by head are."""
        return library_multiplies(self._name, self.instruction_set)

    def _read(self, weight_OI: Matrix, num_rows: int) -> Tensor | CodedMatrix:
        """Weights as the product of so many rows takes them: as they are, codes, or decoded."""
        if not isinstance(weight_OI, StoredMatrix):
            return weight_OI
        coded = self._coded(weight_OI)
        if coded is None:
            room = self._room(weight_OI.shape)
            weight_OI.format.decode(weight_OI.parts, room)
            return room
        return coded if self.multiplies_codes(num_rows) else self._decoded(coded)

    def _coded(self, weight_OI: StoredMatrix) -> CodedMatrix | None:
        """The weights as codes that the kernels know; None where there are no such."""
        if self._kernels is None:
            return None
        coded = weight_OI.format.coded(weight_OI.parts, weight_OI.shape)
        return coded if coded is not None and is_compiled(coded) else None

    def multiplies_codes(self, num_rows: int) -> bool:
        return self._is_forced or kernel_multiplies_codes(
            num_rows, self._name, self.instruction_set
        )

    def _as_matrix(self, weight_OI: Tensor | CodedMatrix) -> Tensor:
        """The weights as torch multiplies them, until the next product: torch would copy those that
        lie neither row by row nor column by column."""
        if isinstance(weight_OI, CodedMatrix):
            return self._decoded(weight_OI)
        if weight_OI.dtype == self._dtype and 1 in weight_OI.stride():
            return weight_OI
        return self._room(weight_OI.shape).copy_(weight_OI)

    def _decoded(self, weight_OI: CodedMatrix) -> Tensor:
        assert self._kernels is not None, "codes are left to kernels"
        room = self._room(weight_OI.shape)
        if room.numel():
            work = decode_work(weight_OI, room)
            self._kernels.decode(work, num_threads_for(room.numel()))
        return room

    def _room(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        if self._matrix.numel() < size:
            return torch.empty(shape, device=self.device, dtype=self._dtype)
        return self._matrix[:size].view(shape)

    def _multiplies(
        self, x_NI: Tensor, read_OI: Tensor | CodedMatrix, bias_O: Tensor | None, out: Tensor
    ) -> bool:
        """Whether the kernel does, and not torch's library."""
        is_ours = isinstance(read_OI, CodedMatrix) or self._is_ours(read_OI.dtype)
        return is_ours and multipliable(x_NI, read_OI, bias_O, out)

    def _multiply(
        self, x_NI: Tensor, read_OI: Tensor | CodedMatrix, bias_O: Tensor | None, out: Tensor
    ) -> None:
        if num_outs := out.numel():
            num_threads = num_threads_for(num_outs * x_NI.shape[1])
            work = product_work(x_NI, read_OI, bias_O, out, num_threads=num_threads)
            self.run(work, work)

    def _is_ours(self, weight_dtype: torch.dtype) -> bool:
        """Whether the kernel is the faster one, or is to be used whatever is faster.

        Of float32 torch's library does as much on processors of its maker. On others it does not:
        on Zen 5 it reaches 185 GFLOP/s, the kernel 320.
        """
        kernels = self._kernels
        if kernels is None:
            return False
        if weight_dtype != self._dtype or kernels.is_forced:
            return True
        if self._dtype == torch.float32:
            return not kernels.is_intel
        return kernel_multiplies(kernels.instruction_set)


def num_threads_for(num_products: int) -> int:
    """Threads that share so many multiplications."""
    return threads_for(num_products, _LEAST_SHARED_PRODUCTS)
