"""How much what experts make matters to the loss, layer by layer."""

from collections.abc import Sequence

from moebatch.training.reading import Reading, reading_batches
from moebatch.training.whole_model import WholeModel


def fisher_sums(model: WholeModel, readings: Sequence[Reading]) -> dict[int, float]:
    """Of each MoE layer, the sum of the diagonal of F = mean of g g^T over tokens, where g = dL/dO:
    L the loss of a sequence, O what the layer's experts make of a token (AdapMoE, Eq. 6)."""
    sums: dict[int, float] = {}
    for batch in reading_batches(readings):
        for layer, of_batch in model.squared_gradients(batch).items():
            sums[layer] = sums.get(layer, 0.0) + of_batch
    num_tokens = sum(map(len, readings))
    return {layer: of / num_tokens for layer, of in sums.items()}
