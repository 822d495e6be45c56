"""A policy as MoE-Lightning's planner knows it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperPolicy:
    """The six unknowns of Table 1."""

    micro_batch_size: int
    """mu."""
    num_micro_batches: int
    """M."""
    r_w: float
    r_c: float = 0.0
    attention_on_gpu: bool = False
    """A_g."""
    ffn_on_gpu: bool = True
    """F_g."""

    @property
    def batch_size(self) -> int:
        """N, sequences."""
        return self.num_micro_batches * self.micro_batch_size
