"""Transformers' models with pre-gates in the place of their gates: the oracle, done plainly."""

from copy import deepcopy
from typing import Any

import torch

from moebatch.model.routing.pregates import PreGates
from moebatch.training.whole_model import gate_matrix


def moe_layers_of(model: Any) -> tuple[int, ...]:
    """Layers that have experts, as transformers numbers them."""
    layers = range(len(model.model.layers))
    return tuple(layer for layer in layers if hasattr(block_of(model, layer), "experts"))


def block_of(model: Any, layer: int) -> Any:
    """Gate and experts of a layer, or its MLP."""
    names = ("block_sparse_moe", "mlp", "feed_forward", "mixer")
    found = model.model.layers[layer]
    return next(getattr(found, name) for name in names if hasattr(found, name))


def router_of(model: Any, layer: int) -> Any:
    """The gate of a layer that has experts."""
    block = block_of(model, layer)
    return block.gate if hasattr(block, "gate") else block.router


def random_pregates(
    model: Any, level: int, *, seed: int = 0, numbers: tuple[int, ...] | None = None
) -> PreGates:
    """Gates unlike any of the model's, of about their size. `numbers` are those of layers with
    experts, where they are not transformers'."""
    moe_layers = moe_layers_of(model)
    generator = torch.Generator().manual_seed(seed)
    size = gate_matrix(router_of(model, moe_layers[0])).shape
    gates = [0.6 * torch.randn(size, generator=generator) for _ in moe_layers]
    return PreGates(moe_layers=numbers or moe_layers, activation_level=level, gates_ED=gates)


def with_pregates(model: Any, pregates: PreGates) -> Any:
    """The model, whose gates now answer what an earlier layer has chosen."""
    routers = [router_of(model, layer) for layer in moe_layers_of(model)]
    gates = [deepcopy(router) for router in routers]
    for gate, weight_ED in zip(gates, pregates.gates_ED, strict=True):
        gate_matrix(gate).data = weight_ED
    chosen: dict[int, Any] = {}
    for number, router in enumerate(routers):
        router.forward = _forward(gates, pregates.activation_level, number, chosen)
    return model


def _forward(gates: list[Any], level: int, number: int, chosen: dict[int, Any]) -> Any:
    """What the gate of a block does: says what was chosen, and chooses for a later one."""

    def forward(hidden: torch.Tensor) -> Any:
        answer = gates[number](hidden) if number < level else chosen.pop(number)
        if number + level < len(gates):
            chosen[number + level] = gates[number + level](hidden)
        return answer

    return forward
