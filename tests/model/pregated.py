"""Transformers' models with pre-gates in the place of their gates: the oracle, done plainly."""

import types
from typing import Any

import torch

from moebatch.model.pregates import PreGates


def moe_layers_of(model: Any) -> tuple[int, ...]:
    """Layers that have experts."""
    layers = enumerate(model.model.layers)
    return tuple(number for number, layer in layers if hasattr(layer.mlp, "experts"))


def random_pregates(model: Any, level: int, *, seed: int = 0) -> PreGates:
    """Gates unlike any of the model's, of about their size."""
    moe_layers = moe_layers_of(model)
    generator = torch.Generator().manual_seed(seed)
    size = model.model.layers[moe_layers[0]].mlp.gate.weight.shape
    gates = [0.6 * torch.randn(size, generator=generator) for _ in moe_layers]
    return PreGates(moe_layers=moe_layers, activation_level=level, gates_ED=gates)


def with_pregates(model: Any, pregates: PreGates) -> Any:
    """The model, whose gates now answer what an earlier layer has chosen."""
    chosen: dict[int, Any] = {}
    blocks = pregates.moe_layers
    for number, layer in enumerate(blocks):
        model.model.layers[layer].mlp.gate.forward = _gate(model, pregates, number, chosen)
    return model


def _gate(model: Any, pregates: PreGates, number: int, chosen: dict[int, Any]) -> Any:
    """What the gate of a block does: says what was chosen, and chooses for a later one."""
    blocks, level = pregates.moe_layers, pregates.activation_level
    router = model.model.layers[blocks[number]].mlp.gate
    own = type(router).forward

    def forward(hidden: torch.Tensor) -> Any:
        def ask(which: int) -> Any:
            weight = pregates.gates_ED[which]
            return own(types.SimpleNamespace(**vars(router), weight=weight), hidden)

        answer = ask(number) if number < level else chosen.pop(number)
        if number + level < len(blocks):
            chosen[number + level] = ask(number + level)
        return answer

    return forward
