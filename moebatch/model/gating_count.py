"""How often choices of gates have been left out.

Shape letters: R rows, K experts per token.
"""

from torch import Tensor


class GatingCount:
    """Counts decisions of gates, a token at a layer each, and what was left of them.

    The sums stay where the gates are computed until somebody asks: a GPU does not wait for them.
    """

    def __init__(self) -> None:
        self.num_decisions = 0
        self._left_out_K: Tensor | None = None

    def add(self, is_left_out_RK: Tensor) -> None:
        """More decisions. Choices that are left out are the last ones of their rows."""
        self.num_decisions += len(is_left_out_RK)
        left_out_K = is_left_out_RK.sum(dim=0)
        if self._left_out_K is None:
            self._left_out_K = left_out_K
        else:
            self._left_out_K.add_(left_out_K)

    @property
    def single_share(self) -> float:
        """Decisions for a single expert among all, 0..1; 0 before the first one."""
        left_out = self._left_out
        if not left_out:
            return 0.0
        return 1.0 if len(left_out) == 1 else left_out[1] / self.num_decisions

    @property
    def mean_experts(self) -> float:
        """Experts of a decision in the mean; 0 before the first one."""
        left_out = self._left_out
        return len(left_out) - sum(left_out) / self.num_decisions if left_out else 0.0

    @property
    def _left_out(self) -> list[int]:
        """By choice, how often it was left out."""
        return [] if self._left_out_K is None else self._left_out_K.tolist()
