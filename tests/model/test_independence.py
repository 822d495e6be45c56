"""How the work is cut, grouped and placed never changes what comes out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moebatch.layout.scratch import Limits
from moebatch.model.scratch import Frame, Scratch
from tests.model import oracle
from tests.model.driver import Driver, Seq

NUM_NEW = 8
Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoint) -> Path:
    """Shared expert, dense layer, QKV bias and a window in every other layer: much to go wrong."""
    return tiny_checkpoint(
        "qwen2_moe",
        num_hidden_layers=4,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=20,
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Seq]:
    """Each prompt on its own, whole."""
    return [Driver(folder).generate([prompt], NUM_NEW)[0] for prompt in oracle.prompts()]


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 100])
def test_micro_batches(micro_batch: int, folder: Path, alone: list[Seq]) -> None:
    seqs = Driver(folder).generate(oracle.prompts(), NUM_NEW, micro_batch=micro_batch)
    assert_same(seqs, alone)


@pytest.mark.few(2)
@pytest.mark.parametrize("slice_tokens", [1, 2, 5, 33])
def test_slices_of_prompts(slice_tokens: int, folder: Path, alone: list[Seq]) -> None:
    seqs = Driver(folder).generate(oracle.prompts(), NUM_NEW, slice_tokens=slice_tokens)
    assert_same(seqs, alone)


@pytest.mark.parametrize("span_tokens", [1, 6, 50])
@pytest.mark.parametrize("micro_batch", [1, 100])
def test_slices_cut_into_several_spans(
    span_tokens: int, micro_batch: int, folder: Path, alone: list[Seq]
) -> None:
    """In the same pass, in one micro-batch or in several."""
    seqs = Driver(folder).generate(
        oracle.prompts(), NUM_NEW, span_tokens=span_tokens, micro_batch=micro_batch
    )
    assert_same(seqs, alone)


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_of_the_cache(shuffled: bool, folder: Path, alone: list[Seq]) -> None:
    seqs = Driver(folder).generate(
        oracle.prompts(), NUM_NEW, slice_tokens=9, stagger=1, shuffled=shuffled
    )
    assert_same(seqs, alone)


@pytest.mark.few(4)
@pytest.mark.parametrize("expert_rows", [1, 7, 64, 2048])
@pytest.mark.parametrize("gather_rows", [1, 50, 100_000])
def test_limits(expert_rows: int, gather_rows: int, folder: Path, alone: list[Seq]) -> None:
    limits = Limits(
        pass_tokens=159,
        micro_batch_tokens=159,
        context_tokens=108,
        gather_rows=gather_rows,
        expert_rows=expert_rows,
    )
    assert_same(Driver(folder, limits=limits).generate(oracle.prompts(), NUM_NEW), alone)


def test_order_of_sequences(folder: Path, alone: list[Seq]) -> None:
    seqs = Driver(folder).generate(oracle.prompts()[::-1], NUM_NEW, slice_tokens=11)
    assert_same(seqs[::-1], alone)


def test_padding_rows_are_never_looked_at(
    folder: Path, alone: list[Seq], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all of the scratch, before every step, reaches no result."""
    monkeypatch.setattr(Scratch, "frame", lambda self: Frame(self.buffer.fill_(torch.nan)))
    assert_same(Driver(folder).generate(oracle.prompts(), NUM_NEW, slice_tokens=30), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_of_another_dtype(dtype: torch.dtype, folder: Path, alone: list[Seq]) -> None:
    driver = Driver(folder)
    driver.cached = [tuple(part.to(dtype) for part in parts) for parts in driver.cached]
    seqs = driver.generate(oracle.prompts(), 1, slice_tokens=8)
    atol = 1e-3 if dtype == torch.float32 else 1.0
    for seq, want in zip(seqs, alone, strict=True):
        torch.testing.assert_close(seq.logits[0], want.logits[0], rtol=0, atol=atol)


def assert_same(seqs: list[Seq], wanted: list[Seq]) -> None:
    for seq, want in zip(seqs, wanted, strict=True):
        assert seq.prompt == want.prompt
        assert seq.answer == want.answer
        torch.testing.assert_close(seq.logits, want.logits, rtol=1e-3, atol=1e-3)
