"""What gates have seen, beside what they chose: the material that predictors learn from.

Shape letters: L MoE layers, N tokens, D hidden, K experts per token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Tokens with what each gate has seen of them, and what it chose."""

    hidden_LND: NDArray[np.float16]
    experts_LNK: NDArray[np.uint16]
    tokens_N: NDArray[np.int64]
    is_first_N: NDArray[np.bool_]
    """Tokens that do not follow the one before them in the same sequence."""

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.tokens_N)

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return len(self.experts_LNK)

    @property
    def followed_N(self) -> NDArray[np.intp]:
        """Tokens whose successor in their sequence is the next one."""
        return np.flatnonzero(~self.is_first_N[1:])
