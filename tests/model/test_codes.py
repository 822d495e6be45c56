"""Weights of codes: the compiled decoder gives the numbers of the reference in torch, bit for bit,
and products are the exact ones within rounding."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moebatch.formats import decoding
from moebatch.formats.coded import GGML_BLOCKS, CodedMatrix, Lies, Numbers
from moebatch.formats.ggml import GgmlRows
from moebatch.formats.registry import FORMATS
from moebatch.formats.weight_format import StoredMatrix, WeightFormat
from moebatch.layout.scratch import kernel_multiplies_codes, needs_matrix
from moebatch.model.native.codes import decode_work, is_compiled
from moebatch.model.native.instruction_set import InstructionSet
from moebatch.model.native.kernels import Kernels
from moebatch.model.native.products import product_work
from moebatch.model.products import Products
from tests.few import examples
from tests.gguf_models import blocks_of
from tests.model.test_products import CPU, DTYPES, HALF_UNIT, exact, noise
from tests.native import HERE, SETS, kernels_of

SCALES = [*DTYPES, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8]
FOUR_BITS = ("int4", "e2m1", "codebook")
CODED = [stored for stored in FORMATS.values() if stored.is_coded]
GGML = [
    GgmlRows(type=numbers.upper(), block=block, block_bytes=num_bytes)
    for numbers, (block, num_bytes) in GGML_BLOCKS.items()
]


def random_bytes(*size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


@st.composite
def matrices(draw: st.DrawFn) -> CodedMatrix:
    """Any codes and any scales, infinite ones and NaN among them."""
    numbers = draw(st.sampled_from(get_args(Numbers)))
    rows = draw(st.one_of(st.integers(1, 20), st.sampled_from([33, 104, 200])))
    columns = draw(st.sampled_from(WIDTHS))
    shape = rows, columns
    block = draw(st.sampled_from([(1, 16), (1, 32), (3, 48), (4, 128), (1, columns), (99, 9999)]))
    seed, bits = draw(st.integers(0, 999)), 4 if numbers in FOUR_BITS else 8
    grid = -(-rows // block[0]), -(-columns // block[1])
    scales = random_bytes(grid[0], grid[1] * 4, seed=seed)
    dtype = draw(st.sampled_from(SCALES))
    zeros = None
    if numbers in ("int4", "uint8") and block[0] == 1 and draw(st.booleans()):
        packed = random_bytes(-(-rows * bits // 32), grid[1] * 4, seed=seed + 1)
        zeros = packed.view(torch.int32)
    groups = None
    if numbers in ("int4", "uint8") and block[0] == 1 and draw(st.booleans()):
        generator = torch.Generator().manual_seed(seed + 3)
        groups = torch.randint(0, grid[1], (columns,), dtype=torch.int32, generator=generator)
    values = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    lies = draw(st.sampled_from(_ways_to_lie(numbers)))
    if lies != "in rows":
        return _across(lies, numbers, scales.view(dtype)[:, : grid[1]], block, shape, zeros, groups)
    return CodedMatrix(
        numbers=numbers,
        codes=random_bytes(rows, -(-columns * bits // 8) + draw(st.integers(0, 3)), seed=seed + 2),
        scales=scales.view(dtype)[:, : grid[1]],
        block=block,
        shape=shape,
        zeros=zeros,
        groups=groups,
        values=values if numbers == "codebook" else None,
        is_high_first=numbers in FOUR_BITS and draw(st.booleans()),
        factor=draw(st.sampled_from([None, *map(torch.tensor, (0.37, -3e5, 0.0))])),
        divides=draw(st.booleans()),
        rounds_to=draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
    )


WIDTHS = [1, 7, 16, 31, 33, 64, 100, 1024, 2047, 2100]


def _ways_to_lie(numbers: Numbers) -> tuple[Lies, ...]:
    """Words are those of GPTQ and AWQ."""
    if numbers not in ("int4", "uint8"):
        return ("in rows",)
    return get_args(Lies) if numbers == "int4" else get_args(Lies)[:2]


def _across(
    lies: Lies,
    numbers: Numbers,
    scales: Tensor,
    block: tuple[int, int],
    shape: tuple[int, int],
    zeros: Tensor | None,
    groups: Tensor | None,
) -> CodedMatrix:
    """Scales and zero points of a group beside each other, as they then are."""
    (O, I), of_word = shape, 8 if numbers == "int4" else 4
    size = (-(-I // of_word), O) if lies == "words of inputs" else (I, -(-O // of_word))
    return CodedMatrix(
        numbers=numbers,
        lies=lies,
        codes=random_bytes(size[0], 4 * size[1], seed=O + I).view(torch.int32),
        scales=scales.T.contiguous().T,
        block=block,
        shape=shape,
        zeros=None if zeros is None else zeros[:, : scales.shape[1]].T.contiguous().T,
        zero_added=(O + I) % 2,
        groups=groups,
    )


@st.composite
def blocks_of_ggml(draw: st.DrawFn) -> CodedMatrix:
    """Any bytes, as wide as one block or as needs several tiles, some of them odd."""
    numbers = draw(st.sampled_from([*GGML_BLOCKS]))
    block, num_bytes = GGML_BLOCKS[numbers]
    num_rows, width = draw(st.integers(1, 20)), draw(st.sampled_from([1, 768, 1280, 2304, 4864]))
    num_blocks = -(-width // block)
    stored = random_bytes(num_rows, num_blocks * num_bytes + 3, seed=draw(st.integers(0, 999)))
    stored_as = GgmlRows(type=numbers.upper(), block=block, block_bytes=num_bytes)
    shape = num_rows, num_blocks * block
    matrix = stored_as.coded((stored[:, : num_blocks * num_bytes],), shape)
    assert matrix is not None
    return matrix


@pytest.mark.parametrize("numbers", GGML_BLOCKS)
def test_a_single_block_of_ggml_is_decoded_as_among_others(numbers: str) -> None:
    """Its bytes lie whole, so nothing has to be copied, and numbers may begin anywhere."""
    block, num_bytes = GGML_BLOCKS[numbers]
    stored = random_bytes(8, num_bytes, seed=3)
    stored_as = GgmlRows(type=numbers.upper(), block=block, block_bytes=num_bytes)

    def decoded(rows: Tensor) -> Tensor:
        matrix = stored_as.coded((rows,), (len(rows), block))
        assert matrix is not None
        found = torch.empty(matrix.shape)
        decoding.decode(matrix, found)
        return found.masked_fill_(found.isnan(), 7.0)

    alone = [decoded(stored[row : row + 1]) for row in range(8)]
    assert torch.equal(torch.cat(alone), decoded(stored))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("numbers", GGML_BLOCKS)
@pytest.mark.parametrize("num_blocks", [1, 3, 9, 67])
def test_blocks_of_ggml_become_the_numbers_of_the_gguf_package(
    name: InstructionSet, numbers: str, num_blocks: int
) -> None:
    block, num_bytes = GGML_BLOCKS[numbers]
    kind = gguf.GGMLQuantizationType[numbers.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (block, num_bytes)
    stored = random_bytes(37, num_blocks * num_bytes, seed=num_blocks)
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.quants.dequantize(stored.numpy(), kind))
    stored_as = GgmlRows(type=kind.name, block=block, block_bytes=num_bytes)
    matrix = stored_as.coded((stored,), (37, num_blocks * block))
    assert matrix is not None and is_compiled(matrix)
    found = torch.full(matrix.shape, 7.0)
    kernels_of(name).decode(decode_work(matrix, found))
    assert torch.equal(found.isnan(), wanted.isnan())
    is_number = ~wanted.isnan()
    assert torch.equal(found[is_number].view(torch.int32), wanted[is_number].view(torch.int32))


@pytest.mark.parametrize("name", SETS)
@examples(150)
@given(
    matrix=st.one_of(matrices(), blocks_of_ggml()),
    dtype=st.sampled_from(DTYPES),
    num_threads=st.integers(1, 3),
)
def test_codes_become_the_numbers_of_the_reference(
    name: InstructionSet, matrix: CodedMatrix, dtype: torch.dtype, num_threads: int
) -> None:
    found, wanted = (torch.full(matrix.shape, 7, dtype=dtype) for _ in range(2))
    decoding.decode(matrix, wanted)
    work = decode_work(matrix, found)
    kernels_of(name).decode(work, num_threads)
    is_nan = wanted.isnan()
    assert torch.equal(found.isnan(), is_nan)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(found[~is_nan].view(bits), wanted[~is_nan].view(bits))


def tame(matrix: CodedMatrix) -> CodedMatrix:
    """The same codes with scales of the size of one; no NaN among the codes."""
    if matrix.scales is None:
        numbers = noise(len(matrix.codes), *matrix.shape)
        stored = blocks_of(numbers, matrix.numbers.upper())
        return replace(matrix, codes=torch.from_numpy(stored))
    scales = torch.ones(matrix.scales.shape) + torch.rand(matrix.scales.shape)
    codes = matrix.codes & 0x77 if matrix.numbers == "e4m3" else matrix.codes
    return replace(matrix, codes=codes, scales=scales, factor=None, divides=False)


@pytest.mark.parametrize("name", SETS)
@examples(60)
@given(
    matrix=st.one_of(matrices(), blocks_of_ggml()).map(tame),
    num_rows=st.one_of(st.integers(1, 9), st.sampled_from([64, 65, 130])),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_a_product_is_the_exact_one_within_rounding(
    name: InstructionSet,
    matrix: CodedMatrix,
    num_rows: int,
    dtype: torch.dtype,
    has_bias: bool,
    num_threads: int,
) -> None:
    x = noise(1, num_rows, matrix.shape[1]).to(dtype)
    bias = noise(2, matrix.shape[0]).to(dtype) if has_bias else None
    weight, kernels = torch.empty(matrix.shape), kernels_of(name)
    decoding.decode(matrix, weight)
    found = torch.full((num_rows, matrix.shape[0]), torch.nan, dtype=dtype)
    work = product_work(x, matrix, bias, found, num_threads=num_threads)
    kernels.multiply(work, num_threads)
    wanted = exact(x, weight, bias)
    summed = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    # Where pairs are multiplied, weights are rounded, too.
    of_weights = HALF_UNIT[dtype] if kernels.instruction_set in ("amx", "avx512bf16") else 0.0
    allowed = summed * (2.0**-22 + of_weights) + wanted.abs() * 1.01 * HALF_UNIT[dtype] + 2.0**-25
    assert bool(((found.double() - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("numbers", ["int4", "e2m1", "int8", "uint8"])
def test_scales_of_another_matrix_are_not_met_behind_the_end(
    name: InstructionSet, numbers: Numbers
) -> None:
    """A row ends in the middle of what is decoded together, after rows whose scales were NaN."""
    num_bytes = 64 if numbers in ("int8", "uint8") else 32
    whole = CodedMatrix(
        numbers=numbers,
        codes=random_bytes(8, num_bytes, seed=1),
        scales=torch.full((8, 4), torch.nan),
        block=(1, 16),
        shape=(8, 64),
    )
    short = replace(whole, scales=torch.ones(8, 3), shape=(8, 40))
    for dtype in DTYPES:
        x, found = noise(1, 3, 64).to(dtype), torch.empty(3, 8, dtype=dtype)
        for matrix, is_nan in ((whole, True), (short, False)):
            some = x[:, : matrix.shape[1]].contiguous()
            kernels_of(name).multiply(product_work(some, matrix, None, found, num_threads=1))
            assert torch.equal(found.isnan(), torch.full((3, 8), is_nan))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("numbers", [*get_args(Numbers), *GGML_BLOCKS])
def test_a_row_does_not_depend_on_those_beside_it(name: InstructionSet, numbers: str) -> None:
    """Not by a bit: few rows are multiplied by code of their own."""

    def product(of: Tensor, by: CodedMatrix) -> Tensor:
        made = torch.empty(len(of), by.shape[0], dtype=of.dtype)
        kernels_of(name).multiply(product_work(of, by, None, made, num_threads=1))
        return made

    for matrix, dtype in itertools.product(codes_of(numbers), DTYPES):
        x = noise(1, 70, matrix.shape[1]).to(dtype)
        whole = product(x, matrix)
        for rows in (slice(0, 1), slice(7, 9), slice(4, 7), slice(5, 9), slice(3, 60)):
            assert torch.equal(whole[rows], product(x[rows], matrix))


def codes_of(numbers: str) -> Iterator[CodedMatrix]:
    """Matrices of any codes and tame scales, of several tiles, with an odd number of outputs."""
    if numbers in GGML_BLOCKS:
        stored = next(each for each in GGML if each.type == numbers.upper())
        blocks = stored_matrix(stored, (33, 1280))
        coded = stored.coded(blocks.parts, blocks.shape)
        assert coded is not None
        yield coded
        return
    bits = 4 if numbers in FOUR_BITS else 8
    for width, rounds_to in itertools.product((16, 64), (None, torch.bfloat16, torch.float16)):
        yield tame(
            CodedMatrix(
                numbers=numbers,
                codes=random_bytes(33, 1280 * bits // 8, seed=1),
                scales=torch.empty(33, 1280 // width),
                block=(1, width),
                shape=(33, 1280),
                values=noise(2, 16) if numbers == "codebook" else None,
                rounds_to=rounds_to,
            )
        )


def stored_matrix(stored: WeightFormat, shape: tuple[int, int]) -> StoredMatrix:
    """A matrix of any codes, with scales that are small numbers in every type."""
    if isinstance(stored, GgmlRows):
        return StoredMatrix(
            stored, (torch.from_numpy(blocks_of(noise(1, *shape), stored.type)),), shape
        )
    parts = []
    for number, part in enumerate(stored.parts("x", shape)):
        dtype = TORCH_DTYPES[part.dtype]
        if number == 0 and part.dtype != "F8_E4M3":
            num_bytes = part.num_bytes
            parts.append(random_bytes(num_bytes, seed=1).view(dtype).view(part.shape))
        else:
            parts.append(torch.full(part.shape, 0x3C, dtype=torch.uint8).to(dtype))
    return StoredMatrix(stored, tuple(parts), shape)


TORCH_DTYPES: dict[str, Any] = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@pytest.mark.parametrize("stored", [*CODED, *GGML], ids=lambda stored: stored.name)
@pytest.mark.parametrize("num_rows", [1, 70])
def test_products_take_every_format_of_codes(stored: WeightFormat, num_rows: int) -> None:
    """With kernels as without, and with kernels in no room of their own."""
    I = 256 if isinstance(stored, GgmlRows) else 96
    matrix = stored_matrix(stored, (48, I))
    x, found, wanted = noise(3, num_rows, I), torch.empty(num_rows, 48), torch.empty(num_rows, 48)
    products = Products(CPU, torch.float32, stored=stored, largest_matrix=48 * I)
    products.linear(x, matrix, None, found)
    without = Products(CPU, torch.float32, stored=stored, largest_matrix=48 * I)
    without._kernels = None
    without.linear(x, matrix, None, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert products.scratch_bytes == 0 or not products.instruction_set


@pytest.mark.parametrize("kernels", ["amx", "avx512bf16", "avx2"])
def test_a_decoded_copy_is_made_where_the_library_multiplies(
    kernels: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Pretended(kernels_of(HERE[0]), kernels)
    stored = FORMATS["packed int4"]
    matrix = stored_matrix(stored, (48, 96))
    products = Products(CPU, torch.bfloat16, stored=stored, largest_matrix=48 * 96, kernels=found)
    assert bool(products.scratch_bytes) == needs_matrix(stored, "bfloat16", kernels)
    for num_rows in (4, 200):
        read = products._read(matrix, num_rows)
        is_code = isinstance(read, CodedMatrix)
        assert is_code == kernel_multiplies_codes(num_rows, "bfloat16", kernels)
        if not is_code:
            wanted = torch.empty(48, 96, dtype=torch.bfloat16)
            stored.decode(matrix.parts, wanted)
            assert torch.equal(read, wanted)


class Pretended(Kernels):
    """Kernels that are said to be of another instruction set."""

    def __init__(self, kernels: Kernels, name: InstructionSet) -> None:
        self.__dict__.update(kernels.__dict__)
        self.is_forced = False
        self._name = name

    @property
    def instruction_set(self) -> InstructionSet:
        return self._name


@pytest.mark.parametrize(("width", "is_known"), [(16, True), (24, False), (90, True)])
def test_blocks_of_odd_widths_are_left_to_torch(width: int, is_known: bool) -> None:
    scales = torch.ones(4, -(-90 // width))
    codes = random_bytes(4, 90, seed=1)
    matrix = CodedMatrix(
        numbers="int8", codes=codes, scales=scales, block=(1, width), shape=(4, 90)
    )
    assert is_compiled(matrix) == is_known


def test_a_matrix_that_is_too_short_is_never_read() -> None:
    scales, codes = torch.ones(4, 1), random_bytes(3, 90, seed=1)
    matrix = CodedMatrix(numbers="int8", codes=codes, scales=scales, block=(1, 90), shape=(4, 90))
    with pytest.raises(AssertionError, match="holds the whole matrix"):
        decode_work(matrix, torch.empty(4, 90))
