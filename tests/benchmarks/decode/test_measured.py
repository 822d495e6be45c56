"""The decoding benchmark on a tiny model: riders come in every second pass, all together."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.decode.__main__ import report
from tests.benchmarks.decode.measured import measured
from tests.benchmarks.decode.passes import Pass, steady
from tests.benchmarks.decode.task import Task

PROFILE = Path(__file__).parents[3] / "policies" / "hardware" / "generic-cpu.yaml"


def test_passes_with_and_without_riders_take_turns(tiny_checkpoint: Callable[..., Path]) -> None:
    task = Task(sequences=64, ride=256, num_passes=3)
    found = measured(tiny_checkpoint(), PROFILE, 2**31, task)
    assert len(steady(found.passes, 64)) >= 3
    assert len(steady(found.passes, 64, 256)) >= 3


def test_the_report_compares_medians() -> None:
    def one(prompt_tokens: int, seconds: float) -> Pass:
        return Pass(decoding=64, prompt_tokens=prompt_tokens, seconds=seconds)

    passes = [one(0, 9.0), one(0, 9.0), one(0, 2.0), one(128, 3.0)]
    alone, riding = report(passes, 64, 128, 2e9)
    assert "2.00 s a pass, 32 tok/s" in alone
    assert "3.00 s a pass, +50.0%" in riding


def test_a_run_without_steady_passes_says_so() -> None:
    assert report([], 64, 0, 2e9) == ["64 sequences: no pass was steady"]


@pytest.mark.parametrize("sequences", [16, 512, 1024])
def test_tasks_leave_room_for_all_riders(sequences: int) -> None:
    task = Task(sequences=sequences, ride=1024, num_passes=4)
    assert task.tokens_per_pass >= sequences + 1024
