"""Which experts are worth having before a gate has spoken."""

import numpy as np
from numpy.typing import NDArray


def likely(chances: NDArray[np.float64], tokens: float) -> NDArray[np.bool_]:
    """Whether experts are likelier than not to be chosen by one of so many tokens, if `chances` are
    those of a single one."""
    return np.asarray(1 - (1 - chances) ** max(1.0, tokens) > 0.5)
