"""How much there is to do: number and lengths of the sequences of a job."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Size of a job, measured on the user's own file."""

    num_sequences: int
    """Sequences of all rows together."""
    mean_prompt_tokens: float
    mean_new_tokens: float
    """Mean of the most new tokens that the rows allow; answers may end earlier."""
    max_total_tokens: int
    """Longest prompt and answer together that was seen."""

    @property
    def mean_total_tokens(self) -> float:
        """Prompt and answer of a mean sequence."""
        return self.mean_prompt_tokens + self.mean_new_tokens
