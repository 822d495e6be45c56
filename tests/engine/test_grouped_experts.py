"""Experts of few rows together, and kernels in Triton: the tokens of transformers all the same."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moebatch.layout.ladder import Ladder
from moebatch.model.gpu import experts
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.scratch import Frame
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.policy.policy import Policy
from moebatch.spec.request import Request
from tests.engine.test_engine import NEW_TOKENS, policy, requests, tokens_of
from tests.engine.test_schedules import EMULATED, emulated, run
from tests.gpu_kernels import use_gpu_kernels
from tests.model.oracle import greedy_answers, load
from tests.quantised import decoded_beside, write_quantised

_TOGETHER, _SHORT = 3, 12
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
    ("klotski", "nemotron_h", _ON_GPU),
    ("klotski", "mimo_v2_flash", _ON_GPU),
    ("klotski", "longcat_flash", _ON_GPU),
    ("klotski", "step3p7", _ON_GPU),
    ("klotski", "laguna", _ON_GPU),
    ("klotski", "deepseek_v4", _ON_GPU),
    ("klotski", "hy_v4", _ON_GPU),
    ("klotski", "cohere2_moe", _ON_GPU),
    ("cgopipe", "deepseek_v3", _ON_CPU),
]
"""Interpreted, where there is no GPU: a millisecond for each row of each kernel."""
_ALWAYS = {"norm", "rotate", "choose", "group", "add"}
_TOGETHER_AND_SHARED = {"experts_in", "experts_out", "gate_rows"}
KERNELS = {
    "qwen3_moe": {*_ALWAYS, "attend_single", "experts_in", "experts_out"},
    "gpt_oss": {*_ALWAYS, "attend_single", "gate_rows", "place"},
    "nemotron_h": {*_ALWAYS, "attend_single", "experts_in", "experts_out"} - {"rotate"},
    "mimo_v2_flash": {*_ALWAYS, "attend_single", *_TOGETHER_AND_SHARED},
    "longcat_flash": {*_ALWAYS, *_TOGETHER_AND_SHARED},
    "step3p7": {*_ALWAYS, "attend_single", *_TOGETHER_AND_SHARED},
    "laguna": {*_ALWAYS, "attend_single", *_TOGETHER_AND_SHARED} - {"choose", "group"},
    "deepseek_v4": {"norm", "add", *_TOGETHER_AND_SHARED},
    "hy_v4": {*_ALWAYS, *_TOGETHER_AND_SHARED},
    "cohere2_moe": {*_ALWAYS, "attend_single", *_TOGETHER_AND_SHARED} - {"norm"},
    "deepseek_v3": {*_ALWAYS, *_TOGETHER_AND_SHARED},
}
"""That are launched: experts of gpt-oss whose matrices lie across are computed one by one, latents
are attended by torch, and states in main memory are the C kernel's."""
IN_CODES = [
    ("mxfp4", "gpt_oss", {}),
    ("int4-zeros", "qwen3_moe", {"moe_intermediate_size": 32}),
    ("fp8", "mixtral", {}),
    ("packed-nvfp4", "mixtral", {"intermediate_size": 64}),
    ("bnb-nf4", "mixtral", {"hidden_size": 64, "intermediate_size": 64}),
]
LEFT_TO_TORCH = [("gptq", "mixtral", {})]
"""Codes that lie across."""
CASES = [(*case, False) for case in BY_TORCH] + [(*case, True) for case in IN_TRITON]


@pytest.mark.few(2)
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
    monkeypatch.setattr(Ladder, "most_together", lambda ladder, policy: _TOGETHER)
    launched = use_gpu_kernels(monkeypatch) if in_triton else Counter()
    chosen = replace(EMULATED[title], schedule=name)
    folder, device = tiny_checkpoint(family), emulated()
    rows = short_requests() if in_triton else requests()
    outcomes, built = run(folder, chosen, rows, device=device, scratch=tmp_path)
    assert tokens_of(outcomes) == [expected(family)[row.index] for row in rows]
    assert built.recorder is not None
    used = {kernel for kernel, count in launched.items() if count}
    assert used == (KERNELS[family] if in_triton else set())
    sizes = group_sizes(built.recorder.timeline)
    assert not sizes or (max(sizes) == _TOGETHER and sum(sizes) > len(sizes))


@pytest.mark.few(1, kind=("mxfp4",))
@pytest.mark.parametrize(("kind", "family", "sizes"), [*IN_CODES, *LEFT_TO_TORCH])
def test_experts_in_codes_give_the_tokens_of_their_decoded_weights(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    family: str,
    sizes: Mapping[str, int],
) -> None:
    """Decoded by the kernels, in tasks of several; or by torch, one by one."""
    plain = tiny_checkpoint(family, num_hidden_layers=2, **sizes)
    folder = write_quantised(plain, kind, tmp_path / kind)
    model, rows = load(decoded_beside(folder)), requests((1, 12, 7))
    expected = greedy_answers(model, rows, NEW_TOKENS)
    launched = use_gpu_kernels(monkeypatch)
    monkeypatch.setattr(Ladder, "most_together", lambda ladder, policy: _TOGETHER)
    chosen = replace(EMULATED[_ON_GPU], schedule="klotski")
    outcomes, built = run(folder, chosen, rows, scratch=tmp_path)
    assert tokens_of(outcomes) == expected
    is_taken = (kind, family, sizes) in IN_CODES
    experts = {"experts_in", "experts_out"} if is_taken else {"gate_rows", "place"}
    assert set(launched) == {*_ALWAYS, "attend_single", *experts}
    assert built.recorder is not None and max(group_sizes(built.recorder.timeline)) == _TOGETHER


def short_requests() -> list[Request]:
    """Of the usual ones those with few tokens."""
    return [row for row in requests() if len(row.prompt_tokens) <= _SHORT]


def group_sizes(timeline: Timeline) -> list[int]:
    """Experts of each task that computes some; of a step and pass none is computed twice."""
    groups = [span.task for span in timeline.spans if span.task.kind is Kind.EXPERT]
    computed = [(task.step, expert) for task in groups for expert in task.experts]
    assert len(computed) == len(set(computed))
    return [len(task.experts) for task in groups]


@pytest.mark.exhaustive  # Triton's interpreter takes five seconds
def test_experts_of_many_rows_are_computed_alone(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    launched, counts = use_gpu_kernels(monkeypatch), set[int]()
    run_group = GroupedExperts.run

    def grouped(self: GroupedExperts, frame: Frame, group: Any, *others: Any, **room: Any) -> None:
        counts.update(len(each.tokens.rows_M) for each in group)
        run_group(self, frame, group, *others, **room)

    monkeypatch.setattr(GroupedExperts, "run", grouped)
    monkeypatch.setattr(experts, "is_grouped", lambda num_rows: num_rows <= 2)
    chosen = replace(EMULATED["GPU attention, cache in main memory"], schedule="klotski")
    folder = tiny_checkpoint("mixtral")
    rows = short_requests()
    outcomes, _ = run(folder, chosen, rows, scratch=tmp_path)
    assert tokens_of(outcomes) == [expected("mixtral")[row.index] for row in rows]
    assert counts == {1, 2} and launched["place"], "each of the others is placed by itself"


@pytest.mark.parametrize(
    ("chosen", "least", "most"),
    [
        (policy(num_slots=0, resident=1), 2, 12),
        (policy(num_slots=8, resident=0), 1, 2),
        (policy(num_slots=5, resident=0), 1, 1),
    ],
)
def test_on_a_cpu_a_task_takes_experts_that_are_there_in_a_third_of_the_slots(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    chosen: Policy,
    least: int,
    most: int,
) -> None:
    """Those that live there are; of others it is a matter of time how many there are."""
    folder = tiny_checkpoint("deepseek_v3")
    outcomes, built = run(folder, replace(chosen, schedule="klotski"), requests())
    assert tokens_of(outcomes) == expected("deepseek_v3")
    assert built.recorder is not None
    assert least <= max(group_sizes(built.recorder.timeline)) <= most
