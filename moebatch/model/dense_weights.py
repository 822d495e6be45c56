"""Weights outside the experts, as a decoder computes with them."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.checkpoint.index import Weight
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.spec.model.shape import ModelShape
from moebatch.store.dense import DenseLoader
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.streamed_layers import StreamedLayers

_MOVED_COLUMNS = 256
_APART = {
    "gated_q": ("output_gate", "q"),
    "gated_q_bias": ("output_gate_bias", "q_bias"),
    "mlp_gate_up": ("mlp_gate", "mlp_up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
}
"""Two halves of a matrix: an output is gated after it has been computed."""
_TOGETHER = (
    ("qkv", ("q", "k", "v")),
    ("qkv_bias", ("q_bias", "k_bias", "v_bias")),
    ("qk", ("q", "k")),
    ("qk_bias", ("q_bias", "k_bias")),
    ("cross_kv", ("cross_k", "cross_v")),
    ("delta_qkv", ("delta_q", "delta_k", "delta_v")),
    ("delta_qkvz", ("delta_qkv", "delta_z")),
    ("delta_ba", ("delta_b", "delta_a")),
    ("recurrent_in", ("delta_qkvz", "delta_ba")),
    ("recurrent_in", ("lightning_qkv", "lightning_gate")),
    ("recurrent_conv", tuple(f"recurrent_conv_{role}" for role in "qkv")),
)
"""Projections of the same input, and convolutions of what they make: one product of one matrix is a
third faster than three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeights:
    """Everything but the experts, by role, on the device of the computation and in its dtype, or in
    float32 where the model's `exact_roles` say so."""

    globals: Mapping[str, Tensor]
    layers: Sequence[Mapping[str, Tensor]]
    """The projections of queries, keys and values are one matrix, ``qkv``, or ``qk`` where there
    are none for values, as are their biases."""

    @property
    def sink_scores(self) -> dict[int, Tensor]:
        """By layer what takes part in the softmax of every head, [H], where something does."""
        name = "sink_scores"
        return {layer: roles[name] for layer, roles in enumerate(self.layers) if name in roles}

    @classmethod
    def of(
        cls, all_layers: Mapping[str, Tensor], layers: Sequence[Mapping[str, Tensor]]
    ) -> "DenseWeights":
        """From the roles of `ModelShape.global_tensors` and `ModelShape.layer_tensors`."""
        return cls(globals=all_layers, layers=[_with_joined(roles) for roles in layers])

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        memory: DeviceMemory | None = None,
        streamed: StreamedLayers | None = None,
    ) -> "DenseWeights":
        """Those of a model, in main memory or on a device, but for those of layers that are
        `streamed`. Raises StorageError, and DoesNotFit if the device has no room."""
        of_all, shape = files.global_weights(), files.shape
        staying = [files.layer_weights(layer) for layer in range(shape.num_layers)]
        moving: list[dict[str, Tensor]] = [{} for _ in staying]
        if streamed is not None:
            for layer, roles in enumerate(staying):
                if layer in streamed:
                    taken = {
                        role: roles.pop(role)
                        for role, weight in [*roles.items()]
                        if shape.is_streamed(role, weight.shape)
                    }
                    moving[layer] = _load_below(files, layer, taken, streamed)
        all_layers, *of_layers = _load(files, {None: of_all, **dict(enumerate(staying))}, memory)
        return cls.of(
            all_layers, [one | other for one, other in zip(of_layers, moving, strict=True)]
        )


def _load_below(
    files: ModelFiles, layer: int, taken: Mapping[str, Weight], streamed: StreamedLayers
) -> dict[str, Tensor]:
    """Where weights of a layer will be; what was loaded of it is gone before the next one."""
    (loaded,) = _load(files, {layer: taken})
    return streamed.store(layer, _with_joined(loaded))


def _load(
    files: ModelFiles,
    wanted: Mapping[int | None, Mapping[str, Weight]],
    memory: DeviceMemory | None = None,
) -> list[dict[str, Tensor]]:
    """Weights of some layers, or of none in particular, by role, in one piece of memory."""
    exact = dict.fromkeys(files.shape.exact_roles, torch.float32)
    loader = DenseLoader(
        (
            (weight, exact.get(role, files.dtype))
            for roles in wanted.values()
            for role, weight in roles.items()
        ),
        memory,
    )
    with closing(loader):
        return [
            {
                role: prepared(
                    files.shape,
                    layer or 0,
                    role,
                    loader.load(weight, exact.get(role, files.dtype)),
                )
                for role, weight in roles.items()
            }
            for layer, roles in wanted.items()
        ]


def prepared(shape: ModelShape, layer: int, role: str, weight: Tensor) -> Tensor:
    """A weight as it is computed with, in place of how it is stored."""
    order = shape.row_order(role, layer)
    if order is not None:
        rows = torch.tensor(order, device=weight.device)
        for columns in torch.split(weight.view(len(weight), -1), _MOVED_COLUMNS, dim=1):
            columns.copy_(columns.index_select(0, rows))
    if role == "router_norm":
        weight.mul_(shape.hidden_size**-0.5)
    if role == "router" and shape.router.logit_scale != 1:
        weight.mul_(shape.router.logit_scale)
    if (mixing := shape.mixing_of(role, layer)) is not None:
        weight.div_(mixing.temperature).sigmoid_()
    return weight.add_(1) if shape.norm.counts(role) else weight


def _with_joined(roles: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined = dict(roles)
    for whole, halves in _APART.items():
        if whole in joined:
            joined |= zip(halves, joined.pop(whole).chunk(2), strict=True)
    for whole, parts in _TOGETHER:
        if all(part in joined for part in parts):
            joined[whole] = _stacked([joined.pop(part) for part in parts])
    return joined


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """One below the other; a view where they follow each other in memory, as when they were loaded
    one after the other, else a copy."""
    first = parts[0]
    place, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != place or part.data_ptr() != end:
            return torch.cat(list(parts))
        end += part.nbytes
    size = (sum(map(len, parts)), *first.shape[1:])
    return first.as_strided(size, first.stride())
