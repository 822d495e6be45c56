"""What a trace says of caches: which experts would have been there, had so many stayed.

Shape letters: L MoE layers, T tokens, B batches, G tokens of a pass, E experts, K experts per
token.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from moebatch.arrays import Bools, Floats
from moebatch.layout.habits import Habits
from moebatch.predict.predictor import Chosen
from moebatch.predict.recent_use import after_pass
from moebatch.spec.policy.policy import CacheRule, PredictorName

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_PASSES = 768
"""So many of each size are looked at."""
_MOST_KNOWN_PASSES = 256
"""The same where caches of all sizes are tried out."""
_FEWEST_PASSES = 16
_WARM_SHARE = 4
"""One of so many only fills the caches."""


def measure_habits(
    experts_LTK: Chosen,
    popular_LE: NDArray[np.integer],
    accuracy: Mapping[PredictorName, tuple[float, ...]],
) -> Habits:
    """Habits of tokens that follow each other as those of an answer do.

    Passes of several tokens are made of as many places of the text, which all go on by one token
    from pass to pass.

    Args:
        experts_LTK: what tokens have chosen, at least one.
        popular_LE: how often each expert was chosen in another part of the text, by which the
            hottest ones are known beforehand.
        accuracy: of predictors, see `Habits`.
    """
    num_tokens, num_experts = experts_LTK.shape[1], popular_LE.shape[1]
    batches = [size for size in BATCHES if size == 1 or num_tokens // size >= _FEWEST_PASSES]
    passes = [_passes(experts_LTK, size, num_experts) for size in batches]
    found = [_missing(of_size, popular_LE) for of_size in passes]
    return Habits(
        batches=tuple(batches),
        chosen_BL=np.stack([missing["static"][:, 0] for missing in found]),
        missing={rule: np.stack([missing[rule] for missing in found]) for rule in found[0]},
        missing_known=np.stack([_missing_known(of_size) for of_size in passes]),
        accuracy=accuracy,
    )


def _passes(experts_LTK: Chosen, size: int, num_experts: int) -> list[Bools]:
    """Which experts are chosen in each pass of so many tokens, [L, E]."""
    num_layers, num_tokens, _ = experts_LTK.shape
    per_place = num_tokens // size
    first_G = np.arange(size) * per_place
    layers = np.arange(num_layers)[:, None]
    passes = []
    for number in range(min(per_place, _MOST_PASSES)):
        is_chosen_LE = np.zeros((num_layers, num_experts), np.bool_)
        is_chosen_LE[layers, experts_LTK[:, first_G + number].reshape(num_layers, -1)] = True
        passes.append(is_chosen_LE)
    return passes


def _missing(passes: list[Bools], popular_LE: NDArray[np.integer]) -> dict[CacheRule, Floats]:
    """Experts of a mean pass that are not there, by how many stay, [L, E + 1]."""
    num_warm = len(passes) // _WARM_SHARE
    by_rank: dict[CacheRule, Floats] = {}
    for number, (is_chosen_LE, worths) in enumerate(_with_worths(passes, popular_LE)):
        for rule, worth_LE in worths.items() if number >= num_warm else ():
            order_LE = np.argsort(-worth_LE, axis=1, kind="stable")
            ranked_LE = np.take_along_axis(is_chosen_LE, order_LE, axis=1)
            by_rank[rule] = by_rank.get(rule, 0.0) + ranked_LE.astype(np.float64)
    num_counted = len(passes) - num_warm
    return {rule: _from_rank_on(ranked_LE / num_counted) for rule, ranked_LE in by_rank.items()}


def _missing_known(passes: list[Bools]) -> Floats:
    """Experts of a mean pass that are not there, by how many stay, if those leave first that the
    next pass of their layer does not choose, [L, E + 1]."""
    passes = passes[:_MOST_KNOWN_PASSES]
    num_warm = len(passes) // _WARM_SHARE
    num_layers, num_experts = passes[0].shape
    sizes_S = np.arange(num_experts + 1)
    held_LSE = np.zeros((num_layers, num_experts + 1, num_experts), np.bool_)
    recent_LE = np.zeros((num_layers, num_experts))
    missing_LS = np.zeros((num_layers, num_experts + 1))
    for number, is_chosen_LE in enumerate(passes):
        order_LE = np.argsort(-(is_chosen_LE + recent_LE / 2), axis=1, kind="stable")
        rank_LE = np.argsort(order_LE, axis=1)
        ranked_LSE = np.take_along_axis(held_LSE, order_LE[:, None], axis=2)
        ranked_LSE &= ranked_LSE.cumsum(axis=2) <= sizes_S[:, None]
        held_LSE = np.take_along_axis(ranked_LSE, rank_LE[:, None], axis=2)
        if number >= num_warm:
            missing_LS += (is_chosen_LE[:, None] & ~held_LSE).sum(axis=2)
        held_LSE |= is_chosen_LE[:, None]
        recent_LE = after_pass(recent_LE, is_chosen_LE)
    return missing_LS / (len(passes) - num_warm)


def _with_worths(
    passes: list[Bools], popular_LE: NDArray[np.integer]
) -> Iterator[tuple[Bools, dict[CacheRule, Floats]]]:
    """Each pass with what every expert is worth to each rule before it, [L, E]: so many stay as
    there is room for, those of the greatest worth."""
    last_LE = np.full(popular_LE.shape, -1.0)
    first_LE = np.full(popular_LE.shape, float(len(passes)))
    count_LE = np.zeros(popular_LE.shape)
    recent_LE = np.zeros(popular_LE.shape)
    for number, is_chosen_LE in enumerate(passes):
        yield (
            is_chosen_LE,
            {
                "static": popular_LE.astype(np.float64),
                "lru": last_LE,
                # Of equals the one that came first: the last one leaves, see `LayerCache`.
                "lfu": count_LE - first_LE / (len(passes) + 1),
                "lifo": -first_LE,
                "foreseen": recent_LE,
            },
        )
        first_LE = np.where(is_chosen_LE, np.minimum(first_LE, number), first_LE)
        last_LE = np.where(is_chosen_LE, float(number), last_LE)
        count_LE = count_LE + is_chosen_LE
        recent_LE = after_pass(recent_LE, is_chosen_LE)


def _from_rank_on(ranked_LE: Floats) -> Floats:
    """What lies at each rank or behind it, and nothing behind the last one, [L, E + 1]."""
    behind_LE = ranked_LE[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.pad(behind_LE, ((0, 0), (0, 1)))
