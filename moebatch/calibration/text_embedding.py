"""What a model makes of the tokens of a text before its first layer.

Shape letters: N tokens, U different ones of a text, D hidden.
"""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.store.dense import load_embedded


class TextEmbedding:
    """Read when it is first asked: a text has a part of the vocabulary."""

    def __init__(self, files: ModelFiles, tokens_N: NDArray[np.int64]) -> None:
        self._files = files
        self._tokens_U = np.unique(tokens_N)

    def __call__(self, tokens_N: NDArray[np.int64]) -> Tensor:
        """Of tokens of that text, [N, D]. Raises StorageError."""
        return self._embedded_UD[torch.from_numpy(np.searchsorted(self._tokens_U, tokens_N))]

    @cached_property
    def _embedded_UD(self) -> Tensor:
        return load_embedded(self._files, self._tokens_U.tolist())
