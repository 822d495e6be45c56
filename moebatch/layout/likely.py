"""How many experts are worth having before a gate has chosen.

Shape letters: E experts, K experts per token.
"""

import numpy as np
from numpy.typing import NDArray


def chances_of_any(chances_E: NDArray[np.float64], tokens: float) -> NDArray[np.float64]:
    """With what chance at least one of so many tokens chooses each expert, 1 - (1 - p)^T, if
    `chances_E` are those of a single one."""
    chosen_E: NDArray[np.float64] = 1 - (1 - np.clip(chances_E, 0.0, 1.0)) ** max(1.0, tokens)
    return chosen_E


def num_likely(chances_E: NDArray[np.float64], tokens: float) -> int:
    """As many experts as so many tokens will probably choose between them, if `chances_E` are those
    of a single one: their expected number, sum of 1 - (1 - p)^T. Of one token that is K, as ProMoE
    predicts (its section on the predictor); of many it is all that are popular.

    No bar for each of them: what was foreseen in vain comes behind all that was chosen and is given
    up when the gate has chosen, so it costs a chunk at most, and what was not foreseen costs an
    expert's whole time.
    """
    return round(float(chances_of_any(chances_E, tokens).sum()))
