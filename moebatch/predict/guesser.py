"""What a single token lets one guess: from its id, or from its hidden state.

Shape letters: R rows, D hidden, E experts, K experts per token, V vocabulary, W width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from moebatch.arrays import Ints

Shares = NDArray[np.float32]
"""With what chance each of some tokens chooses each expert of a layer, [R, E]; K in a row."""
_BLOCK_ROWS = 256
_LEAST_TOTAL = 1e-20


@dataclass(frozen=True, slots=True)
class SharesByToken:
    """Shares that lie in a table of all tokens. They are looked up for the rows that are asked for:
    those of a long prompt in all layers would take more memory than the planner has counted."""

    shares_VE: NDArray[np.float16]
    tokens_R: Ints

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> Shares:
        return self.shares_VE[self.tokens_R[rows]].astype(np.float32)


class Guess(NamedTuple):
    """What some rows will probably choose at a layer."""

    position: int
    """Of the layer, among those with experts."""
    shares_RE: Shares | SharesByToken
    is_next_pass: bool = False
    """Of the tokens that follow these, in the next pass."""


class KnownTokens(NamedTuple):
    """What is known of the tokens of a pass before its first layer."""

    tokens_T: Ints
    embedded_TD: Tensor | None = None
    before: Callable[[slice], Tensor | None] = lambda rows: None
    """What the last gate has seen of the token before each of some rows, [R, D]; zeros where
    no gate has seen it."""


class Guesser:
    """Looks at tokens one by one. Positions are those of layers with experts, from 0."""

    def from_tokens(self, known: KnownTokens) -> Iterator[Guess]:
        """Guesses when a pass begins, from what its tokens are."""
        return iter(())

    def from_hidden(self, position: int, hidden_RD: Tensor) -> Iterator[Guess]:
        """Guesses from what the gate at a position has seen."""
        return iter(())


@dataclass(frozen=True, slots=True)
class TokenGuesser(Guesser):
    """What each token of the vocabulary has chosen, at every layer: known a whole pass ahead."""

    shares_LVE: NDArray[np.float16]

    def from_tokens(self, known: KnownTokens) -> Iterator[Guess]:
        for position, shares_VE in enumerate(self.shares_LVE):
            yield Guess(position, SharesByToken(shares_VE, known.tokens_T))


@dataclass(frozen=True, slots=True)
class GateGuesser(Guesser):
    """The gates of the next layers, asked with what this layer's gate has seen (AdapMoE, section
    4.3): hidden states change slowly from layer to layer."""

    gates: Sequence[Callable[[Tensor], Tensor]]
    """Of what gates see, [R, D], each makes numbers whose softmax says how likely rows choose each
    expert, [R, E]."""
    num_chosen: int
    depth: int = 1
    """Layers ahead: 1 to 3."""

    def from_hidden(self, position: int, hidden_RD: Tensor) -> Iterator[Guess]:
        following = range(position + 1, min(position + 1 + self.depth, len(self.gates)))
        for later in following:
            yield Guess(later, top_shares(self.gates[later](hidden_RD), self.num_chosen))


@dataclass(frozen=True, slots=True)
class FirstGateGuesser(Guesser):
    """A gate for the first layer of the next token, on what the last layer has seen of this one
    (AdapMoE, Eq. 9, with its slices put right: the prediction from a token is held against the
    choice of the token after it)."""

    gate_ED: Tensor
    num_layers: int
    num_chosen: int

    def from_hidden(self, position: int, hidden_RD: Tensor) -> Iterator[Guess]:
        """From the last layer, the first one of the next pass."""
        if position == self.num_layers - 1:
            shares_RE = top_shares(linear_of(hidden_RD, self.gate_ED), self.num_chosen)
            yield Guess(0, shares_RE, is_next_pass=True)


class Perceptron(NamedTuple):
    """Two layers."""

    into_WD: Tensor
    bias_W: Tensor
    out_EW: Tensor
    bias_E: Tensor

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """One for each expert, [R, E]."""
        hidden_RD = hidden_RD.to(self.into_WD.device, self.into_WD.dtype)
        return F.linear(
            F.silu(F.linear(hidden_RD, self.into_WD, self.bias_W)), self.out_EW, self.bias_E
        )


@dataclass(frozen=True, slots=True)
class LearnedGuesser(Guesser):
    """A perceptron at every layer, trained on what its tokens choose a stride further on (ProMoE):
    with a stride of two, what is foreseen has a whole layer's time to come.

    The paper leaves open what stands in for the first layers. Here the last ones do, for the token
    that comes next, and once that one is known, perceptrons that look at what it is and at what the
    last gate has seen of its predecessor.
    """

    ahead: Sequence[Perceptron]
    """By position; behind the last layer come the first ones of the next token."""
    beginning: Sequence[Perceptron]
    """Of the first layers, as many as the stride is long."""
    num_chosen: int

    @property
    def stride(self) -> int:
        """Layers from what is looked at to what is foreseen."""
        return len(self.beginning)

    def from_tokens(self, known: KnownTokens) -> Iterator[Guess]:
        if known.embedded_TD is None:
            return
        blocks = [self._begin(known, rows) for rows in _blocks(len(known.tokens_T))]
        for position, shares in enumerate(zip(*blocks, strict=True)):
            yield Guess(position, np.concatenate(shares))

    def from_hidden(self, position: int, hidden_RD: Tensor) -> Iterator[Guess]:
        pass_, later = divmod(position + self.stride, len(self.ahead))
        shares_RE = top_shares(self.ahead[position].logits(hidden_RD), self.num_chosen)
        yield Guess(later, shares_RE, is_next_pass=bool(pass_))

    def _begin(self, known: KnownTokens, rows: slice) -> list[Shares]:
        """What some tokens choose in the first layers."""
        assert known.embedded_TD is not None, "guessers that look ask"
        input_RD = beginning_of(known.embedded_TD[rows], known.before(rows))
        return [top_shares(one.logits(input_RD), self.num_chosen) for one in self.beginning]


def _blocks(num_rows: int) -> list[slice]:
    """Long prompts are looked at a few tokens at a time: the planner has not counted the memory."""
    starts = range(0, num_rows, _BLOCK_ROWS)
    return [slice(start, min(start + _BLOCK_ROWS, num_rows)) for start in starts]


def beginning_of(embedded_TD: Tensor, before_TD: Tensor | None) -> Tensor:
    """What tokens are, as long as vectors that gates see are, beside what was seen before them,
    [T, 2 D]."""
    embedded_TD = F.rms_norm(embedded_TD.float().cpu(), embedded_TD.shape[-1:])
    before_TD = torch.zeros_like(embedded_TD) if before_TD is None else before_TD
    return torch.cat([embedded_TD, before_TD], dim=1)


def linear_of(hidden_RD: Tensor, gate_ED: Tensor) -> Tensor:
    """Logits of a gate without bias, computed where its weights are, [R, E]."""
    return F.linear(hidden_RD.to(gate_ED.device, gate_ED.dtype), gate_ED)


def top_shares(logits_RE: Tensor, num_chosen: int) -> Shares:
    """Chances that sum to K, spread over experts as a softmax is, none above one: a token chooses
    no expert twice."""
    values_RE = logits_RE.float().cpu().numpy()
    shares_RE: Shares = np.exp(values_RE - values_RE.max(axis=1, keepdims=True))
    shares_RE *= num_chosen / shares_RE.sum(axis=1, keepdims=True)
    while (shares_RE > 1).any():  # what is cut off goes to the others, in proportion
        is_sure_RE = shares_RE >= 1
        shares_RE[is_sure_RE] = 0.0
        left_R1 = num_chosen - is_sure_RE.sum(axis=1, keepdims=True)
        total_R1 = shares_RE.sum(axis=1, keepdims=True)
        shares_RE *= left_R1 / np.maximum(total_R1, _LEAST_TOTAL)
        shares_RE[is_sure_RE] = 1.0
    return shares_RE
