"""What layers are computed by."""

from typing import NamedTuple

import torch

from moebatch.model.elementwise import Elementwise
from moebatch.model.products import Products
from moebatch.spec.model.blocks import ClampedGate


class Operators(NamedTuple):
    """Products with stored weights, and what is done between them, on one device. Their
    buffer is for one thread at a time."""

    products: Products
    elementwise: Elementwise

    @property
    def device(self) -> torch.device:
        return self.products.device

    def clamping(self, clamped: ClampedGate | None) -> "Operators":
        """The same whose gates do that."""
        return Operators(self.products, self.elementwise.clamping(clamped))
