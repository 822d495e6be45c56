"""Gates by themselves, which say what tokens would choose.

Shape letters: R rows, D hidden, E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.model.dense_weights import prepared
from moebatch.model.routing.router import preferences
from moebatch.spec.model.blocks import Router
from moebatch.store.dense import load_gates


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """That of one layer."""

    router: Router
    num_experts: int
    """E; behind them a gate may know of choices that compute nothing."""
    weight_ED: Tensor
    bias_E: Tensor | None = None
    correction_E: Tensor | None = None

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """How likely rows choose each expert, by what experts see of them, as `preferences`,
        [R, E]; where its weights are."""
        weight_ED = self.weight_ED
        logits_RE = F.linear(
            hidden_RD.to(weight_ED.device, weight_ED.dtype), weight_ED, self.bias_E
        )
        return preferences(logits_RE, self.router, self.correction_E)[:, : self.num_experts]

    @classmethod
    def all_of(cls, files: ModelFiles, dtype: torch.dtype) -> "list[Gate]":
        """Those of all layers with experts, without anything else. Raises StorageError."""
        shape = files.shape
        gates = [
            {role: prepared(shape, layer, role, weight) for role, weight in gate.items()}
            for layer, gate in zip(shape.moe_layers, load_gates(files, dtype), strict=True)
        ]
        return [
            cls(
                # Where experts are looked up by tokens, a gate only weighs them.
                router=replace(
                    shape.router,
                    has_correction="router_correction" in gate,
                ),
                num_experts=shape.num_experts,
                weight_ED=_on_input_of_experts(gate),
                bias_E=gate.get("router_bias"),
                correction_E=gate.get("router_correction"),
            )
            for gate in gates
        ]


def _on_input_of_experts(gate: Mapping[str, Tensor]) -> Tensor:
    """The weights of a gate, [E, D]; of one that has a norm of its own those that make the same of
    what the norm of experts gives. Where that gives nothing, nothing is known."""
    weight_ED = gate["router"]
    if "router_norm" not in gate:
        return weight_ED
    norm_D, of_experts_D = gate["router_norm"], gate["mlp_norm"]
    ratio_D = (norm_D / of_experts_D).masked_fill(of_experts_D == 0, 0.0)
    return (weight_ED * ratio_D).to(weight_ED.dtype)
