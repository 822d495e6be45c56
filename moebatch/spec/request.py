"""What goes into the engine and what comes out: token ids, no files and no text formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moebatch.quoting import presentable
from moebatch.spec.reasoning import Reasoning, Thought
from moebatch.spec.sampling import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token under the model's raw distribution, and alternatives."""

    token: int
    logprob: float
    top: Mapping[int, float]
    """The likeliest tokens and their log-probabilities, likeliest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What there is of a choice that was cut off: it goes on from there."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens, where they are wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One row of the input, ready to be computed."""

    index: int
    """Place of the row in the input, counted from 0."""
    custom_id: str
    """The user's name of the row."""
    prompt_tokens: tuple[int, ...]
    """Token ids, at least one."""
    sampling: Sampling
    num_encoded: int = 0
    """Tokens of the prompt that an encoder takes in: all but the one with which the answer begins.
    0 where there is no encoder."""
    reasoning: Reasoning | None = None
    """What tells thought from the answer; None where the answer is the whole text."""
    begun: tuple[Begun, ...] = ()
    """By choice, what an earlier run has left; empty where nothing has been generated."""

    def thought(self, tokens: Sequence[int]) -> Thought | None:
        """What of new tokens was thought before the answer; None if nothing was."""
        if self.reasoning is None:
            return None
        return self.reasoning.thought(self.prompt_tokens, tokens)

    def num_begun(self, choice: int) -> int:
        """Tokens of a choice that an earlier run has left."""
        return len(self.begun[choice].tokens) if self.begun else 0


class End(NamedTuple):
    """Why a sequence has ended, as OpenAI and vLLM name it."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or stop text; None for an end token and for length."""

    @property
    def by_token(self) -> bool:
        """Whether the last token is the end and no part of the answer's text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One finished generation of a request."""

    index: int
    """Which of the request's ``n`` sequences."""
    tokens: tuple[int, ...]
    """New tokens, the end token included."""
    text: str
    """Decoded answer, cut before the stop text."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or stop text that ended it, as vLLM reports it; None for end tokens."""
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def said(self) -> tuple[int, ...]:
        """Its tokens without one that has ended it."""
        end = End(self.finish_reason, self.stop_reason)
        return self.tokens[:-1] if end.by_token else self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """Why a row has no answer: what OpenAI puts into ``body.error``, with its HTTP status."""

    status: int
    code: str
    message: str
    param: str | None = None

    def __post_init__(self) -> None:
        """Both may quote the row, which may be anything."""
        object.__setattr__(self, "message", presentable(self.message))
        if self.param is not None:
            object.__setattr__(self, "param", presentable(self.param))

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        return "invalid_request_error" if self.status < 500 else "server_error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a request: its choices in order, or the error that stopped it."""

    request: Request
    choices: tuple[Choice, ...] = ()
    error: RowError | None = None
