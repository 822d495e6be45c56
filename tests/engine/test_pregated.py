"""Pre-gates give the tokens of transformers with the same gates, under every kind of schedule."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.approximation import Approximation
from moebatch.engine.build import build_engine
from moebatch.engine.spec import EngineSpec
from moebatch.schedule.task import Kind
from moebatch.spec.request import Request
from tests.engine.test_engine import TokenText, policy, requests, tokens_of
from tests.engine.test_schedules import gpu_policy, run
from tests.model.oracle import greedy, greedy_answers, load
from tests.model.pregated import random_pregates, with_pregates
from tests.shapes import load_shape

LAYERS = {"num_hidden_layers": 5}
SOME_DENSE = {"num_hidden_layers": 7, "mlp_only_layers": [0, 3]}
"""Blocks that do not adjoin each other."""
CASES = [
    ("mixtral", 1, LAYERS),
    ("qwen3_next", 2, LAYERS | {"layer_types": None}),
    ("deepseek_v3", 3, LAYERS),
    ("qwen3_moe", 2, SOME_DENSE),
    ("gpt_oss", 1, LAYERS | {"layer_types": None}),
    ("cohere2_moe", 1, LAYERS | {"layer_types": None}),
    ("kimi_linear", 1, LAYERS | {"layer_types": None}),
    ("bailing_hybrid", 1, LAYERS | {"layer_types": None, "layer_group_size": 5}),
    ("minimax", 1, LAYERS | {"layer_types": None}),
    ("granitemoehybrid", 1, LAYERS | {"layer_types": ["mamba", "attention", *3 * ["mamba"]]}),
    ("jamba", 2, LAYERS),
    (
        "nemotron_h",
        2,
        {
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"),
                *("linear_attention", "full_attention", "moe", "linear_attention", "moe"),
            ]
        },
    ),
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
Case = tuple[Path, Approximation, list[tuple[int, ...]]]


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
        numbers = load_shape(folder).moe_layers
        pregates = random_pregates(model, level, numbers=numbers)
        exact = greedy(model, rows()[1].prompt_tokens, MAX_TOKENS)[0]
        with_pregates(model, pregates)
        answers = greedy_answers(model, rows(), MAX_TOKENS)
        assert answers[1] != tuple(exact), "these gates matter"
        return folder, Approximation(pregates=pregates), answers

    return of


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case[:2]) for case in CASES])
def test_tokens_are_those_of_transformers_with_the_same_gates(
    case: Callable[..., Case], number: int
) -> None:
    folder, changed, expected = case(number)
    chosen = gpu_policy(schedule="pregated")
    outcomes, built = run(folder, chosen, rows(), approximation=changed)
    assert tokens_of(outcomes) == expected
    assert list(built.foresight.layers.values())[-1].accuracy == 1.0
    outcomes, _ = run(
        folder, policy(num_slots=9, schedule="pregated"), rows(), approximation=changed
    )
    assert tokens_of(outcomes) == expected


@pytest.mark.parametrize("way", WAYS)
def test_no_schedule_changes_them(case: Callable[..., Case], way: str) -> None:
    folder, changed, expected = case(3)
    outcomes, _ = run(folder, WAYS[way], rows(), approximation=changed)
    assert tokens_of(outcomes) == expected


def test_the_plain_driver_equals_transformers(case: Callable[..., Case]) -> None:
    folder, changed, expected = case(0)
    order = EngineSpec(
        files=open_model(folder, "float32"),
        approximation=changed,
        policy=policy(),
        max_tokens=512,
        is_plain=True,
    )
    built = build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    with torch.inference_mode():
        outcomes = list(built.engine.run(rows()))
    built.close()
    outcomes.sort(key=lambda outcome: outcome.request.index)
    assert tokens_of(outcomes) == expected


def test_exactly_what_is_computed_comes_and_all_of_it_is_foreseen(
    case: Callable[..., Case],
) -> None:
    folder, changed, _ = case(0)
    chosen = policy(num_slots=12, resident=0, schedule="pregated")
    _, built = run(folder, chosen, rows(), approximation=changed, plans_tail=False)
    assert built.recorder is not None
    tasks = [span.task for span in built.recorder.timeline.spans]
    moved = {(task.step, task.expert) for task in tasks if task.kind is Kind.CHUNK}
    groups = [task for task in tasks if task.kind is Kind.EXPERT]
    assert moved == {(task.step, expert) for task in groups for expert in task.experts}
    first, *others = built.foresight.layers.values()
    assert first.num_asked > 0 and first.num_foreseen == 0, "it has its own gate"
    for layer in others:
        assert layer.num_true == layer.num_foreseen == layer.num_asked > 0
