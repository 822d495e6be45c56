"""How long prompts and answers of a job are: the same in every run, and without torch or numpy, so
that a peer's interpreter can import it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp

_HALVINGS = 60
_SPREAD = 0.8
"""Standard deviation of the logarithm of ragged prompts."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of every row."""

    prompts: Sequence[int]
    answers: Sequence[int]
    num_header_tokens: int = field(default=0, kw_only=True)
    """So many tokens at the start of all prompts are the same."""

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.answers) > 0, "a row has a prompt and an answer"
        assert 0 <= self.num_header_tokens < min(self.prompts), "rows differ behind the header"

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompts)

    @property
    def answer_tokens(self) -> int:
        return sum(self.answers)


def even(num_rows: int, prompt: int, answer: int, *, header: int = 0) -> Lengths:
    """All rows alike."""
    return Lengths([prompt] * num_rows, [answer] * num_rows, num_header_tokens=header)


def ragged(
    num_rows: int,
    *,
    mean_prompt: float = 77,
    longest_prompt: int = 418,
    answers: tuple[int, int] = (8, 128),
    mean_answer: float = 64,
) -> Lengths:
    """Prompts log-normal and cut at the longest; answers between two bounds. The means are met as
    closely as rounding allows, whatever the number of rows."""
    noise = random.Random(1)
    normal = [noise.gauss(0.0, 1.0) for _ in range(num_rows)]
    shares = [noise.random() for _ in range(num_rows)]
    shortest, longest = answers

    def prompts_of(log_scale: float) -> list[int]:
        return [min(longest_prompt, max(4, round(exp(log_scale + _SPREAD * z)))) for z in normal]

    def answers_of(log_power: float) -> list[int]:
        power = exp(-log_power)
        return [round(shortest + (longest - shortest) * share**power) for share in shares]

    return Lengths(_with_mean(prompts_of, mean_prompt), _with_mean(answers_of, mean_answer))


def _with_mean(of: Callable[[float], list[int]], mean: float) -> list[int]:
    """The values whose mean comes nearest; `of` must not fall with its argument."""
    low, high = -10.0, 10.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        values = of(middle)
        if sum(values) < mean * len(values):
            low = middle
        else:
            high = middle
    return of(high)
