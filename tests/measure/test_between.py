"""What lies between passes, measured with the engine itself."""

from collections.abc import Callable

import pytest
import torch

from moebatch.engine.passes.broken import BrokenRows
from moebatch.engine.passes.passes import PassInput
from moebatch.measure import between
from moebatch.measure.between import between_passes
from moebatch.measure.timer import CacheSweep


def test_both_figures_are_times() -> None:
    found = between_passes(torch.device("cpu"), torch.zeros(2**20, dtype=torch.bfloat16))
    assert 0 <= found.pass_s < 10
    assert 0 <= found.row_s < 1
    assert found.pass_s + found.row_s > 0


def test_memory_that_is_gone_through_is_not_copied() -> None:
    """A sum of bytes would be one of eight times as many, made anew in each pass."""
    swept = torch.zeros(2**20 + 3, dtype=torch.uint8)
    with torch.profiler.profile() as profiler:
        between_passes(torch.device("cpu"), swept)
    sums = [each for each in profiler.events() or () if each.name == "aten::sum"]
    assert len(sums) == 2 * between._ANSWER
    assert "aten::to" not in {part.name for each in sums for part in each.cpu_children}


def test_every_sequence_is_in_each_pass_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All begin in one pass, and none ends before the last."""
    num_tokens: list[int] = []

    class Counting(between._BarePasses):
        def _run_layers(self, given: PassInput, layer_begins: Callable[[int], None]) -> BrokenRows:
            num_tokens.append(len(given.x_TD))
            return super()._run_layers(given, layer_begins)

    monkeypatch.setattr(between, "_BarePasses", Counting)
    between._usual_s(7, torch.device("cpu"), CacheSweep(torch.zeros(8)))
    assert num_tokens == [7 * between._PROMPT, *[7] * (between._ANSWER - 1)]
