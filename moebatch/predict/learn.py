"""Predictors that learn from a trace of what gates have seen and chosen.

Shape letters: L MoE layers, N tokens of the trace, B of a batch, D hidden, E experts, K experts per
token, V vocabulary, W width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from moebatch.advance import Advance, unwatched
from moebatch.arrays import Bools, Ints
from moebatch.predict.guesser import Perceptron, Shares, beginning_of

PARAMETERS = 2_000_000
"""Of the perceptron of a layer (ProMoE)."""
_WIDEST = 2
"""Times what is looked at: small models do not need as many."""
_BATCH = 256
_RATE = 3e-3
_SEED = 0
Loss = Callable[[NDArray[np.intp]], Tensor]
Embed = Callable[[Ints], Tensor]
"""What a model makes of tokens before its first layer, [N, D]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long a predictor is trained."""

    num_epochs: int = 8
    """Times that each token is seen at most."""
    most_steps: int = 3000
    """Batches in all, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Tokens with what each gate has seen of them, and what it chose."""

    hidden_LND: NDArray[np.float16]
    experts_LNK: NDArray[np.uint16]
    tokens_N: Ints
    is_first_N: Bools
    """Tokens that do not follow the one before them in the same sequence."""

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.tokens_N)

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return len(self.experts_LNK)

    @property
    def followed_N(self) -> NDArray[np.intp]:
        """Tokens whose successor in their sequence is the next one."""
        return np.flatnonzero(~self.is_first_N[1:])


def token_shares(seen: Seen, *, num_experts: int, vocab_size: int) -> NDArray[np.float16]:
    """With what chance each token of the vocabulary chooses each expert, [L, V, E]; one that was
    seen rarely, or never, goes by what all tokens choose."""
    shares_LVE = np.empty((seen.num_layers, vocab_size, num_experts), np.float16)
    times_V1 = np.bincount(seen.tokens_N, minlength=vocab_size)[:, None]
    for position, experts_NK in enumerate(seen.experts_LNK):
        counts_VE = np.zeros((vocab_size, num_experts), np.float32)
        np.add.at(counts_VE, (seen.tokens_N[:, None], experts_NK), 1)
        usual_E = counts_VE.sum(axis=0) / max(1, len(seen))
        shares_LVE[position] = (counts_VE + usual_E) / (times_V1 + 1)
    return shares_LVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """What is seen at some places of a trace, and what is chosen there or one place further."""

    places_N: NDArray[np.intp]
    input_of: Callable[[NDArray[np.intp]], Tensor]
    """Of some places, [B, D]."""
    chosen_of: Callable[[NDArray[np.intp]], NDArray[np.uint16]]
    """Of some places, [B, K]."""


def examples_ahead(seen: Seen, position: int, *, stride: int) -> Examples:
    """What tokens choose a stride further than `position`; behind the last layer the first ones of
    the next token."""
    pass_, later = divmod(position + stride, seen.num_layers)
    hidden_ND, experts_NK = seen.hidden_LND[position], seen.experts_LNK[later]
    return Examples(
        places_N=seen.followed_N if pass_ else np.arange(len(seen)),
        input_of=lambda places: torch.from_numpy(hidden_ND[places].astype(np.float32)),
        chosen_of=lambda places: experts_NK[places + pass_],
    )


def examples_of_beginning(seen: Seen, position: int, embed: Embed) -> Examples:
    """What tokens choose at one of the first positions, as far as it can be known when their pass
    begins. Each other of them is taken for one of which it is not known what was seen before it, as
    all but the last of a prompt are."""
    last_ND, experts_NK = seen.hidden_LND[-1], seen.experts_LNK[position]
    is_known_N = np.random.default_rng(_SEED).random(len(seen)) < 0.5

    def look(places: NDArray[np.intp]) -> Tensor:
        before_BD = last_ND[places] * is_known_N[places, None]
        embedded_BD = embed(seen.tokens_N[places + 1])
        return beginning_of(embedded_BD, torch.from_numpy(before_BD.astype(np.float32)))

    return Examples(
        places_N=seen.followed_N,
        input_of=look,
        chosen_of=lambda places: experts_NK[places + 1],
    )


def learn_perceptron(
    examples: Examples,
    *,
    num_experts: int,
    effort: Effort,
    advance: Advance = unwatched,
) -> Perceptron:
    """Learns which experts tokens choose: each of them yes or no (the paper names no loss)."""
    input_size = examples.input_of(examples.places_N[:1]).shape[1]
    width = min(PARAMETERS // (input_size + num_experts), _WIDEST * input_size)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        first, last = nn.Linear(input_size, width), nn.Linear(width, num_experts)
    net = nn.Sequential(first, nn.SiLU(), last)

    def loss(places_B: NDArray[np.intp]) -> Tensor:
        chosen_BK = torch.from_numpy(examples.chosen_of(places_B).astype(np.int64))
        wanted_BE = torch.zeros(len(places_B), num_experts).scatter_(1, chosen_BK, 1.0)
        return F.binary_cross_entropy_with_logits(net(examples.input_of(places_B)), wanted_BE)

    _train(net, examples.places_N, loss, effort, advance)
    parts = (first.weight, first.bias, last.weight, last.bias)
    return Perceptron(*(part.detach() for part in parts))


def learn_first_gate(
    seen: Seen,
    first_gate: Callable[[Tensor], Tensor],
    *,
    num_experts: int,
    effort: Effort,
    advance: Advance = unwatched,
) -> Tensor:
    """A gate for the first layer of the next token on what the last layer has seen of this one,
    [E, D] (AdapMoE, Eq. 9): its softmax is to be that of the first gate one token later."""
    first_ND, last_ND = seen.hidden_LND[0], seen.hidden_LND[-1]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        gate = nn.Linear(last_ND.shape[1], num_experts, bias=False)

    def loss(places_B: NDArray[np.intp]) -> Tensor:
        last_BD = torch.from_numpy(last_ND[places_B].astype(np.float32))
        next_BD = torch.from_numpy(first_ND[places_B + 1].astype(np.float32))
        wanted_BE = F.softmax(first_gate(next_BD), dim=-1)
        return F.kl_div(F.log_softmax(gate(last_BD), dim=-1), wanted_BE, reduction="batchmean")

    _train(gate, seen.followed_N, loss, effort, advance)
    return gate.weight.detach()


def _train(
    net: nn.Module,
    places_N: NDArray[np.intp],
    loss: Loss,
    effort: Effort,
    advance: Advance,
) -> None:
    """Adam with a rate that falls to nothing; `loss` gets places of the trace."""
    batches = list(_batches(places_N, effort))
    optimiser = torch.optim.AdamW(net.parameters(), lr=_RATE, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, len(batches)))
    for number, places_B in enumerate(batches, start=1):
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss(places_B))
        optimiser.step()
        rate.step()
        advance(number / len(batches))


def _batches(places_N: NDArray[np.intp], effort: Effort) -> Iterator[NDArray[np.intp]]:
    """Ascending within a batch, as files are read."""
    rng = np.random.default_rng(_SEED)
    num_left = effort.most_steps
    for _ in range(effort.num_epochs):
        shuffled = rng.permutation(places_N)
        for start in range(0, len(shuffled), _BATCH):
            if not num_left:
                return
            num_left -= 1
            yield np.sort(shuffled[start : start + _BATCH])


def precision(shares_NE: Shares, experts_NK: NDArray[np.uint16]) -> float:
    """Of the K likeliest experts of each token, the share that it chose."""
    num_chosen = experts_NK.shape[1]
    guessed_NK = np.argsort(-shares_NE, axis=1, kind="stable")[:, :num_chosen]
    is_right_NK = (guessed_NK[:, :, None] == experts_NK[:, None, :]).any(axis=2)
    return float(is_right_NK.mean())
