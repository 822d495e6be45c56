"""Answers that are held to a grammar.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.spec.grammar import Grammar
from moebatch.spec.request import Request


class Matching(Protocol):
    """How far an answer has come in its grammar."""

    def take(self, tokens: Sequence[int], /) -> None:
        """Goes on by some tokens of the answer."""

    @property
    def fault(self) -> str:
        """Why it cannot go on; empty while it can."""

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [V]."""


class Grammars(Protocol):
    """Grammars, compiled for the tokens of the model."""

    def matching(self, grammar: Grammar, /) -> Matching:
        """The beginning of an answer."""


class Constraint:
    """Which tokens may come next in one sequence. While a model thinks, all may: the grammar is of
    what it answers then."""

    def __init__(self, matching: Matching, request: Request) -> None:
        reasoning = request.reasoning
        self._matching = matching
        self._reasoning = reasoning
        self._opens = [] if reasoning is None else list(reasoning.headers)
        self._thinks = reasoning is not None and reasoning.is_open(request.prompt_tokens)
        self._num_seen = 0

    def restrict(self, logits_V: Tensor, tokens: Sequence[int]) -> str:
        """Leaves only logits of what may come behind the `tokens` so far, in place. Returns why
        nothing can be told any more; empty where it can."""
        self._see(tokens)
        if self._thinks:
            return ""
        if self._matching.fault:
            return self._matching.fault
        allowed_V = torch.from_numpy(self._matching.allowed())
        if not tokens:  # a model that thinks now and then may begin to
            allowed_V[self._opens] = True
        logits_V.masked_fill_(~allowed_V.to(logits_V.device), -torch.inf)
        return ""

    def _see(self, tokens: Sequence[int]) -> None:
        """Takes in those that came since."""
        start, self._num_seen = self._num_seen, len(tokens)
        if start == 0 and tokens and tokens[0] in self._opens:
            self._thinks = True
        if self._thinks and self._reasoning is not None:
            answer = self._reasoning.answer_start(tokens, start)
            self._thinks = answer is None
            start = len(tokens) if answer is None else answer
        self._matching.take(tokens[start:])
