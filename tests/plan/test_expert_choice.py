"""Which predictor and cache a job gets, and what that is worth."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.layout.habits import Habits
from moebatch.plan.expert_choice import Wishes, choose_experts, divided, wished
from moebatch.plan.prediction import predict
from moebatch.plan.pricing.expected_loads import LayerTimes, expected_loads
from moebatch.plan.problem import Problem
from moebatch.spec.policy.policy import CACHE_RULES, Placement, Policy
from moebatch.spec.workload import Workload
from tests.plan.problems import SMALL, gpu_machine, problem

L, E, K = len(SMALL.moe_layers), SMALL.num_experts, SMALL.experts_per_token
POLICY = Policy(
    batch_size=1,
    micro_batch_size=1,
    tokens_per_pass=16,
    num_slots=4,
    num_kv_pages=1000,
    weights=Placement(vram=0.5, dram=0.5),
    kv_cache=Placement(vram=1.0),
    attention_on_gpu=True,
    ffn_on_gpu=True,
)


def habits(
    accuracy: dict[str, float], kept_by_lru: float = 0.5, kept_if_known: float = 0.5
) -> Habits:
    """Half of what is asked for is there with half of a layer, if it is static; more or less with
    lru, or if it is known what the next pass needs. Batches of 1 and 64 tokens, of which the latter
    need all experts."""
    share_S = 1 - np.arange(E + 1) / E
    chosen_BL = np.array([[K] * L, [E] * L], float)
    rules = {rule: share_S ** (2 * kept_by_lru if rule == "lru" else 1) for rule in CACHE_RULES}
    return Habits(
        batches=(1, 64),
        chosen_BL=chosen_BL,
        missing={rule: chosen_BL[:, :, None] * share for rule, share in rules.items()},
        missing_known=chosen_BL[:, :, None] * share_S ** (2 * kept_if_known),
        accuracy={name: (share,) * L for name, share in accuracy.items()},  # type: ignore[misc]
    )


def small_job(known: Habits | None, num_sequences: int = 1) -> Problem:
    workload = Workload.uniform(prompt_tokens=4, new_tokens=64, num_sequences=num_sequences)
    asked = problem(gpu_machine(), shape=SMALL, workload=workload)
    return replace(asked, habits=known)


@given(
    st.floats(1e-6, 1.0),
    st.floats(1e-6, 1.0),
    st.floats(1e-6, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 8.0),
    st.floats(1.0, 9.0),
)
def test_a_layer_takes_what_its_lanes_need_and_waits_for_what_nobody_foresaw(
    outside_s: float, expert_s: float, load_s: float, right: float, absent: float, slots: float
) -> None:
    times = LayerTimes(outside_s=outside_s, expert_s=expert_s, load_s=load_s)
    chosen, absent_L, right_L = np.array([8.0]), np.array([absent]), np.array([right])
    found = expected_loads(times, chosen, absent_L, right_L, num_slots=slots)
    computing_s = outside_s + 8 * expert_s
    assert found.seconds >= computing_s - 1e-9
    assert found.seconds >= found.num_loads * load_s * (1 - 1e-4)
    assert found.seconds <= computing_s + absent * load_s + expert_s
    assert found.in_time_L[0] + found.in_vain_L[0] <= slots - 1 + 1e-9


def test_what_is_foreseen_with_room_for_it_leaves_the_busiest_lane() -> None:
    times = LayerTimes(outside_s=2.0, expert_s=0.5, load_s=1.0)
    all_right = expected_loads(
        times, np.array([6.0]), np.array([6.0]), np.array([1.0]), num_slots=9
    )
    assert all_right.seconds == pytest.approx(6.0)  # the link, never idle
    none_right = expected_loads(
        times, np.array([6.0]), np.array([6.0]), np.array([0.0]), num_slots=1
    )
    assert none_right.seconds == pytest.approx(2.0 + 6.0 + 0.5)


def test_a_small_job_gets_the_predictor_and_the_cache_that_are_worth_it() -> None:
    known = habits({"none": 0.2, "correlation": 0.5, "learned": 0.95}, kept_by_lru=0.9)
    choice = choose_experts(small_job(known), POLICY, Wishes())
    assert choice is not None
    assert choice.chosen.policy.predictor == "learned"
    assert choice.chosen.policy.cache == "lru"
    assert choice.gain > 1.1
    assert choice.chosen.seconds <= choice.plainest.seconds
    prediction = predict(small_job(known), choice.chosen.policy)
    assert prediction.job_time_s == pytest.approx(choice.chosen.seconds, rel=0.05)


def test_a_cache_goes_by_a_predictor_where_that_is_right_often_enough() -> None:
    known = habits({"none": 0.2, "learned": 0.9}, kept_by_lru=0.9, kept_if_known=1.2)
    choice = choose_experts(small_job(known), POLICY, Wishes())
    assert choice is not None
    assert (choice.chosen.policy.predictor, choice.chosen.policy.cache) == ("learned", "foreseen")
    seldom = replace(known, accuracy={"none": (0.2,) * L, "learned": (0.1,) * L})
    choice = choose_experts(small_job(seldom), POLICY, Wishes())
    assert choice is not None and choice.chosen.policy.cache == "lru"


def test_nothing_is_known_to_a_cache_without_a_predictor() -> None:
    known = habits({"none": 0.2, "learned": 0.5}, kept_if_known=1.2)
    none, learned, all_known = (
        known.absent("foreseen", "none", 1, [E // 2] * L),
        known.absent("foreseen", "learned", 1, [E // 2] * L),
        known.missing_known[0, :, E // 2],
    )
    assert none == pytest.approx(known.missing["foreseen"][0, :, E // 2])
    assert learned == pytest.approx((none + all_known) / 2)


@pytest.mark.parametrize(("num_slots", "cache"), [(1, "static"), (8, "foreseen")])
def test_where_every_pass_needs_all_experts_only_slots_that_are_shared_gain_anything(
    num_slots: int, cache: str
) -> None:
    known = habits({"none": 0.2, "learned": 0.95})
    policy = replace(
        POLICY, batch_size=64, micro_batch_size=64, tokens_per_pass=128, num_slots=num_slots
    )
    choice = choose_experts(small_job(known, num_sequences=64), policy, Wishes())
    assert choice is not None
    assert (choice.chosen.policy.predictor, choice.chosen.policy.cache) == ("none", cache)
    assert (choice.chosen is choice.plainest) == (cache == "static")


def test_what_a_job_asks_for_is_what_it_gets() -> None:
    known = habits({"none": 0.2, "learned": 0.95})
    choice = choose_experts(small_job(known), POLICY, Wishes(predictor="none", cache="lfu"))
    assert choice is not None
    assert {(one.policy.predictor, one.policy.cache) for one in choice.alternatives} == {
        ("none", "lfu")
    }
    assert wished(POLICY, Wishes(predictor="token", cache="dp")).cache == "lru"


def test_without_habits_there_is_nothing_to_choose_and_the_prediction_is_as_before() -> None:
    assert choose_experts(small_job(None), POLICY, Wishes()) is None
    known = small_job(habits({"none": 0.2}))
    assert predict(known.evenly, POLICY) == predict(small_job(None), POLICY)


def test_layers_that_miss_more_get_more_of_the_cache() -> None:
    known = habits({"none": 0.2})
    missing = {rule: figures.copy() for rule, figures in known.missing.items()}
    missing["lru"][:, 0] = known.chosen_BL[:, :1] * (np.arange(E + 1) < 2)  # two are enough here
    asked = small_job(replace(known, missing=missing))
    sizes = divided(asked, replace(POLICY, cache="lru"), 1.0)
    assert sizes[0] == 2
    assert sum(sizes) == L * E // 2 and max(sizes) > E // 2
