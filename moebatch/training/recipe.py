"""How gates learn: next tokens of a text, as Pre-gated MoE fine-tunes (section 5).

The paper trains all weights, 2,048 steps of 256 samples of 256 tokens, at a constant rate of
1e-4. Here gates alone learn, from fewer tokens and so at a higher rate.

Shape letters: B samples, S positions, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.training.gated_model import GatedModel

PIECE_TOKENS = 1024
"""Tokens that go through the model at a time: what lies between its layers has to be kept."""
_IGNORED = -100
_SEED = 0
Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence, and what of it is to be foretold."""

    tokens: tuple[int, ...]
    first: int = 1
    """Place of the first token that is, at least 1: of a conversation that of its last answer."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_wanted(self) -> int:
        """Tokens that are to be foretold."""
        return max(0, len(self.tokens) - self.first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How long gates learn, and how fast."""

    num_steps: int = 128
    batch_tokens: int = 4096
    """Of each step, about."""
    rate: float = 1e-3
    """Constant, as in the paper."""


def learn(
    model: GatedModel,
    samples: Sequence[Sample],
    recipe: Recipe,
    advance: Advance = lambda share: None,
) -> int:
    """Has the gates of a model learn, and returns how many tokens they have learnt from."""
    optimiser = torch.optim.AdamW(model.weights, lr=recipe.rate, weight_decay=0.0)
    num_tokens = 0
    for number, batch in enumerate(_batches(samples, recipe), start=1):
        num_wanted = _num_wanted(batch)
        for piece in pieces(batch):
            torch.autograd.backward(_loss(model, piece) / num_wanted)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        num_tokens += sum(map(len, batch))
        advance(number / recipe.num_steps)
    return num_tokens


def perplexity(model: GatedModel, samples: Sequence[Sample]) -> float:
    """exp of the mean loss of the tokens that are to be foretold."""
    with torch.inference_mode():
        loss = sum(float(_loss(model, piece)) for piece in pieces(samples))
    return math.exp(loss / _num_wanted(samples))


def pieces(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples in groups that go through the model together: as many as fit, at least one,
    each as wide as its longest."""
    group: list[Sample] = []
    for sample in sorted(samples, key=len):
        if group and len(sample) * (len(group) + 1) > PIECE_TOKENS:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _batches(samples: Sequence[Sample], recipe: Recipe) -> Iterator[list[Sample]]:
    """So many batches of samples in an order of no meaning, over and over."""
    rng = np.random.default_rng(_SEED)
    queue: list[Sample] = []
    for _ in range(recipe.num_steps):
        batch: list[Sample] = []
        while sum(map(len, batch)) < recipe.batch_tokens:
            if not queue:
                queue = [samples[place] for place in rng.permutation(len(samples))]
            batch.append(queue.pop())
        yield batch


def _loss(model: GatedModel, samples: Sequence[Sample]) -> Tensor:
    """Sum over all tokens that are to be foretold. What stands behind the end of a sequence is seen
    by nobody before it."""
    width = max(map(len, samples))
    tokens_BS = torch.zeros(len(samples), width, dtype=torch.int64)
    wanted_BS = torch.full((len(samples), width), _IGNORED)
    for row, sample in enumerate(samples):
        tokens_BS[row, : len(sample)] = torch.tensor(sample.tokens)
        wanted = torch.tensor(sample.tokens[sample.first :])
        wanted_BS[row, sample.first - 1 : len(sample) - 1] = wanted
    logits_BSV = model.logits(tokens_BS)
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), wanted_BS.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def _num_wanted(samples: Sequence[Sample]) -> int:
    return max(1, sum(sample.num_wanted for sample in samples))
