"""What a layer is given where tokens learn of each other, by attention or by recurrence.

Shape letters: N rows after bucketing, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from moebatch.model.attention.by_torch import Parts
from moebatch.model.batch import MicroBatch
from moebatch.model.products import Weights
from moebatch.model.recurrence.plan import RecurrentPlan
from moebatch.model.rope import Angles
from moebatch.model.scratch import Frame


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """A layer over a micro-batch: scratch, tokens, and what the layer has of its own."""

    layer: int
    frame: Frame
    normed_ND: Tensor
    """Its input through the norm before it, or as it is where no one asks for that; rows beyond the
    micro-batch hold garbage."""
    micro_batch: MicroBatch
    weights: Weights
    parts: Parts = ()
    """What the layer keeps of all sequences: of their tokens, and states behind."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.micro_batch.num_tokens

    @property
    def angles(self) -> Angles:
        """By how much its queries and keys are rotated."""
        return self.micro_batch.angles[self.layer]

    @property
    def recurrent(self) -> RecurrentPlan:
        """What a recurrent layer has to know of the micro-batch."""
        assert self.micro_batch.recurrent is not None, "the model has recurrent layers"
        return self.micro_batch.recurrent
