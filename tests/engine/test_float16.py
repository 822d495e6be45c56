"""A bfloat16 model on a GPU that has none: float16, into which experts are converted when read."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.spec import EngineSpec
from moebatch.model.native import loader
from moebatch.model.products import Products
from moebatch.spec.machine.hardware import Dtype
from moebatch.store.experts.dram import ExpertStore
from tests.engine.test_engine import TokenText, requests, tokens_of
from tests.engine.test_on_gpu import cuda
from tests.engine.test_schedules import EMULATED, emulated
from tests.model.oracle import greedy, load

Checkpoint = Callable[..., Path]


@pytest.fixture
def files(tiny_checkpoint: Checkpoint) -> ModelFiles:
    return open_model(tiny_checkpoint("mixtral", dtype="bfloat16"), "float16")


def tokens_with(
    files: ModelFiles, title: str, name: str, tmp_path: Path, device: Device | None = None
) -> list[tuple[int, ...]]:
    spec = EngineSpec(
        files=files,
        policy=replace(EMULATED[title], schedule=name),
        max_tokens=512,
        device=device or emulated(),
        scratch=tmp_path,
    )
    built: BuiltEngine = build_engine(spec, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    with closing(built), torch.inference_mode():
        rows = requests((1, 17, 40, 3, 33, 8), max_tokens=6)
        return tokens_of(sorted(built.engine.run(rows), key=lambda each: each.request.index))


@pytest.mark.parametrize("name", ["klotski", "cgopipe"])
@pytest.mark.parametrize("title", ["three levels", "CPU attention"])
def test_experts_that_were_converted_when_read_are_computed_as_they_are(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str, name: str
) -> None:
    monkeypatch.setattr(loader, "kernels", lambda: None)
    wanted = tokens_with(files, title, name, tmp_path)

    def refuse(self: Products, shape: tuple[int, ...]) -> None:
        raise AssertionError(f"a matrix of {shape} is converted")

    monkeypatch.setattr(Products, "_room", refuse)
    with pytest.raises(AssertionError, match="is converted"):
        tokens_with(files, title, name, tmp_path)
    assert tokens_with(files.read_as_computed, title, name, tmp_path) == wanted


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_number_is_converted(tiny_checkpoint: Checkpoint, family: str) -> None:
    """Whatever lies beside it in a piece."""
    folder = tiny_checkpoint(family, dtype="bfloat16")
    as_stored = open_model(folder, "bfloat16").expert_records()
    records = open_model(folder, "float16").read_as_computed.expert_records()
    stores = [ExpertStore(each, num_slots=0, resident=each) for each in (as_stored, records)]
    for store in stores:
        while (chunk := store.slots.next_chunk()) is not None:
            store.read(chunk)
            store.slots.finish_chunk(chunk)
    for key in records:
        for stored, converted in zip(*(store.tensors(key) for store in stores), strict=True):
            assert converted.dtype == torch.float16
            assert converted.equal(stored.half())
    for store in stores:
        store.close()


def test_nothing_is_converted_that_takes_other_bytes(tiny_checkpoint: Checkpoint) -> None:
    for stored, computed in (("float32", "float16"), ("bfloat16", "float32")):
        files = open_model(tiny_checkpoint("mixtral", dtype=stored), computed)  # type: ignore[arg-type]
        assert files.read_as_computed is files
    same = open_model(tiny_checkpoint("mixtral", dtype="float16"), "float16").read_as_computed
    assert not any(record.converts for record in same.expert_records().values())


WHERE = [
    pytest.param(emulated, id="emulated"),
    pytest.param(
        cuda,
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ],
    ),
]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("name", ["klotski", "cgopipe"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_give_mostly_the_tokens_of_transformers(
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
    device: Callable[[], Device],
    name: str,
    dtype: Dtype,
) -> None:
    """Rounding differs in the last bit, so a text may take another turn where two are close."""
    folder = tiny_checkpoint("mixtral", dtype=dtype)
    lengths = (1, 17, 40, 3, 33, 8)
    expected = [greedy(load(folder, dtype), row.prompt_tokens, 4)[0] for row in requests(lengths)]
    for title in ("three levels", "CPU attention", "GPU attention, cache in main memory"):
        found = tokens_with(open_model(folder, dtype), title, name, tmp_path, device())
        same = sum(list(a) == list(b[:4]) for a, b in zip(expected, found, strict=True))
        assert same >= 4, title
