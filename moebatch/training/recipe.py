"""How gates learn: next tokens of a text, as Pre-gated MoE fine-tunes (section 5).

The paper trains all weights, 2,048 steps of 256 sequences of 256 tokens, at a constant rate of
1e-4. Here gates alone learn, from fewer tokens and so at a higher rate.

Shape letters: B sequences, S positions, V vocabulary.
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
Tokens = Sequence[int]
Advance = Callable[[float], None]


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
    sequences: Sequence[Tokens],
    recipe: Recipe,
    advance: Advance = lambda share: None,
) -> int:
    """Has the gates of a model learn, and returns how many tokens they have learnt from."""
    optimiser = torch.optim.AdamW(model.weights, lr=recipe.rate, weight_decay=0.0)
    num_tokens = 0
    for number, batch in enumerate(_batches(sequences, recipe), start=1):
        predicted = _num_predicted(batch)
        for piece in pieces(batch):
            torch.autograd.backward(_loss(model, piece) / predicted)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        num_tokens += sum(map(len, batch))
        advance(number / recipe.num_steps)
    return num_tokens


def perplexity(model: GatedModel, sequences: Sequence[Tokens]) -> float:
    """exp of the mean loss of a token, the first of each sequence left out."""
    with torch.inference_mode():
        loss = sum(float(_loss(model, piece)) for piece in pieces(sequences))
    return math.exp(loss / _num_predicted(sequences))


def pieces(sequences: Sequence[Tokens]) -> Iterator[list[Tokens]]:
    """The sequences in groups that go through the model together: as many as fit, at least one,
    each as wide as its longest."""
    group: list[Tokens] = []
    for tokens in sorted(sequences, key=len):
        if group and len(tokens) * (len(group) + 1) > PIECE_TOKENS:
            yield group
            group = []
        group.append(tokens)
    if group:
        yield group


def _batches(sequences: Sequence[Tokens], recipe: Recipe) -> Iterator[list[Tokens]]:
    """So many batches of sequences in an order of no meaning, over and over."""
    rng = np.random.default_rng(_SEED)
    queue: list[Tokens] = []
    for _ in range(recipe.num_steps):
        batch: list[Tokens] = []
        while sum(map(len, batch)) < recipe.batch_tokens:
            if not queue:
                queue = [sequences[place] for place in rng.permutation(len(sequences))]
            batch.append(queue.pop())
        yield batch


def _loss(model: GatedModel, sequences: Sequence[Tokens]) -> Tensor:
    """Sum over all tokens that follow another one. What stands behind the end of a sequence is
    seen by nobody before it."""
    width = max(map(len, sequences))
    tokens_BS = torch.zeros(len(sequences), width, dtype=torch.int64)
    wanted_BS = torch.full((len(sequences), width), _IGNORED)
    for row, tokens in enumerate(sequences):
        tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
        wanted_BS[row, : len(tokens) - 1] = torch.tensor(tokens[1:])
    logits_BSV = model.logits(tokens_BS)
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), wanted_BS.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def _num_predicted(sequences: Sequence[Tokens]) -> int:
    return max(1, sum(len(tokens) - 1 for tokens in sequences))
