"""A transformers model whose gates may choose for later layers, and learn.

Shape letters: B sequences, S positions, V vocabulary.
"""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moebatch.model.pregates import PreGates
from moebatch.schedule.activation import chosen_ahead


class GatedModel:
    """A model with gates of its own making: copies of the checkpoint's, which begin as these.

    At activation level N the gate of a layer is moved to where it reads the input of the layer with
    experts that is N earlier (Pre-gated MoE, section 3); at level 0 all stay where they are. Only
    the gates can learn.
    """

    def __init__(self, model: Any, moe_layers: Sequence[int], activation_level: int) -> None:
        """`model` is from transformers; its own gates are not changed. `close` gives it back."""
        self._model = model
        self._moe_layers = tuple(moe_layers)
        self._level = activation_level
        routers = {layer: model.model.layers[layer].mlp.gate for layer in moe_layers}
        self._gates = {layer: deepcopy(router) for layer, router in routers.items()}
        for weight in self.weights:
            weight.requires_grad_(True)
        self._later = chosen_ahead(moe_layers, activation_level)
        self._chosen: dict[int, Any] = {}
        self._hooks = [
            router.register_forward_hook(self._hook(layer)) for layer, router in routers.items()
        ]

    @property
    def weights(self) -> list[nn.Parameter]:
        """What learns: a matrix [E, D] for each layer with experts."""
        return [gate.weight for gate in self._gates.values()]

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Of the token after each, [B, S, V]."""
        logits: Tensor = self._model(tokens_BS, use_cache=False).logits
        return logits

    def pregates(self) -> PreGates:
        """The gates as they are now."""
        return PreGates(
            activation_level=self._level,
            moe_layers=self._moe_layers,
            gates_ED=[weight.detach().clone() for weight in self.weights],
        )

    def close(self) -> None:
        """The model chooses with its own gates again."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Any:
        """Says what was chosen for a layer; asks the gates that read its input."""
        is_chosen_earlier = layer in self._later.values()
        read = [] if is_chosen_earlier else [layer]
        read += [self._later[layer]] if layer in self._later else []

        def choose(router: nn.Module, inputs: tuple[Tensor, ...], output: object) -> Any:
            for target in read:
                self._chosen[target] = self._gates[target](*inputs)
            return self._chosen.pop(layer)

        return choose


def load_frozen(folder: Path) -> Any:
    """The model of a folder as transformers reads it, in float32; nothing of it can learn."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="grouped_mm"
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.eval().requires_grad_(False)
