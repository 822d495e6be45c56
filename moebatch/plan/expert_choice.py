"""Which predictor and which cache suit a job, and how far ahead experts are foreseen.

Where a pass needs all experts, order is all, and nothing here matters. Where few tokens choose, in
small jobs and at the end of large ones, what is known of a model's routing decides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moebatch.layout.cache_sizes import best_sizes
from moebatch.layout.habits import Habits
from moebatch.layout.load import CountedLoad
from moebatch.plan.prediction import at_end
from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import alike, job_loads
from moebatch.plan.search.refusal import too_large
from moebatch.schedule.registry import traits_of
from moebatch.spec.policy.policy import CACHE_RULES, PREDICTORS, CacheRule, Policy, PredictorName

CacheWish = Literal["auto", "static", "lru", "lfu", "lifo", "foreseen", "dp"]
WORTH_CHANGING = 1.02
"""What gains less than that is not chosen over what is simpler."""
_MOST_LOADS = 16
"""Passes of a job are counted together to so many, to compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What a job says itself of its experts."""

    predictor: PredictorName | None = None
    """None leaves it to the planner."""
    cache: CacheWish = "auto"

    @property
    def rule(self) -> CacheRule:
        """Of the cache, where nothing is known to choose by."""
        if self.cache == "auto":
            return "static"
        return "lru" if self.cache == "dp" else self.cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A way of foreseeing and keeping experts, and what it is worth for a job."""

    policy: Policy
    seconds: float
    """Of all passes."""
    num_loads: float
    """Experts that are brought in a mean pass."""
    ready: float
    """Share of the experts that gates ask for which are on the level by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoice:
    """What was chosen among what."""

    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    """All of them, the fastest first."""
    depth: int
    """Steps ahead for which experts are brought."""

    @property
    def plainest(self) -> Alternative:
        """Nothing is foreseen but by frequency, and the same experts stay; or what comes nearest
        to that among what a job allows."""
        return min(self.alternatives, key=lambda one: _plainness(one.policy))

    @property
    def gain(self) -> float:
        """How much faster than the plainest."""
        return self.plainest.seconds / self.chosen.seconds


def choose_experts(problem: Problem, policy: Policy, wishes: Wishes) -> ExpertChoice | None:
    """The plainest way that is nearly as fast as the fastest; None where habits are not known, or
    all experts of all passes are asked for anyway."""
    habits = problem.habits
    if habits is None or traits_of(policy).foresees != "likely" or not policy.num_slots:
        return None
    workload = problem.workload
    loads = alike(job_loads(workload, policy), _MOST_LOADS, encodes=workload.is_encoded)
    if not any(habits.covers(load.tokens) for _, load in loads):
        return None
    ways = _ways(problem, policy, habits, wishes, loads)
    ranked = sorted((_tried(problem, way, loads) for way in ways), key=lambda one: one.seconds)
    enough_s = ranked[0].seconds * WORTH_CHANGING
    good = [one for one in ranked if one.seconds <= enough_s]
    chosen = min(good, key=lambda one: _plainness(one.policy))
    depth = problem.placed(chosen.policy).setup().depth
    return ExpertChoice(chosen=chosen, alternatives=tuple(ranked), depth=depth)


def wished(policy: Policy, wishes: Wishes) -> Policy:
    """A policy with what a job says of its experts; whole layers leave no choice of a cache."""
    cache = "static" if traits_of(policy).is_paged else wishes.rule
    return replace(policy, cache=cache, predictor=wishes.predictor)


def _plainness(policy: Policy) -> tuple[int, int, int]:
    predictor = policy.predictor or "correlation"
    return CACHE_RULES.index(policy.cache), len(policy.cache_sizes), PREDICTORS.index(predictor)


# --- ways ---------------------------------------------------------------------------------------


def _ways(
    problem: Problem,
    policy: Policy,
    habits: Habits,
    wishes: Wishes,
    loads: Sequence[CountedLoad],
) -> Iterator[Policy]:
    """Policies that differ in predictor and cache; those that fit."""
    known = [name for name in PREDICTORS if name in habits.accuracy]
    predictors = known if wishes.predictor is None else [wishes.predictor]
    tokens = _mean_tokens(loads)
    for predictor in predictors:
        for cache, is_divided in _caches(wishes.cache):
            way = replace(policy, cache=cache, predictor=predictor)
            if is_divided:
                way = replace(way, cache_sizes=divided(problem, way, tokens))
            if cache == policy.cache or too_large(problem, way) is None:
                yield way


def _caches(wish: CacheWish) -> Iterator[tuple[CacheRule, bool]]:
    """Rules, and whether the cache is divided unevenly among layers."""
    if wish == "auto":
        for rule in CACHE_RULES:
            yield rule, False
    if wish == "auto" or wish == "dp":
        yield "lru", True
    else:
        yield wish, False


def divided(problem: Problem, policy: Policy, tokens: float) -> tuple[int, ...]:
    """How the slots of a cache are best divided among layers, so that a pass of so many tokens
    waits for the fewest experts (AdapMoE's knapsack, on measured misses)."""
    habits = problem.habits
    assert habits is not None, "nothing is known that could be divided by"
    predictor = habits.predictor_of(policy)
    late_L = 1 - habits.right(predictor, tokens)
    sizes = range(habits.num_experts + 1)
    absent_LS = np.stack(
        [
            habits.absent(policy.cache, predictor, tokens, [size] * habits.num_layers)
            for size in sizes
        ],
        axis=1,
    )
    even = problem.placed(replace(policy, cache_sizes=())).staying
    return best_sizes(absent_LS * late_L[:, None], sum(even))


# --- what they are worth ------------------------------------------------------------------------


def _tried(problem: Problem, policy: Policy, loads: Sequence[CountedLoad]) -> Alternative:
    seconds = num_loads = asked = ready = num_passes = 0.0
    for count, load in loads:
        then = at_end(problem, policy, load)
        cost = problem.cost_of(load, then)
        seconds += count * cost.seconds
        found = cost.loads
        if found is not None:
            num_passes += count
            num_loads += count * found.num_loads
            asked += count * float(found.chosen_L.sum())
            ready += count * float(found.chosen_L.sum()) * found.ready
    return Alternative(
        policy=policy,
        seconds=seconds,
        num_loads=num_loads / num_passes,
        ready=ready / asked,
    )


def _mean_tokens(loads: Sequence[CountedLoad]) -> float:
    """Of passes that generate, mostly."""
    total = sum(count for count, _ in loads)
    return max(1.0, sum(count * load.logits_rows for count, load in loads) / total)
