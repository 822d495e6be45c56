"""Gates that may choose for later layers, and how they learn: next tokens of a text, as Pre-gated
MoE fine-tunes (section 5).

The paper trains all weights, 2,048 steps of 256 samples of 256 tokens, at a constant rate of
1e-4. Here gates alone learn, from fewer tokens and so at a higher rate.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moebatch.advance import Advance, unwatched
from moebatch.errors import CheckpointError
from moebatch.model.routing.pregates import PreGates
from moebatch.schedule.setup import chosen_ahead
from moebatch.training.reading import Reading, num_expected, reading_batches
from moebatch.training.whole_model import WholeModel, gate_matrix

_SEED = 0


class LearningGates:
    """Copies of a model's gates, which begin as these. The model chooses with them until `close`.

    At activation level N the gate of a layer is moved to where it reads the input of the layer with
    experts that is N earlier (Pre-gated MoE, section 3); at level 0 all stay where they are. Only
    they can learn.
    """

    def __init__(self, model: WholeModel, activation_level: int) -> None:
        """Raises CheckpointError where gates cannot move, see `require_movable`."""
        if activation_level:
            require_movable(model)
        self._moe_layers = tuple(model.routers)
        self._level = activation_level
        self._gates = {layer: deepcopy(router) for layer, router in model.routers.items()}
        for weight in self.weights:
            weight.requires_grad_(True)
        self._later = chosen_ahead(self._moe_layers, activation_level)
        self._chosen: dict[int, Any] = {}
        self._hooks = [
            router.register_forward_hook(self._hook(layer))
            for layer, router in model.routers.items()
        ]

    @property
    def weights(self) -> list[nn.Parameter]:
        """What learns: a matrix [E, D] for each layer with experts."""
        return list(map(gate_matrix, self._gates.values()))

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


def require_movable(model: WholeModel) -> None:
    """Raises CheckpointError where gates are given more than what experts read: what corrects the
    choice of a layer would go to another one."""
    for router in model.routers.values():
        if len(signature(router.forward).parameters) > 1:
            raise CheckpointError(
                "gates of this model are corrected from outside, which transformers does not "
                "let them take to another layer: pre-gates cannot learn"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How long gates learn, and how fast."""

    num_steps: int = 128
    batch_tokens: int = 2048
    """Of each step, about."""
    rate: float = 1e-3
    """Constant, as in the paper."""


def learn(
    model: WholeModel,
    gates: LearningGates,
    readings: Sequence[Reading],
    recipe: Recipe,
    advance: Advance = unwatched,
) -> int:
    """Has the gates with which a model chooses learn, and returns from how many tokens."""
    optimiser = torch.optim.AdamW(gates.weights, lr=recipe.rate, weight_decay=0.0)
    num_tokens = 0
    for number, step in enumerate(_steps(readings, recipe), start=1):
        expected = num_expected(step)
        for batch in reading_batches(step):
            torch.autograd.backward(model.loss(batch) / expected)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        num_tokens += sum(map(len, step))
        advance(number / recipe.num_steps)
    return num_tokens


def _steps(readings: Sequence[Reading], recipe: Recipe) -> Iterator[list[Reading]]:
    """What each step learns from, in an order of no meaning, over and over."""
    rng = np.random.default_rng(_SEED)
    queue: list[Reading] = []
    for _ in range(recipe.num_steps):
        step: list[Reading] = []
        while sum(map(len, step)) < recipe.batch_tokens:
            if not queue:
                queue = [readings[place] for place in rng.permutation(len(readings))]
            step.append(queue.pop())
        yield step
