"""Gates in the place of a model's own, which may choose for later layers, and learn."""

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from moebatch.model.pregates import PreGates
from moebatch.schedule.setup import chosen_ahead
from moebatch.training.whole_model import WholeModel


class LearningGates:
    """Copies of a model's gates, which begin as these. The model chooses with them until `close`.

    At activation level N the gate of a layer is moved to where it reads the input of the layer with
    experts that is N earlier (Pre-gated MoE, section 3); at level 0 all stay where they are. Only
    they can learn.
    """

    def __init__(self, model: WholeModel, activation_level: int) -> None:
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
        return [gate.weight for gate in self._gates.values()]

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
