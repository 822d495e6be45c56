"""What a trace says of caches, held against caches that hold experts."""

from pathlib import Path

import numpy as np
import pytest

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.errors import CheckpointError
from moebatch.predict.learnt_files import load_habits, save_habits
from moebatch.predict.routing_habits import measure_habits
from moebatch.schedule.slots.cache import Rule, make_cache
from moebatch.schedule.slots.expert_load import ExpertKey, Load
from moebatch.spec.policy.policy import CACHE_RULES

L, E, K = 2, 6, 2
POPULAR_LE = np.array([[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]])
OWNER = ModelOwner(
    folder=Path("model"), fingerprint="f", moe_layers=(0, 2), num_experts=E, experts_per_token=K
)


def sticky_trace(num_tokens: int) -> np.ndarray:
    """Tokens that mostly choose what the one before them chose."""
    noise = np.random.default_rng(4)
    experts_LTK = np.zeros((L, num_tokens, K), np.int64)
    now_LK = np.array([[0, 1], [2, 3]])
    for token in range(num_tokens):
        for layer in range(L):
            if noise.random() < 0.4:
                now_LK[layer] = noise.choice(E, K, replace=False)
        experts_LTK[:, token] = now_LK
    return experts_LTK


def test_lru_lifo_and_lfu_miss_what_a_cache_of_that_size_misses() -> None:
    trace_LTK = sticky_trace(2000)
    habits = measure_habits(trace_LTK, POPULAR_LE, {"none": (0.5, 0.5)})
    for rule, size in (("lru", 2), ("lru", 4), ("lifo", 4), ("lfu", 4)):
        missing = habits.absent(rule, "none", 1, [size] * L).sum()
        assert missing == pytest.approx(misses(trace_LTK[:, :768], rule, size), abs=0.15), rule


def test_in_cyclic_use_lfu_keeps_of_equals_what_came_first() -> None:
    trace_LTK = np.tile(np.arange(600)[:, None] % E, (L, 1, 1))
    habits = measure_habits(trace_LTK, POPULAR_LE, {"none": (0.5, 0.5)})
    for size in range(1, E):
        missing = habits.absent("lfu", "none", 1, [size] * L).sum()
        assert missing == pytest.approx(misses(trace_LTK, "lfu", size)), size
        assert missing == pytest.approx(L * (1 - size / E))


def misses(trace_LTK: np.ndarray, rule: Rule, size: int) -> float:
    """Of a mean token, in all layers, once the caches are full."""
    cache = make_cache(dict.fromkeys(range(L), size), rule)
    loads = {
        ExpertKey(l, e): Load(key=ExpertKey(l, e), num_chunks=1) for l in range(L) for e in range(E)
    }
    found = []
    for number in range(trace_LTK.shape[1]):
        missing = 0
        for layer in range(L):
            for expert in trace_LTK[layer, number]:
                load = loads[ExpertKey(layer, int(expert))]
                missing += not load.is_cached
                cache.take(load)
        found.append(missing)
    return float(np.mean(found[len(found) // 4 :]))


def test_static_holds_what_was_chosen_most_before() -> None:
    trace_LTK = sticky_trace(400)
    habits = measure_habits(trace_LTK, POPULAR_LE, {"none": (0.5, 0.5)})
    held = {0: {0, 1}, 1: {5, 4}}
    counted = trace_LTK[:, 100:400]  # the first quarter only fills caches
    expected = [
        np.mean([sum(e not in held[layer] for e in token) for token in counted[layer]])
        for layer in range(L)
    ]
    assert habits.absent("static", "none", 1, [2, 2]) == pytest.approx(expected)


@pytest.mark.parametrize("size", [0, 2, 4, E])
def test_whoever_knows_the_next_pass_keeps_what_it_needs(size: int) -> None:
    trace_LTK = sticky_trace(256)
    habits = measure_habits(trace_LTK, POPULAR_LE, {"none": (0.5, 0.5)})
    missing_BLS = habits.missing_known
    assert missing_BLS[0, :, size].sum() == pytest.approx(misses_if_known(trace_LTK, size))
    assert missing_BLS[0, :, size].sum() <= habits.absent("lru", "none", 1, [size] * L).sum() + 1e-9


def misses_if_known(trace_LTK: np.ndarray, size: int) -> float:
    """Of a mean token, in all layers: of what is held, that is given up which is not needed next,
    and of that the one that was used least of late."""
    found = np.zeros(trace_LTK.shape[1])
    for experts_TK in trace_LTK:
        held, recent_E = set[int](), np.zeros(E)
        for token, needed_K in enumerate(experts_TK.tolist()):
            worth = {expert: (expert in needed_K) + recent_E[expert] / 2 for expert in held}
            held = set(sorted(sorted(held), key=lambda expert: -worth[expert])[:size])
            found[token] += len(set(needed_K) - held)
            held |= set(needed_K)
            recent_E = recent_E / 2
            recent_E[needed_K] += 0.5
    return float(found[len(found) // 4 :].mean())


def test_larger_passes_choose_more_and_a_cache_of_all_misses_nothing() -> None:
    habits = measure_habits(sticky_trace(1000), POPULAR_LE, {"none": (0.5, 0.5)})
    chosen = [habits.chosen(tokens).mean() for tokens in (1, 2, 3, 4, 8, 32)]
    assert chosen == sorted(chosen) and chosen[0] == pytest.approx(K)
    assert habits.covers(32) and not habits.covers(1000)
    assert habits.batches == (1, 2, 4, 8, 16, 32), "of larger ones there are fewer than 16 passes"
    for rule in CACHE_RULES:
        assert habits.absent(rule, "none", 3, [E] * L).sum() == 0
        assert habits.absent(rule, "none", 3, [0] * L) == pytest.approx(habits.chosen(3))


def test_a_file_of_habits_reads_as_it_was_written_and_is_refused_when_stale(tmp_path: Path) -> None:
    habits = measure_habits(sticky_trace(200), POPULAR_LE, {"none": (0.5, 0.25), "token": (1, 0)})
    path = tmp_path / "habits.safetensors"
    save_habits(path, habits, OWNER)
    again = load_habits(path, OWNER)
    assert again.accuracy == habits.accuracy and again.batches == habits.batches
    assert again.missing["lfu"] == pytest.approx(habits.missing["lfu"])
    other = ModelOwner(
        folder=Path("model"), fingerprint="g", moe_layers=(0, 2), num_experts=E, experts_per_token=K
    )
    with pytest.raises(CheckpointError, match="another state of this one"):
        load_habits(path, other)
