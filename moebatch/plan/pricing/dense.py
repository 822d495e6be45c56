"""Numbers of weights outside experts, by where in a layer tokens go through them."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from moebatch.spec.model.shape import ModelShape


class Mixed(NamedTuple):
    """Numbers of weights of a mean layer."""

    decoding: int
    """Through which tokens go; those of answers, where there is an encoder."""
    encoding: int
    """Through which tokens of prompts go that are encoded."""


class Stack(NamedTuple):
    """Layers through which the same tokens go."""

    layers: range
    num_moe: int
    """Of them with experts."""
    num_mlps: int
    """Of them with experts or an MLP."""
    params: int
    """`gates` and `shared` of all of them."""


@dataclass(frozen=True)  # no slots: what follows from it is worked out once
class DenseParams:
    """Those of a model."""

    shape: ModelShape

    @cached_property
    def gates(self) -> tuple[int, ...]:
        """By layer: all weights that are neither attention's, nor a recurrence's, nor those of
        experts, shared ones included."""
        shape = self.shape
        return tuple(
            shape.resident_layer_params(layer)
            - shape.mixer_params(layer)
            - (1 + shape.has_mlp(layer)) * shape.hidden_size
            - self.shared[layer]
            for layer in range(shape.num_layers)
        )

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """By layer: those of the expert that all tokens share."""
        shape = self.shape
        return tuple(map(shape.shared_expert_params, range(shape.num_layers)))

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """One, or two where there is an encoder."""
        shape, encoding = self.shape, self.shape.num_encoding_layers
        return tuple(
            Stack(
                layers,
                num_moe=sum(map(shape.is_moe, layers)),
                num_mlps=sum(map(shape.has_mlp, layers)),
                params=sum(self.gates[layer] + self.shared[layer] for layer in layers),
            )
            for layers in (range(encoding), range(encoding, shape.num_layers))
            if layers
        )

    @cached_property
    def projected(self) -> Mixed:
        """Before attention."""
        shape = self.shape
        if shape.encoder is None:
            out = self.put_out.decoding
            return Mixed(self._mixer + 2 * shape.hidden_size - out, 0)
        # Queries, keys and values, and queries once more; or keys and values of what is encoded.
        layers, encoding = shape.num_layers, shape.num_encoding_layers
        projection, decoding = self._projection, layers - encoding
        return Mixed(
            4 * decoding * projection // layers,
            (3 * encoding + 2 * decoding) * projection // layers,
        )

    @cached_property
    def put_out(self) -> Mixed:
        """Behind attention. A mean layer may be mostly recurrent."""
        shape, projection = self.shape, self._projection
        if shape.encoder is None:
            return Mixed(min(projection, self._mixer // 2), 0)
        layers, encoding = shape.num_layers, shape.num_encoding_layers
        return Mixed(
            2 * (layers - encoding) * projection // layers, encoding * projection // layers
        )

    @cached_property
    def _mixer(self) -> int:
        """In the attention, or the recurrence, of a mean layer."""
        return self.shape.all_mixer_params // self.shape.num_layers

    @cached_property
    def _projection(self) -> int:
        """In the output projection of a mean layer that attends."""
        hidden, attending = self.shape.hidden_size, self.shape.attending
        return sum(prod(each.tensors(hidden)["o"]) for each in attending) // len(attending)
