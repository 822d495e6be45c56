"""Types of numpy arrays. A suffix at a name says what its axes count: ``lengths_S``."""

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
