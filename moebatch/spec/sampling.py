"""How the next token of a sequence is chosen: resolved parameters of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from moebatch.spec.grammar import Grammar
from moebatch.spec.tools import AUTO, ToolChoice, Tools


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Resolved sampling parameters of one request: row over job over model over these defaults.

    Ranges are those of the OpenAI API and vLLM; code that builds one from user input checks them.
    """

    max_tokens: int = 256
    """Most new tokens of a sequence, at least 1."""
    temperature: float = 1.0
    """0 is greedy; up to 2."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities first reach this sum, in (0, 1]."""
    top_k: int = 0
    """Keep that many likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one, in [0, 1]."""
    n: int = 1
    """Sequences per request."""
    seed: int | None = None
    """Noise depends on (seed, choice, position); without one on the job's seed and custom_id."""
    stop: tuple[str, ...] = ()
    """Texts that end a sequence; they are not part of the answer."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    min_tokens: int = 0
    """No end token and no stop text counts before this many new tokens."""
    logprobs: int | None = None
    """Number of alternatives reported with every token; None reports nothing, 0 only the token."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer already holds, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer, > 0."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the logits of these token ids, each in [-100, 100]."""
    response_format: Grammar | None = None
    """What the answer must look like, as OpenAI's interface says it."""
    structured_outputs: Grammar | None = None
    """The same as vLLM's interface says it; one of the two at most."""
    tools: Tools | None = None
    """What the model may ask its user to call."""
    tool_choice: ToolChoice = AUTO
    """Whether it may, must or must not."""
    parallel_tool_calls: bool = True
    """Whether one answer may call several times."""

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must look like; None where it may be any text."""
        return self.response_format or self.structured_outputs

    @property
    def held_by(self) -> str:
        """The parameter that says so."""
        if self.must_call:
            return "tool_choice"
        return "response_format" if self.response_format else "structured_outputs"

    @property
    def offered(self) -> Tools | None:
        """What the model is told that it may call."""
        return None if self.tool_choice.kind == "none" else self.tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice.kind in ("required", "function")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, as below vLLM's smallest temperature."""
        return self.temperature < 1e-5

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen, at whatever place of an answer."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.grammar
        )

    @property
    def takes_likeliest(self) -> bool:
        """Whether the likeliest tokens are wanted and nothing else is."""
        unchanged = not self.changes_logits and not self.min_tokens
        return self.greedy and self.logprobs is None and unchanged
