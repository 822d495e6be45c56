"""What experts are written as, against the code of those whose formats they are.

Shape letters: O rows (outputs), I columns (inputs).
"""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from moebatch.errors import CheckpointError, ConfigError
from moebatch.packing.encodings import Encoding, Fp8Blocks, Int4, Int8, PackedIntegers, group_of
from moebatch.spec.model.models import load_model
from moebatch.spec.model.named_formats import named_format, why_unpacked, written_formats

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(rows: int = 70, columns: int = 192) -> Tensor:
    """Like those of a model, with outliers, a row of zeros and one of tiny numbers."""
    weight_OI = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    weight_OI[5, 7], weight_OI[9, 90] = 0.9, -1.3
    weight_OI[3] = 0.0
    weight_OI[4] *= 1e-3
    return weight_OI


def decoded(encoding: Encoding, weight_OI: Tensor) -> Tensor:
    return encoding.decoded(encoding.encode(weight_OI), weight_OI.shape)


def relative_error(encoding: Encoding, weight_OI: Tensor) -> float:
    difference = decoded(encoding, weight_OI) - weight_OI
    return float(difference.norm() / weight_OI.norm())


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("make", [lambda d: Int4(64, d), lambda d: Int4(32, d), Int8])
def test_compressed_tensors_reads_integers_as_we_think_it_does(
    make: Any, dtype: torch.dtype
) -> None:
    encoding: PackedIntegers = make(dtype)
    weight_OI = weights()
    encoded = encoding.encode(weight_OI)
    parts = encoding.parts("w", (70, 192))
    assert [part.shape for part in parts] == [tuple(t.shape) for t in encoded]
    state = {
        "weight_packed": encoded[0],
        "weight_scale": encoded[1],
        "weight_shape": next(iter(encoding.constants("w", (70, 192)).values())),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**encoding.scheme))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    read = compressor.decompress(state, scheme)["weight"]
    assert read.dtype == dtype
    assert torch.equal(read.float(), encoding.decoded(encoded, weight_OI.shape))


def test_transformers_reads_fp8_as_we_think_it_does() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    encoded = Fp8Blocks().encode(weights(256, 384))
    assert [tuple(tensor.shape) for tensor in encoded] == [(256, 384), (2, 3)]
    read = Fp8Dequantize(None)._dequantize_one(*encoded, torch.float32)
    assert torch.equal(read, Fp8Blocks().decoded(encoded, (256, 384)))


@pytest.mark.parametrize(("rows", "columns"), [(70, 192), (130, 100), (128, 128), (1, 300)])
def test_fp8_keeps_blocks_that_end_early(rows: int, columns: int) -> None:
    weight_OI = weights(max(rows, 10), columns)[:rows]
    encoded = Fp8Blocks().encode(weight_OI)
    expected = [part.shape for part in Fp8Blocks().parts("w", (rows, columns))]
    assert [tuple(tensor.shape) for tensor in encoded] == expected
    # Half a step of e4m3, or of its smallest numbers.
    wide = encoded[1].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    bound = (weight_OI.abs() / 16).maximum(wide[:, :columns] * 2**-10)
    assert bool(((decoded(Fp8Blocks(), weight_OI) - weight_OI).abs() <= bound * 1.001).all())


@pytest.mark.parametrize("encoding", [Int4(32, torch.bfloat16), Int8(torch.bfloat16), Fp8Blocks()])
def test_portions_of_rows_come_to_the_same(encoding: Encoding) -> None:
    weight_OI = weights(300, 192)
    whole = encoding.encode(weight_OI)
    step = encoding.rows * 2
    portions = [encoding.encode(rows) for rows in torch.split(weight_OI, step)]
    for tensor, pieces in zip(whole, zip(*portions, strict=True), strict=True):
        assert torch.equal(tensor.view(torch.uint8), torch.cat(pieces).view(torch.uint8))


def test_four_bits_are_nearer_than_rounding_to_the_largest_number() -> None:
    weight_OI = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    groups = weight_OI.view(64, -1, 64)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    plain = ((groups / scale).round() * scale - groups).norm() / groups.norm()
    assert relative_error(Int4(64, torch.bfloat16), weight_OI) < 0.85 * plain


def test_eight_bits_lose_less_than_a_hundredth() -> None:
    weight_OI = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    assert relative_error(Int8(torch.bfloat16), weight_OI) < 0.01
    assert relative_error(Fp8Blocks(), weight_OI) < 0.03


def test_plans_suppose_what_is_written() -> None:
    shape = load_model("qwen3-30b-a3b").shape
    encodings = (Int4(64, torch.bfloat16), Int8(torch.bfloat16), Fp8Blocks())
    assert written_formats(shape) == {each.name: each.format for each in encodings}
    for each in encodings:
        assert named_format(each.name, shape) == named_format(each.format.name, shape)


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "llama-4-scout", "gpt-oss-20b"])
def test_plans_do_not_suppose_what_is_refused(name: str) -> None:
    shape = load_model(name).shape
    assert why_unpacked(shape) and not written_formats(shape)
    with pytest.raises(ConfigError, match=r"int4.*; moebatch pack refuses this model"):
        named_format("int4", shape)


def test_groups_are_the_widest_that_fit() -> None:
    assert group_of([4096, 14336], None) == 64
    assert group_of([128, 96], None) == 32
    assert group_of([128, 128], 32) == 32
    with pytest.raises(CheckpointError, match=r"of 32; here they are 40, 128; choose --to"):
        group_of([128, 40], None)
    with pytest.raises(CheckpointError, match=r"multiples of 64; .* choose another --group"):
        group_of([128, 96], 64)


@pytest.mark.parametrize("largest", [2e-6, 8e-6, 1.1e-5, 1e-4])
def test_small_rows_in_float16_survive_eight_bits(largest: float) -> None:
    weight_OI = torch.linspace(-largest, largest, 64).repeat(3, 1).half().float()
    decoded_OI = decoded(Int8(torch.float16), weight_OI)
    step = max(2 * largest / 127, 2**-24)
    torch.testing.assert_close(decoded_OI, weight_OI, rtol=0, atol=0.51 * step)
