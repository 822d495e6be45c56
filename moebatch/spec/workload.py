"""How much there is to do: number and lengths of the sequences of a job."""

from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from moebatch.spec.model.cache_layout import UNLIMITED


class Length(NamedTuple):
    """How long a sequence is."""

    prompt_tokens: int
    new_tokens: int
    """The most that it may get."""
    shared_tokens: int = 0
    """Tokens at the beginning of its prompt that are computed for an earlier sequence."""


_MOST_LENGTHS = 8192


@dataclass(slots=True)
class LengthSample:
    """Sums of a stream of lengths, and every k-th of them, k growing so that few are kept however
    many come."""

    kept: list[Length] = field(default_factory=list)
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_shared_tokens: int = 0
    max_new_tokens: int = 0
    _every: int = 1

    def add(self, length: Length) -> None:
        """Takes the next length in."""
        if self.num_sequences % self._every == 0:
            self.kept.append(length)
        self.num_sequences += 1
        self.num_prompt_tokens += length.prompt_tokens
        self.num_new_tokens += length.new_tokens
        self.num_shared_tokens += length.shared_tokens
        self.max_new_tokens = max(self.max_new_tokens, length.new_tokens)
        if len(self.kept) > _MOST_LENGTHS:
            self.kept = self.kept[::2]
            self._every *= 2

    @property
    def mean_new_tokens(self) -> float:
        """Of all that there were, at least one."""
        return self.num_new_tokens / self.num_sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Size of a job, measured on the user's own file or stated."""

    num_sequences: int | None
    """Sequences of all rows together; None is as many as it takes to forget start and end."""
    mean_prompt_tokens: float
    mean_new_tokens: float
    """Mean of the most new tokens that the rows allow; answers may end earlier."""
    mean_shared_tokens: float = 0.0
    """Tokens of a prompt that are computed, and held, for an earlier sequence."""
    max_total_tokens: int
    """Longest prompt and answer together that was seen."""
    max_new_tokens: int = 0
    """Longest answer; 0 says that all are as long as the mean."""
    most_cached: int = UNLIMITED
    """Tokens of a sequence that are cached at once, in the layers that keep most of them."""
    is_encoded: bool = False
    """Whether an encoder takes in prompts, each in one pass, but for the last token of each, with
    which the answer begins."""
    takes_likeliest: bool = False
    """Whether no row wants more than the likeliest tokens: none is drawn or reported."""
    share_held: float = 0.0
    """Of the sequences, whose answers are held to a grammar."""
    lengths: tuple[Length, ...] = ()
    """A sample in the order of the file: every k-th sequence. Empty: all are as the means say."""

    @classmethod
    def uniform(
        cls, *, prompt_tokens: int, new_tokens: int, num_sequences: int | None = None
    ) -> "Workload":
        """All sequences are alike."""
        return cls(
            num_sequences=num_sequences,
            mean_prompt_tokens=prompt_tokens,
            mean_new_tokens=new_tokens,
            max_total_tokens=prompt_tokens + new_tokens,
        )

    @property
    def mean_total_tokens(self) -> float:
        """Prompt and answer of a mean sequence."""
        return self.mean_prompt_tokens + self.mean_new_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Those of the longest sequence that are cached at once."""
        return min(self.max_total_tokens, self.most_cached)

    @property
    def decode_context(self) -> float:
        """Positions of a mean sequence in the middle of its answer."""
        return self.mean_prompt_tokens + self.mean_new_tokens / 2

    @property
    def mean_own_tokens(self) -> float:
        """Tokens of a prompt that have to be computed for it."""
        return self.mean_prompt_tokens - self.mean_shared_tokens

    @property
    def fewest_pass_tokens(self) -> int:
        """Tokens that a pass has to have room for: those of the longest sequence, where prompts are
        not cut."""
        return self.max_total_tokens if self.is_encoded else 1

    @property
    def most_pass_tokens(self) -> int:
        """Tokens that a pass may have at most: all prompts, and one more of each sequence."""
        if self.num_sequences is None:
            return UNLIMITED
        own = ceil(self.num_sequences * (self.mean_own_tokens + 1))
        return max(own, self.fewest_pass_tokens)

    @property
    def unshared(self) -> "Workload":
        """The same where every sequence computes its whole prompt."""
        lengths = tuple(length._replace(shared_tokens=0) for length in self.lengths)
        return replace(self, mean_shared_tokens=0.0, lengths=lengths)

    @property
    def longest_answer(self) -> float:
        """Most new tokens of any sequence."""
        return max(self.max_new_tokens, self.mean_new_tokens)

    @property
    def sample(self) -> tuple[Length, ...]:
        """Lengths of typical sequences, at least one."""
        mean = Length(
            round(self.mean_prompt_tokens) or 1,
            round(self.mean_new_tokens) or 1,
            round(self.mean_shared_tokens),
        )
        return self.lengths or (mean,)
