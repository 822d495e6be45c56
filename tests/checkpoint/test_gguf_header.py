"""GGUF files: what is damaged, hostile or not supported is named."""

import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError
from moebatch.formats.ggml import BLOCK_TYPES, GgmlRows, decoded_types, ggml_types
from moebatch.rows.tokenizer_files import load_tokenizer
from tests.gguf_models import write_gguf

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_local_experts": 2,
    "intermediate_size": 64,
    "tokenizer": False,
}
DECODED = [
    kind
    for kind in gguf.quants._type_traits
    if kind.name not in ("F32", "F16", "BF16") and kind in gguf.GGML_QUANT_SIZES
]


@pytest.fixture
def written(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def write(kind: str = "Q8_0", **options: Any) -> Path:
        plain = tiny_checkpoint("mixtral", **SIZES)
        return write_gguf(plain, tmp_path / "model", lambda name: kind, **options) / "model.gguf"

    return write


@pytest.fixture(scope="module")
def bytes_of(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> bytes:
    folder = tmp_path_factory.mktemp("gguf") / "model"
    write_gguf(tiny_checkpoint("mixtral", **SIZES), folder, lambda name: "Q8_0")
    return (folder / "model.gguf").read_bytes()


@pytest.fixture
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], Path]]:
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"

    def write(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    yield write


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_gguf_package(kind: gguf.GGMLQuantizationType) -> None:
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (5, 3 * block)
    rows = np.random.default_rng(0).integers(0, 256, (5, 3 * num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    stored = GgmlRows(type=kind.name, block=block, block_bytes=num_bytes)
    (part,) = stored.parts("x", shape)
    assert part.shape == rows.shape
    out = torch.empty(shape)
    stored.decode([torch.from_numpy(rows)], out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_every_type_of_blocks_that_is_decoded_has_a_price() -> None:
    assert {each.type for each in decoded_types()} == {*BLOCK_TYPES} <= {k.name for k in DECODED}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_files_that_end_early_are_refused(
    share: float, bytes_of: bytes, damaged: Callable[[bytes], Path]
) -> None:
    path = damaged(bytes_of[: int(share * len(bytes_of))])
    with pytest.raises(CheckpointError, match="truncated"):
        open_model(path, "auto")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 4000), value=st.integers(0, 255))
def test_any_byte_of_a_header_may_be_wrong(
    place: int, value: int, bytes_of: bytes, damaged: Callable[[bytes], Path]
) -> None:
    path = damaged(bytes_of[:place] + bytes([value]) + bytes_of[place + 1 :])
    try:
        open_model(path, "auto")
    except CheckpointError as error:
        assert str(path.parent) in str(error)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"GGUF\3", b"GGML\3", "does not start with GGUF"),
        (b"GGUF\3", b"version https://git-lfs", "is a pointer of Git LFS"),
        (b"GGUF\3", b"GGUF\1", "version 1 of GGUF; 2 and 3 are read"),
        (b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", "architecture 'mamba' of GGUF is"),
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", "'blk.0.attn_q.weight' occurs twice"),
        (b"llama.rope.freq_base", b"llama.context_length", "'llama.context_length' occurs twice"),
        (b"blk.0.attn_v.weight", b"blk.0.attn_w.weight", "tensor blk.0.attn_v.weight is missing"),
        (b"llama.expert_count", b"llama.expert_kount", "no layer has experts"),
        (b"llama.embedding_length", b"llama.embedding_lemgth", "hidden_size: expected a whole"),
        (b"token_embd.weight", b"token_embd.weighs", "tensor token_embd.weight is missing"),
    ],
)
def test_what_is_wrong_is_named(
    before: bytes, after: bytes, message: str, bytes_of: bytes, damaged: Callable[[bytes], Path]
) -> None:
    assert before in bytes_of
    path = damaged(bytes_of.replace(before, after, 1))
    with pytest.raises(CheckpointError) as caught:
        open_model(path, "auto")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "positions are scaled ('longrope')"),
        ({"attention.head_count": 3}, "num_attention_heads (3) must"),
        ({"attention.head_count": 0}, "llama.attention.head_count is 0, expected a number"),
        ({"attention.head_count": 8}, "do not match the metadata:"),
        ({"embedding_length": 48}, "do not match the metadata:"),
        ({"expert_gating_func": 2}, "gates score in way 2 of GGUF (expert_gating_func), those of"),
        ({"expert_used_count": 7}, "num_experts_per_tok (7) is more than num_local_experts (2)"),
    ],
)
def test_metadata_that_make_no_sense_are_named(
    metadata: dict[str, Any], message: str, written: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model(written(metadata=metadata), "auto")
    assert message in str(caught.value)


def test_lists_are_kept_up_to_a_limit(damaged: Callable[[bytes], Path]) -> None:
    """Those of a hostile file would take many times its size."""
    keys = [bytes([65 + number]) for number in range(20)]
    lists = [struct.pack("<Q1sIIQ", 1, key, 9, 0, 2**16) + bytes(2**16) for key in keys]
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(lists)) + b"".join(lists)
    with pytest.raises(CheckpointError, match="lists have more than 1048576 numbers"):
        open_model(damaged(content), "auto")


def test_tensors_have_a_size_that_can_be(damaged: Callable[[bytes], Path]) -> None:
    tensor = struct.pack("<Q1sIqqIQ", 1, b"t", 2, -1, 4, 0, 0)
    why = r"'t' of shape \[4, 18446744073709551615\] has more numbers than a file can hold"
    with pytest.raises(CheckpointError, match=why):
        open_model(damaged(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor), "auto")


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("rope_factors_long", np.ones(4, np.float32), "scaled ('rope_factors_long.weight')"),
        ("rope_freqs", np.ones(4, np.float16), "expected 4 numbers in F32, got [4] in F16"),
        ("rope_freqs", np.ones(1, np.float32), "expected 4 numbers in F32, got [1] in F32"),
        ("rope_freqs", np.ones((2, 2), np.float32), "expected 4 numbers in F32, got [2, 2] in F32"),
        ("rope_freqs", np.zeros(4, np.float32), "scales positions by what is not above 0"),
        ("rope_freqs", np.full(4, np.nan, np.float32), "scales positions by what is not above 0"),
    ],
)
def test_positions_are_not_scaled_by_a_tensor_that_is_not_read(
    name: str, numbers: Any, message: str, written: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model(written(factors={f"{name}.weight": numbers}), "auto")
    assert message in str(caught.value)


def test_a_folder_with_two_models_says_so(written: Callable[..., Path]) -> None:
    path = written()
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"several models \('model.gguf', 'other.gguf'\)"):
        open_model(path.parent, "auto")
    assert open_model(path, "auto").checkpoint.is_gguf


def test_the_package_is_asked_for(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written()
    ggml_types.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'moebatch\[gguf\]'"):
        open_model(path, "auto")


def test_a_tokenizer_has_to_lie_beside_it(written: Callable[..., Path]) -> None:
    path = written()
    with pytest.raises(CheckpointError, match=r"put tokenizer\.json and .* there"):
        load_tokenizer(path.parent, vocab_size=320, gguf=path)
