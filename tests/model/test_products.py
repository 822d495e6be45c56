"""Products with stored weights: near the exact ones on every instruction set that there is."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moebatch.errors import ConfigError
from moebatch.formats.plain import BFLOAT16
from moebatch.layout.scratch import library_multiplies, product_rows
from moebatch.model.native import instruction_set, loader
from moebatch.model.native.instruction_set import INSTRUCTION_SETS, InstructionSet
from moebatch.model.native.kernels import Kernels
from moebatch.model.native.products import _cache_bytes, product_work
from moebatch.model.products import Products
from moebatch.spec.machine.hardware import Dtype
from tests.few import examples
from tests.native import HERE, SETS, kernels_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What rounding to a number may add, as a share of it."""
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}
"""The same of numbers that are nearly too small for the type."""


def noise(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def exact(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    product = x_NI.double() @ weight_OI.double().t()
    return product if bias_O is None else product + bias_O.double()


def multiplied(kernels: Kernels, *tensors: Tensor | None, num_threads: int = 1) -> Tensor:
    """What the kernel makes of rows, weights and a bias, in a place that held something else."""
    x_NI, weight_OI, bias_O = tensors
    assert x_NI is not None and weight_OI is not None
    out_NO = torch.full((len(x_NI), len(weight_OI)), torch.nan, dtype=x_NI.dtype)
    work = product_work(x_NI, weight_OI, bias_O, out_NO, num_threads=num_threads)
    kernels.multiply(work, num_threads)
    assert not work.has_failed
    return out_NO


@pytest.mark.parametrize("name", SETS)
@examples(60)
@given(
    num_rows=st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 200, 385])),
    num_outputs=st.sampled_from([1, 3, 4, 5, 6, 7, 31, 32, 100, 505]),
    num_inputs=st.sampled_from([1, 7, 15, 16, 17, 32, 33, 63, 96, 1024, 1025, 2100, 9000]),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_product_is_the_exact_one_within_rounding(
    name: InstructionSet,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    has_bias: bool,
    num_threads: int,
    seed: int,
) -> None:
    x = noise(seed, num_rows, num_inputs).to(dtype)
    weight = noise(seed + 1, num_outputs, num_inputs).to(weight_dtype)
    bias = noise(seed + 2, num_outputs).to(dtype) if has_bias else None
    found = multiplied(kernels_of(name), x, weight, bias, num_threads=num_threads).double()
    wanted = exact(x, weight, bias)
    # Sums of float32: of the size of what is summed, whatever cancels.
    summed = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    allowed = summed * 2.0**-22 + wanted.abs() * 1.01 * HALF_UNIT[dtype] + SMALLEST[dtype]
    assert bool(((found - wanted).abs() <= allowed).all())


@pytest.mark.parametrize(
    ("said", "wanted"),
    [({"1": "32K", "2": "1024K"}, 2**20), ({"1": "32K"}, 2**19), ({"2": "", "x": "1K"}, 2**19)],
)
def test_blocks_are_made_for_the_second_level_cache(
    said: dict[str, str], wanted: int, tmp_path: Path
) -> None:
    for level, size in said.items():
        folder = tmp_path / f"index{level}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert _cache_bytes(tmp_path) == wanted
    assert _cache_bytes(tmp_path / "none") == 2**19


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("num_rows", [5, 130])
def test_threads_change_no_bit(name: InstructionSet, num_rows: int) -> None:
    x, weight = noise(1, num_rows, 700), noise(2, 1100, 700).bfloat16()
    one, *others = [
        multiplied(kernels_of(name), x, weight, None, num_threads=count) for count in (1, 2, 5)
    ]
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_a_row_does_not_depend_on_those_beside_it(
    name: InstructionSet, weight_dtype: torch.dtype
) -> None:
    x, weight = noise(1, 300, 1500), noise(2, 50, 1500).to(weight_dtype)
    together = multiplied(kernels_of(name), x, weight, None)
    for count in (1, 5, 13, 50):
        some = multiplied(kernels_of(name), x[100 : 100 + count].contiguous(), weight, None)
        assert torch.equal(together[100 : 100 + count], some)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("num_rows", [2, 50])
def test_rows_may_lie_apart(name: InstructionSet, num_rows: int) -> None:
    wide, room = noise(1, num_rows, 90), torch.zeros(num_rows, 60)
    weight = noise(2, 20, 40)
    work = product_work(wide[:, 10:50], weight, None, room[:, 5:25], num_threads=1)
    kernels_of(name).multiply(work)
    torch.testing.assert_close(room[:, 5:25], wide[:, 10:50] @ weight.t(), rtol=1e-5, atol=1e-5)
    assert not room[:, :5].any() and not room[:, 25:].any()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_numbers_that_are_none_stay_in_their_row(name: InstructionSet, broken: float) -> None:
    x, weight = noise(1, 40, 64), noise(2, 30, 64)
    x[7, 3] = broken
    found = multiplied(kernels_of(name), x, weight, None)
    assert not found[7].isfinite().any()
    assert found[:7].isfinite().all() and found[8:].isfinite().all()


@pytest.mark.parametrize("name", SETS)
def test_a_library_is_of_the_set_that_it_was_asked_for(name: InstructionSet) -> None:
    kernels = kernels_of(name)
    assert kernels.instruction_set == name
    assert kernels.is_forced == (name != instruction_set.highest())


@pytest.mark.parametrize("name", ["sse5", "AVX2", *INSTRUCTION_SETS[: -len(HERE)]])
def test_a_set_that_the_processor_lacks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"MOEBATCH_ISA: is '{name}'.*portable, or nothing"):
        loader.load({**os.environ, instruction_set.VARIABLE: name})


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_without_kernels_torch_multiplies_what_is_widened(
    weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    x, weight = noise(1, 20, 48), noise(2, 24, 48).to(weight_dtype)
    products = Products(CPU, torch.float32, stored=BFLOAT16, largest_matrix=48 * 24)
    found = products.linear(x, weight, None, torch.empty(20, 24))
    torch.testing.assert_close(found, exact(x, weight, None).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("instruction_set", "dtype", "num_rows", "wanted"),
    [
        ("", "bfloat16", 19, 32),
        ("", "float32", 19, 19),
        ("amx", "bfloat16", 3, 4),
        ("amx", "float16", 19, 32),
        ("amx", "float32", 19, 19),
        ("avx512bf16", "bfloat16", 127, 127),
        ("avx512bf16", "bfloat16", 129, 129),
        ("avx512bf16", "float16", 65, 65),
        ("avx2", "bfloat16", 65, 65),
    ],
)
def test_rows_are_padded_where_onednn_is_the_faster_one(
    instruction_set: str, dtype: Dtype, num_rows: int, wanted: int
) -> None:
    assert product_rows(num_rows, dtype, instruction_set) == wanted


@pytest.mark.exhaustive  # compiles
def test_rows_of_kernels_that_were_asked_for_are_not_padded() -> None:
    assert Products(CPU, torch.bfloat16, kernels=kernels_of("portable")).rows(19) == 19


def test_rows_are_padded_where_torch_minds_many_different_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    assert Products(CPU, torch.bfloat16).rows(19) == 32
    assert Products(CPU, torch.float32).rows(19) == 19


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lies_across", [False, True])
def test_products_by_head_are_exact_whoever_does_them(
    name: InstructionSet, dtype: torch.dtype, lies_across: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = Products(CPU, dtype, kernels=kernels_of(name))
    x_NHI = noise(1, 9, 3, 40).to(dtype)[..., 5:38]
    weights_HIO = (noise(2, 3, 20, 33).mT if lies_across else noise(2, 3, 33, 20)).to(dtype)
    wanted = torch.einsum("nhi,hio->nho", x_NHI.double(), weights_HIO.double())
    done = list[bool]()
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *of, **to: [bmm(*of, **to), done.append(True)])
    for by_library in (False, True):
        monkeypatch.setattr(
            "moebatch.model.products.library_multiplies", lambda *_, known=by_library: known
        )
        out_NHO = torch.full((9, 3, 27), 7.0).to(dtype)
        products.by_head(x_NHI, weights_HIO, out_NHO[..., 2:22])
        found = out_NHO[..., 2:22].double()
        assert bool(((found - wanted).abs() <= 1e-5 + wanted.abs() * 2 * HALF_UNIT[dtype]).all())
        assert bool((out_NHO[..., :2] == 7).all()) and bool((out_NHO[..., 22:] == 7).all())
        assert bool(done) == by_library


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows, part_outputs", [(0, 5), (1, 70), (9, 33), (40, 64)])
def test_outputs_that_lie_in_parts_are_those_of_one_product_each(
    name: InstructionSet, dtype: torch.dtype, num_rows: int, part_outputs: int
) -> None:
    products = Products(CPU, dtype, kernels=kernels_of(name))
    x_NI = noise(1, num_rows, 60).to(dtype)[:, 3:53]
    weights_POI = noise(2, 5, part_outputs, 50).to(dtype)
    room = torch.full((num_rows, 5, part_outputs + 7), 7.0).to(dtype)
    products.in_parts(x_NI, weights_POI, room[..., 2 : part_outputs + 2])
    wanted = room.clone()
    for part, weight_OI in enumerate(weights_POI):
        products.linear(x_NI, weight_OI, None, wanted[:, part, 2 : part_outputs + 2])
    assert torch.equal(room, wanted)
    assert bool((room[..., :2] == 7).all()) and bool((room[..., part_outputs + 2 :] == 7).all())
    assert not num_rows or not torch.equal(room, torch.full_like(room, 7.0))


def test_torch_has_only_loops_for_bfloat16_below_avx512() -> None:
    by_dtype = {
        dtype: {name for name in INSTRUCTION_SETS if library_multiplies(dtype, name)}
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert by_dtype == {
        "float32": {*INSTRUCTION_SETS},
        "bfloat16": {"amx", "avx512bf16", "avx512"},
        "float16": {"amx"},
    }
