"""Stored weights decode to just the numbers that upstream's own code makes of them.

Upstream is compressed-tensors, and transformers' dequantisers of FP8 and MXFP4; modelopt cannot be
run here, and its dialect of NVFP4 is held against its formula.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import CheckpointError
from moebatch.formats.blocks import WHOLE, Blocks
from moebatch.formats.registry import configured_format, find_format
from moebatch.formats.weight_format import StoredPart, WeightFormat
from moebatch.formats.words import Words
from tests.quantised import KINDS

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
ROWS_APART = [kind for kind in KINDS if not kind.startswith(("gptq", "awq", "bnb"))]
"""Whose rows are kept apart."""
SHAPES = [(24, 40), (40, 24), (48, 64), (5, 16), (9, 96), (130, 257 + 31)]


def noise(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape[0], 1, generator=generator).exp()
    return torch.randn(shape, generator=generator) * spread


def named(name: str, suffix: str) -> str:
    return name.removesuffix(".weight") + suffix if suffix.startswith(".") else name + suffix


def found_in(
    tensors: dict[str, torch.Tensor], shape: tuple[int, ...], kind: str = ""
) -> WeightFormat:
    """By the tensors alone; only of a `kind` whose version they do not show with its config."""

    def look(name: str) -> StoredPart | None:
        if name not in tensors:
            return None
        return StoredPart(name, NAMES[tensors[name].dtype], tuple(tensors[name].shape))

    said = configured_format(KINDS[kind].config) if kind == "gptq-v2" else None
    stored = find_format("x.weight", shape, look, said)
    assert stored is not None
    assert stored.fits("x.weight", shape, look)
    return stored


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """As records bring it: without a type for exponents."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor.contiguous()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_upstream(kind: str, shape: tuple[int, int]) -> None:
    parts, expected = KINDS[kind].store(noise(shape))
    tensors = {named("x.weight", suffix): part for suffix, part in parts.items()}
    stored = found_in(tensors, shape, kind)
    out = torch.empty(shape)
    stored.decode([readable(tensors[p.name]) for p in stored.parts("x.weight", shape)], out)
    assert out.equal(expected)
    assert (out - noise(shape)).abs().mean() < 0.2 * noise(shape).abs().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_tensors_say_the_same(kind: str) -> None:
    shape = (48, 96)
    parts, _ = KINDS[kind].store(noise(shape))
    tensors = {named("x.weight", suffix): part for suffix, part in parts.items()}
    stored, said = found_in(tensors, shape), configured_format(KINDS[kind].config)
    assert said is not None
    assert str(stored) == str(said) == KINDS[kind].format
    assert said.num_bytes(shape) == stored.num_bytes(shape)
    planned = {part.name: part for part in stored.parts("x.weight", shape)}
    assert planned.keys() == {name for name in tensors if not name.endswith("_shape")}
    for name, part in planned.items():
        assert part.num_bytes == tensors[name].nbytes or part.is_text


@pytest.mark.parametrize(
    ("packing", "name"),
    [("auto_gptq", "gptq int4"), ("gptq", "gptq int4"), ("auto_awq", "awq int4")],
)
def test_auto_round_packs_as_others_do(packing: str, name: str) -> None:
    said = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": 4}
    stored = configured_format(said | {"group_size": -1})
    assert stored is not None and (stored.name, "a scale for each row" in str(stored)) == (
        name,
        True,
    )


@pytest.mark.parametrize(("kind", "is_ordered"), [("gptq", False), ("gptq-act-order", True)])
def test_an_order_that_is_announced_is_priced_by_itself(kind: str, is_ordered: bool) -> None:
    """Its tensors are those of one that is none; their contents are read when the job runs."""
    shape = (48, 96)
    parts, _ = KINDS[kind].store(noise(shape))
    tensors = {named("x.weight", suffix): part for suffix, part in parts.items()}

    def look(name: str) -> StoredPart | None:
        if name not in tensors:
            return None
        return StoredPart(name, NAMES[tensors[name].dtype], tuple(tensors[name].shape))

    said = configured_format(KINDS[kind].config)
    assert isinstance(said, Words)
    for likely in (said, replace(said, group=7)):
        stored = find_format("x.weight", shape, look, likely)
        assert stored is not None and stored.name == "gptq int4"
        assert stored.measured_as == ("gptq int4, ordered" if is_ordered else "gptq int4")


PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}},
    },
}


def packed_words(scale_dtype: str, **others: StoredPart) -> Callable[[str], StoredPart | None]:
    """Finds the parts of a packed weight, [8, 64], and others beside them."""
    parts = {
        "x.weight_packed": StoredPart("x.weight_packed", "I32", (8, 8)),
        "x.weight_scale": StoredPart("x.weight_scale", scale_dtype, (8, 2)),
        **{f"x.{name}": part for name, part in others.items()},
    }
    return parts.get


@pytest.mark.parametrize("scale_dtype", ["BF16", "F16"])
def test_words_in_an_order_of_their_own_are_refused_whatever_the_config_says(
    scale_dtype: str,
) -> None:
    look = packed_words(scale_dtype, weight_g_idx=StoredPart("x.weight_g_idx", "I32", (64,)))
    for likely in (None, configured_format(PACKED)):
        with pytest.raises(CheckpointError, match="quantise the model without actorder"):
            find_format("x.weight", (8, 64), look, likely)


@pytest.mark.parametrize("scale_dtype", ["BF16", "F16"])
def test_zero_points_of_one_module_count_though_others_have_none(scale_dtype: str) -> None:
    zeros = StoredPart("x.weight_zero_point", "I32", (1, 2))
    look = packed_words(scale_dtype, weight_zero_point=zeros)
    stored = find_format("x.weight", (8, 64), look, configured_format(PACKED))
    assert str(stored) == "packed int4, groups of 32, with zero points"


def test_what_a_run_would_have_to_do_to_the_input_of_weights_is_refused() -> None:
    rotated = {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}
    with pytest.raises(ValueError, match="transform_config"):
        configured_format({**PACKED, "transform_config": rotated})
    assert configured_format({**PACKED, "transform_config": {}}) is not None
    scales = StoredPart("x.pre_quant_scale", "BF16", (64,))
    with pytest.raises(CheckpointError, match=r"x\.pre_quant_scale"):
        find_format("x.weight", (8, 64), packed_words("BF16", pre_quant_scale=scales))


def test_a_group_of_shared_experts_says_nothing_of_the_others() -> None:
    shared = {
        "targets": ["re:.*self_attn.*", "re:.*shared_expert.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "format": "float-quantized",
    }
    routed = {"targets": ["re:.*mlp.experts.*"], **PACKED["config_groups"]["group_0"]}
    groups = {"group_0": shared, "group_1": routed}
    assert str(configured_format({**PACKED, "config_groups": groups})) == (
        "packed int4, groups of 32"
    )


def test_zero_points_beside_whole_bytes_are_not_taken_for_none() -> None:
    parts = {
        name: StoredPart(name, dtype, shape)
        for name, dtype, shape in [
            ("x.weight", "I8", (8, 16)),
            ("x.weight_scale", "BF16", (8, 1)),
            ("x.weight_zero_point", "I8", (8, 1)),
        ]
    }
    assert find_format("x.weight", (8, 16), parts.get) is None
    del parts["x.weight_zero_point"]
    assert find_format("x.weight", (8, 16), parts.get) is not None


def test_large_weights_show_the_size_of_blocks() -> None:
    """DeepSeek's latent projections of 576 rows have five rows of scales."""
    assert Blocks.found((576, 7168), (5, 56)) == Blocks(128, 128)
    assert Blocks.found((4096, 7168), (4096, 224)) == Blocks(1, 32)
    assert Blocks.found((4096, 7168), (4096, 1)) == Blocks(1, WHOLE)
    assert Blocks.found((4096, 96), (4096, 8)) == Blocks(1, 12)
    assert Blocks.found((64, 64), (3, 7)) is None
    assert Blocks.found((64, 0), (1, 0)) is None


SIZES = st.integers(1, 700)
WIDTHS = st.sampled_from([1, 16, 32, 64, 128, 256, WHOLE])


@given(shape=st.tuples(SIZES, SIZES), rows=WIDTHS, columns=WIDTHS, stack=st.integers(0, 3))
def test_blocks_that_are_found_have_the_scales_that_are_there(
    shape: tuple[int, int], rows: int, columns: int, stack: int
) -> None:
    size = (stack, *shape) if stack else shape
    grid = Blocks(rows, columns).grid(size)
    found = Blocks.found(size, grid)
    if rows == 1 or columns != 1:  # columns by themselves are in no format
        assert found is not None and found.grid(size) == grid


@pytest.mark.parametrize("kind", ROWS_APART)
def test_rows_of_a_weight_decode_as_in_the_whole(kind: str) -> None:
    """Gate and up in one tensor, with a cut through blocks of scales."""
    shape = (80, 48)
    parts, expected = KINDS[kind].store(noise(shape))
    tensors = {named("x.weight", suffix): part for suffix, part in parts.items()}
    stored = found_in(tensors, shape)
    read = [readable(tensors[part.name]) for part in stored.parts("x.weight", shape)]
    for rows in (range(40), range(40, 80)):
        out = torch.empty(40, 48)
        stored.decode(stored.rows(read, rows, shape), out)
        assert out.equal(expected[rows.start : rows.stop])
