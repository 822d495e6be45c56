"""Pre-gates give the tokens of transformers with the same gates, under every kind of schedule."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from moebatch.engine.build import build_engine
from moebatch.engine.model_files import open_model
from moebatch.engine.order import Order
from moebatch.model.pregates import PreGates
from moebatch.schedule.task import Kind, Task
from moebatch.spec.request import Request
from tests.engine.test_engine import TokenText, policy, requests, tokens_of
from tests.engine.test_schedules import emulated, gpu_policy, run
from tests.model.oracle import greedy, load
from tests.model.pregated import random_pregates, with_pregates

LAYERS = {"num_hidden_layers": 5}
SOME_DENSE = {"num_hidden_layers": 7, "mlp_only_layers": [0, 3]}
"""Blocks that do not adjoin each other."""
CASES = [
    ("mixtral", 1, LAYERS),
    ("qwen2_moe", 2, LAYERS),
    ("olmoe", 3, LAYERS),
    ("qwen3_moe", 2, SOME_DENSE),
]
WAYS = {
    "one slot, batches of one": policy(
        num_slots=1, micro_batch_size=1, resident=0, schedule="pregated"
    ),
    "each batch alone": policy(num_slots=5, micro_batch_size=2, schedule="simple"),
    "hot ones first": policy(num_slots=9, schedule="klotski"),
    "whole layers in pages": policy(num_slots=0, schedule="flexgen"),
}
LENGTHS, MAX_TOKENS = (1, 17, 40, 5), 5
Case = tuple[Path, PreGates, list[tuple[int, ...]]]


def rows() -> list[Request]:
    return requests(LENGTHS, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def case(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Case]:
    """Model folder, pre-gates, and what transformers answers with them; each worked out once."""

    @cache
    def of(number: int) -> Case:
        family, level, options = CASES[number]
        folder = tiny_checkpoint(family, **options)
        model = load(folder)
        pregates = random_pregates(model, level)
        exact = greedy(model, rows()[1].prompt_tokens, MAX_TOKENS)[0]
        with_pregates(model, pregates)
        answers = [tuple(greedy(model, row.prompt_tokens, MAX_TOKENS)[0]) for row in rows()]
        assert answers[1] != tuple(exact), "these gates matter"
        return folder, pregates, answers

    return of


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case[:2]) for case in CASES])
def test_tokens_are_those_of_transformers_with_the_same_gates(
    case: Callable[..., Case], number: int
) -> None:
    folder, pregates, expected = case(number)
    chosen = gpu_policy(schedule="pregated")
    outcomes, built = run(folder, chosen, rows(), device=emulated(), pregates=pregates)
    assert tokens_of(outcomes) == expected
    assert built.foresight.layers[pregates.moe_layers[-1]].accuracy == 1.0
    outcomes, _ = run(folder, policy(num_slots=9, schedule="pregated"), rows(), pregates=pregates)
    assert tokens_of(outcomes) == expected


@pytest.mark.parametrize("way", WAYS)
def test_no_schedule_changes_them(case: Callable[..., Case], way: str) -> None:
    folder, pregates, expected = case(3)
    outcomes, _ = run(folder, WAYS[way], rows(), pregates=pregates)
    assert tokens_of(outcomes) == expected


def test_the_plain_driver_equals_transformers(case: Callable[..., Case]) -> None:
    folder, pregates, expected = case(0)
    order = Order(
        files=open_model(folder, "float32"),
        policy=policy(),
        max_tokens=512,
        is_plain=True,
        pregates=pregates,
    )
    built = build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    with torch.inference_mode():
        outcomes = list(built.engine.run(rows()))
    built.close()
    outcomes.sort(key=lambda outcome: outcome.request.index)
    assert tokens_of(outcomes) == expected


def test_selected_experts_come_before_their_own_layer_asks(case: Callable[..., Case]) -> None:
    """Nothing else does: all that is on its way is computed."""
    folder, pregates, _ = case(0)
    chosen = policy(num_slots=12, resident=0, schedule="pregated")
    _, built = run(folder, chosen, rows(), pregates=pregates, plans_tail=False)
    assert built.recorder is not None
    spans = built.recorder.timeline.spans
    ended = {span.task: span.end_s for span in spans}
    begins: dict[tuple[int, int | None], float] = {}
    for span in spans:
        if span.task.kind is Kind.CHUNK:
            begins.setdefault((span.task.step, span.task.expert), span.start_s)
    computed = {(task.step, task.expert) for task in ended if task.kind is Kind.EXPERT}
    assert begins.keys() == computed
    early = {step for (step, _), s in begins.items() if s < min(gates_end(ended, step))}
    assert {step % 5 for step in early} == {1, 2, 3, 4}, "only the first gate is asked too late"


def gates_end(ended: Mapping[Task, float], step: int) -> list[float]:
    """When the gates of a step have spoken."""
    return [end for task, end in ended.items() if (task.kind, task.step) == (Kind.GATE, step)]
