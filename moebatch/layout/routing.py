"""How many experts tokens choose, and how often each: what is known before any gate has chosen.

Shape letters: L layers, T tokens, E experts, K experts per token.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moebatch.arrays import Floats
from moebatch.layout.load import PassLoad
from moebatch.spec.model.shape import ModelShape

_MOST_DRAWN = 1024
"""Tokens that choose one by one; of more, each expert gets a share that varies as it would."""
_SAMPLE_TOKENS = 16384


def distinct_experts(shape: ModelShape, tokens: float) -> float:
    """Experts of a layer that at least one of so many tokens chooses, routing being even:
    E(1 - (1 - k/E)^b), of k choices those that compute something."""
    if tokens <= 0:
        return 0.0
    share = shape.computed_per_token / shape.num_experts
    return shape.num_experts * float(1 - (1 - share) ** tokens)


def in_layer(shape: ModelShape, load: PassLoad, layer: int) -> PassLoad:
    """What of a pass goes through a layer: all of it, where there is no encoder."""
    return load if shape.encoder is None else load.in_stack(encodes=shape.encodes(layer))


def layers_of(shape: ModelShape, load: PassLoad) -> range:
    """Layers that a pass goes through: without prompts, it leaves those of an encoder out."""
    return range(0 if load.prompt_tokens else shape.num_encoding_layers, shape.num_layers)


def routed(shape: ModelShape, load: PassLoad) -> list[tuple[int, float]]:
    """How many layers with experts as many tokens of a pass go through, and how many these are."""
    if shape.encoder is None:
        return [(len(shape.moe_layers), load.tokens)]
    num_encoding = sum(map(shape.encodes, shape.moe_layers))
    num_decoding = len(shape.moe_layers) - num_encoding
    return [(num_encoding, load.prompt_tokens), (num_decoding, load.decode_sequences)]


def chosen_experts(shape: ModelShape, load: PassLoad) -> float:
    """Experts of all layers together that some token of a pass chooses, routing being even."""
    return sum(count * distinct_experts(shape, tokens) for count, tokens in routed(shape, load))


def chances_of_any(chances_E: Floats, tokens: float) -> Floats:
    """With what chance at least one of so many tokens chooses each expert, 1 - (1 - p)^T, if
    `chances_E` are those of a single one."""
    chosen_E: Floats = 1 - (1 - np.clip(chances_E, 0.0, 1.0)) ** max(1.0, tokens)
    return chosen_E


def num_likely(chances_E: Floats, tokens: float) -> int:
    """As many experts as so many tokens will probably choose between them, if `chances_E` are those
    of a single one: their expected number, sum of 1 - (1 - p)^T. Of one token that is K, as ProMoE
    predicts (its section on the predictor); of many it is all that are popular.

    No bar for each of them: what was foreseen in vain comes behind all that was chosen and is given
    up when the gate has chosen, so it costs a chunk at most, and what was not foreseen costs an
    expert's whole time.
    """
    return round(float(chances_of_any(chances_E, tokens).sum()))


@dataclass(frozen=True, kw_only=True)
class SkewedRouting:
    """What gates would choose if some experts of each layer are liked better than others; the same
    for the same seed. Popularity falls as rank**-s, ranks shuffled in each layer; 0 is even, as
    gates of random weights are. Choices that compute nothing are as popular as all experts are
    together."""

    shape: ModelShape
    exponent: float = 0.0
    seed: int = 0

    def rows(self, number: int, layer: int, micro_batch: int, tokens: float) -> Floats:
        """Tokens of each expert, [E], where so many tokens of a pass choose."""
        rng = np.random.default_rng((self.seed, 1, number, layer, micro_batch))
        count = max(1, round(tokens))
        if count <= _MOST_DRAWN:
            by_rank = self._counts(self._choices(rng, count))
        else:
            by_rank = rng.binomial(count, self.chances_by_rank)
        rows = np.zeros(self.shape.num_experts)
        rows[self._orders[layer]] = by_rank
        return rows

    def chances(self, layer: int) -> Floats:
        """With what chance a token chooses each expert, [E]; K in all, where all compute."""
        chances = np.zeros(self.shape.num_experts)
        chances[self._orders[layer]] = self.chances_by_rank
        return chances

    @cached_property
    def chances_by_rank(self) -> Floats:
        """The same of the expert of each rank, [E]."""
        if self.exponent == 0:
            share = self.shape.computed_per_token / self.shape.num_experts
            return np.full(self.shape.num_experts, share)
        rng = np.random.default_rng((self.seed, 2))
        chosen = self._choices(rng, _SAMPLE_TOKENS)
        return np.asarray(self._counts(chosen) / _SAMPLE_TOKENS)

    def _counts(self, ranks_TK: NDArray[np.intp]) -> NDArray[np.intp]:
        """How many tokens choose the expert of each rank, [E]."""
        counts: NDArray[np.intp] = np.bincount(ranks_TK.ravel(), minlength=self.shape.num_choices)
        return counts[: self.shape.num_experts]

    def _choices(self, rng: "np.random.Generator", count: int) -> NDArray[np.intp]:
        """Ranks that so many tokens choose, [T, K]: without putting back, by Gumbel's trick. Those
        behind the last expert's compute nothing."""
        num_experts, others = self.shape.num_experts, self.shape.router.num_identities
        ranks = np.append(np.arange(1, num_experts + 1), np.linspace(1, num_experts, others))
        scores_TE = rng.gumbel(size=(count, len(ranks))) - self.exponent * np.log(ranks)
        K = self.shape.experts_per_token
        return np.argpartition(-scores_TE, K - 1, axis=1)[:, :K]

    @cached_property
    def _orders(self) -> NDArray[np.intp]:
        """Experts of each layer in the order of their popularity, [L, E]."""
        rng = np.random.default_rng((self.seed, 0))
        orders = [rng.permutation(self.shape.num_experts) for _ in range(self.shape.num_layers)]
        return np.array(orders)
