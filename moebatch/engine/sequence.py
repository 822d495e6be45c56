"""One generation of a request while it is in work."""

from dataclasses import dataclass, field

from moebatch.engine.sampling.constraint import Constraint
from moebatch.engine.text import AnswerText
from moebatch.spec.request import Choice, Request, TokenLogprob
from moebatch.spec.workload import Length


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known so far, and how many of them the cache of keys and values holds."""

    request: Request
    choice: int
    answer: AnswerText
    constraint: Constraint | None = None
    """Of tokens that may come next; None where all may."""
    output_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached: int = 0
    num_awaited: int = 0
    """Tokens of its beginning that others had computed, or were about to, when the batcher last
    let it wait for them."""
    result: Choice | None = None
    is_dropped: bool = False
    """Its request has failed: it need not be computed any more."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.request.prompt_tokens) + len(self.output_tokens)

    @property
    def num_pending(self) -> int:
        """Known tokens that have not been through the layers: 1 while it decodes."""
        return self.num_tokens - self.num_cached

    @property
    def num_together(self) -> int:
        """Those of them that are computed as one: a prompt that is encoded, or all."""
        return self.request.num_encoded if self.is_encoding else self.num_pending

    @property
    def num_behind(self) -> int:
        """Known tokens that are computed after these."""
        return self.num_pending - self.num_together

    @property
    def is_encoding(self) -> bool:
        """Whether its prompt is still to be encoded."""
        return self.num_cached < self.request.num_encoded

    @property
    def num_before_answer(self) -> int:
        """Tokens of the prompt, without one with which the answer begins."""
        return self.request.num_encoded or self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token of its answer has been computed."""
        return self.num_cached >= self.num_before_answer and self.num_pending == 1

    @property
    def length(self) -> Length:
        """Tokens that are known, and how many the answer may still get."""
        left = self.request.sampling.max_tokens - len(self.output_tokens)
        return Length(self.num_tokens, left)

    @property
    def num_begun(self) -> int:
        """Tokens of its answer that an earlier run has left."""
        return self.request.num_begun(self.choice)

    def pending_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to compute."""
        start, prompt = self.num_cached, self.request.prompt_tokens
        if start >= len(prompt):
            return self.output_tokens[start - len(prompt) :][:count]
        head = list(prompt[start : start + count])
        rest = start + len(head) - len(prompt)
        return head + self.output_tokens[rest : rest + count - len(head)]
