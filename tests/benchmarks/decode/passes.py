"""Passes of a run: how prompts come in, and which of them count."""

from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_TOKENS = 32
STEADY_AFTER = 2
"""Passes that are left out after the last prompt came in."""
_FEW = 1.05


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a run."""

    decoding: int
    prompt_tokens: int
    seconds: float


def filling_left(sequences: int, tokens_per_pass: int) -> list[int]:
    """Tokens that the passes have room for while prompts come in, beside those of the sequences:
    0 but for the last one."""
    left: list[int] = []
    computed, prompts = 0, sequences * PROMPT_TOKENS
    while computed < prompts:
        budget = tokens_per_pass - computed // PROMPT_TOKENS
        left.append(max(0, computed + budget - prompts))
        computed = min(prompts, computed + budget)
    return left


def together(sequences: int, ride: int, tokens_per_pass: int) -> int:
    """At least so many tokens per pass, such that the first riders come in all at once: they then
    stay together."""
    while 0 < filling_left(sequences, tokens_per_pass)[-1] < ride:
        tokens_per_pass += PROMPT_TOKENS
    return tokens_per_pass


def steady(passes: Sequence[Pass], sequences: int, ride: int = 0) -> list[Pass]:
    """Passes in which that many decode, a few beside them included, and so many prompt tokens
    come in; the first ones after the filling are left out."""
    filled = next((i for i, one in enumerate(passes) if one.decoding >= sequences), len(passes))
    return [
        one
        for one in passes[filled + STEADY_AFTER :]
        if sequences <= one.decoding <= sequences * _FEW and one.prompt_tokens == ride
    ]
