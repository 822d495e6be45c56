"""Experts of few rows together, and kernels in Triton: the tokens of transformers all the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.layout.ladder import Ladder
from moebatch.model import decoder as decoders
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline
from tests.engine.test_engine import requests, tokens_of
from tests.engine.test_schedules import EMULATED, emulated, run
from tests.gpu_kernels import use_gpu_kernels

_TOGETHER = 3
_ON_GPU, _ON_CPU = "GPU attention, cache in main memory", "CPU attention"
BY_TORCH = [
    ("klotski", "mixtral", "three levels"),
    ("klotski", "mixtral", "everything on the GPU"),
    ("promoe", "deepseek_v3", _ON_GPU),
    ("prefetch_all", "mixtral", _ON_GPU),
    ("cgopipe", "mixtral", _ON_CPU),
]
IN_TRITON = [
    ("klotski", "qwen3_moe", _ON_GPU),
    ("klotski", "gpt_oss", _ON_GPU),
    ("cgopipe", "deepseek_v3", _ON_CPU),
]
"""Ten seconds each where they are interpreted."""
CASES = [(*case, False) for case in BY_TORCH] + [(*case, True) for case in IN_TRITON]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "family", "title", "in_triton"), CASES)
def test_experts_together_give_the_tokens_of_transformers(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    family: str,
    title: str,
    in_triton: bool,
) -> None:
    """Few of them together, so that many groups are made; each expert once a pass."""
    monkeypatch.setattr(Ladder, "most_together", _TOGETHER)
    if in_triton:
        use_gpu_kernels(monkeypatch)
    chosen = replace(EMULATED[title], schedule=name)
    folder, device = tiny_checkpoint(family), emulated()
    outcomes, built = run(folder, chosen, requests(), device=device, scratch=tmp_path)
    assert tokens_of(outcomes) == expected(family)
    assert built.recorder is not None
    sizes = group_sizes(built.recorder.timeline)
    assert not sizes or (max(sizes) == _TOGETHER and sum(sizes) > len(sizes))


def group_sizes(timeline: Timeline) -> list[int]:
    """Experts of each task that computes some; of a step and pass none is computed twice."""
    groups = [span.task for span in timeline.spans if span.task.kind is Kind.EXPERT]
    computed = [(task.step, expert) for task in groups for expert in task.experts]
    assert len(computed) == len(set(computed))
    return [len(task.experts) for task in groups]


def test_experts_of_many_rows_are_computed_alone(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use_gpu_kernels(monkeypatch)
    monkeypatch.setattr(decoders, "is_grouped", lambda num_rows: num_rows <= 2)
    chosen = replace(EMULATED["GPU attention, cache in main memory"], schedule="klotski")
    folder = tiny_checkpoint("mixtral")
    outcomes, _ = run(folder, chosen, requests(), device=emulated(), scratch=tmp_path)
    assert tokens_of(outcomes) == expected("mixtral")
