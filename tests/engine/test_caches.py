"""Experts that stay after they have been computed change nothing but what is read."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.schedule.task import Kind
from moebatch.spec.policy.policy import CacheRule, Policy
from tests.engine.test_engine import policy, requests, tokens_of
from tests.engine.test_schedules import gpu_policy, run
from tests.tiny import CACHED_APART

RULES: tuple[CacheRule, ...] = ("lru", "lfu", "lifo", "foreseen")
ONE_BY_ONE = ("klotski", "hot", "simple", "promoe")
_EVERY_RULE = ("klotski", "promoe")
IN_MEMORY = {
    "half stays": policy(num_slots=2, resident=0.5),
    "one slot and a little": policy(num_slots=1, micro_batch_size=1, resident=0.2),
    "everything stays": policy(num_slots=2, resident=1),
}
EMULATED = {
    "half stays on a GPU": gpu_policy(vram=0.5, num_slots=2),
    "a little stays, three levels": gpu_policy(vram=0.2, disk=0.5, num_slots=3),
    "one sequence": gpu_policy(vram=0.4, batch_size=1, num_slots=2),
}


CASES = [
    (name, rule) for name in ONE_BY_ONE for rule in RULES if name in _EVERY_RULE or rule == "lru"
]


@pytest.mark.few
@pytest.mark.parametrize("title", IN_MEMORY | EMULATED)
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_tokens_are_those_of_transformers(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    name: str,
    rule: CacheRule,
    title: str,
) -> None:
    chosen = replace((IN_MEMORY | EMULATED)[title], schedule=name, cache=rule)
    outcomes, _ = run(tiny_checkpoint("mixtral"), chosen, requests())
    assert tokens_of(outcomes) == expected("mixtral")


@pytest.mark.parametrize(
    "chosen",
    [policy(num_slots=2, resident=1), gpu_policy(vram=1, num_slots=2)],
    ids=["in memory", "emulated"],
)
def test_with_room_for_all_each_expert_comes_once(
    tiny_checkpoint: Callable[..., Path], chosen: Policy
) -> None:
    _, built = run(tiny_checkpoint("mixtral"), replace(chosen, cache="lru"), requests())
    assert built.recorder is not None
    timeline = built.recorder.timeline
    come = Counter(
        (span.task.kind, span.task.step % timeline.num_layers, span.task.expert, span.task.part)
        for span in timeline.spans
        if span.task.kind in (Kind.FETCH, Kind.CHUNK)
    )
    assert len(timeline.pass_ends_s) > 1
    assert set(come.values()) == {1}


@pytest.mark.parametrize("family", CACHED_APART)
def test_slots_may_be_divided_among_layers_in_any_way(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    family: str,
) -> None:
    folder = tiny_checkpoint(family)
    outcomes, built = run(folder, _uneven(policy(num_slots=2, resident=0.5), folder), requests())
    assert tokens_of(outcomes) == expected(family)
    assert any(of_layer.num_there for of_layer in built.foresight.layers.values())


def _uneven(chosen: Policy, folder: Path) -> Policy:
    """The first layer keeps everything, the last one nothing."""
    from moebatch.checkpoint.model_files import open_model

    shape = open_model(folder, "float32").shape
    sizes = [1] * len(shape.moe_layers)
    sizes[0], sizes[-1] = shape.num_experts, 0
    return replace(chosen, cache="lru", cache_sizes=tuple(sizes))
