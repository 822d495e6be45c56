"""Perplexity by the engine of jobs, against transformers."""

from collections.abc import Callable
from math import exp
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moebatch.calibration.perplexity import TextOrder, measure_perplexity
from moebatch.errors import InputError
from tests.model.oracle import load


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The river counts {i} of the lamps, {i * i}.\n" for i in range(60)))
    return path


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_it_is_that_of_transformers(
    tiny_checkpoint: Callable[..., Path], text: Path, family: str
) -> None:
    folder = tiny_checkpoint(family)
    order = TextOrder(path=text, num_tokens=900, dram_bytes=None)
    found = measure_perplexity(folder, order, print)
    from transformers import AutoTokenizer

    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text.read_text()).input_ids[:900])
    model, losses = load(folder), []
    with torch.inference_mode():
        for piece in tokens.split(511):  # one of 512 positions is for an answer
            logits = model(piece[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, piece[1:], reduction="none"))
    expected = torch.cat(losses)
    assert found.num_tokens == len(expected) == 898
    assert found.value == pytest.approx(exp(float(expected.mean())), rel=1e-5)


def test_a_text_without_two_tokens_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("T")
    with pytest.raises(InputError, match="has no two tokens in a row"):
        measure_perplexity(
            tiny_checkpoint("mixtral"), TextOrder(path=path, num_tokens=9, dram_bytes=None), print
        )
