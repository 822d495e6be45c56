"""How gates learn: next tokens of a text, as Pre-gated MoE fine-tunes (section 5).

The paper trains all weights, 2,048 steps of 256 samples of 256 tokens, at a constant rate of
1e-4. Here gates alone learn, from fewer tokens and so at a higher rate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moebatch.training.learning_gates import LearningGates
from moebatch.training.reading import Reading, num_expected, reading_batches
from moebatch.training.whole_model import WholeModel

_SEED = 0
Advance = Callable[[float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How long gates learn, and how fast."""

    num_steps: int = 128
    batch_tokens: int = 2048
    """Of each step, about."""
    rate: float = 1e-3
    """Constant, as in the paper."""


def learn(
    model: WholeModel,
    gates: LearningGates,
    readings: Sequence[Reading],
    recipe: Recipe,
    advance: Advance = lambda share: None,
) -> int:
    """Has the gates with which a model chooses learn, and returns from how many tokens."""
    optimiser = torch.optim.AdamW(gates.weights, lr=recipe.rate, weight_decay=0.0)
    num_tokens = 0
    for number, step in enumerate(_steps(readings, recipe), start=1):
        expected = num_expected(step)
        for batch in reading_batches(step):
            torch.autograd.backward(model.loss(batch) / expected)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        num_tokens += sum(map(len, step))
        advance(number / recipe.num_steps)
    return num_tokens


def _steps(readings: Sequence[Reading], recipe: Recipe) -> Iterator[list[Reading]]:
    """What each step learns from, in an order of no meaning, over and over."""
    rng = np.random.default_rng(_SEED)
    queue: list[Reading] = []
    for _ in range(recipe.num_steps):
        step: list[Reading] = []
        while sum(map(len, step)) < recipe.batch_tokens:
            if not queue:
                queue = [readings[place] for place in rng.permutation(len(readings))]
            step.append(queue.pop())
        yield step
