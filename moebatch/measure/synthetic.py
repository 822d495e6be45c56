"""A model of one layer that exists only to be timed: small random weights, no checkpoint.

Shape letters: T tokens, D hidden, K experts per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebatch.formats.registry import FORMATS
from moebatch.formats.weight_format import WeightFormat
from moebatch.layout.scratch import Limits
from moebatch.measure.sizes import ModelSizes
from moebatch.model.decoder import Decoder
from moebatch.model.dense_weights import DenseWeights
from moebatch.spec.model.attention import Sizes
from moebatch.spec.model.cache_layout import KvCache
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from moebatch.spec.model.stored_experts import StoredExperts

_PATTERN_ELEMENTS = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticLayer:
    """A decoder of one layer and the weights that it was given."""

    shape: ModelShape
    decoder: Decoder
    experts: StoredExperts
    weights: dict[str, Tensor]

    def hidden_states(self, num_tokens: int) -> Tensor:
        """Random inputs [T, D] of the layer."""
        x_TD = torch.empty(
            num_tokens, self.shape.hidden_size, dtype=self.decoder.dtype, device=self.decoder.device
        )
        return fill(x_TD, scale=1.0)


def synthetic_layer(
    sizes: ModelSizes,
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
    *,
    stored: WeightFormat | None = None,
    cached_in: KvCache = "full",
) -> SyntheticLayer:
    """A layer of that size whose attention adds nothing, so that it may be applied for ever.

    Experts are `stored` so, if another way than they are computed in, and keys and values cached.
    """
    config = _config(sizes, limits.context_tokens)
    shape = read_shape(config, "synthetic").cached_in(cached_in)

    def weights(sizes: Sizes) -> dict[str, Tensor]:
        made = {role: torch.empty(size, dtype=dtype, device=device) for role, size in sizes.items()}
        return {role: w.zero_() if role == "o" else fill(w, scale=0.02) for role, w in made.items()}

    dense = DenseWeights.of(weights(shape.global_tensors()), [weights(shape.layer_tensors(0))])
    stored = stored or FORMATS[str(dtype).removeprefix("torch.")]
    experts = StoredExperts.of(shape, stored)
    decoder = Decoder(shape, config, dense, limits, experts=experts)
    decoder.scratch.buffer.zero_()
    weights_of_layer = dict(dense.layers[0])
    return SyntheticLayer(shape=shape, decoder=decoder, experts=experts, weights=weights_of_layer)


def fill(tensor: Tensor, *, scale: float) -> Tensor:
    """Normal noise, repeated, since drawing it for every element would take seconds."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(_PATTERN_ELEMENTS, generator=generator).mul_(scale).to(tensor)
    for part in torch.split(tensor.view(-1), _PATTERN_ELEMENTS):
        part.copy_(pattern[: len(part)])
    return tensor


def _config(sizes: ModelSizes, context_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.expert_width,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "num_local_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "max_position_embeddings": max(context_tokens, 16),
        "sliding_window": None,
    }
