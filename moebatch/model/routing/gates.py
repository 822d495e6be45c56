"""Gates by themselves, which say what tokens would choose.

Shape letters: R rows, D hidden, E experts.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.model.routing.router import preferences
from moebatch.spec.model.blocks import Router
from moebatch.store.dense import load_gates


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """That of one layer."""

    router: Router
    weight_ED: Tensor
    bias_E: Tensor | None = None
    correction_E: Tensor | None = None

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """How likely rows choose each expert, as `preferences`, [R, E]; where its weights are."""
        weight_ED = self.weight_ED
        logits_RE = F.linear(
            hidden_RD.to(weight_ED.device, weight_ED.dtype), weight_ED, self.bias_E
        )
        return preferences(logits_RE, self.router, self.correction_E)

    @classmethod
    def all_of(cls, files: ModelFiles, dtype: torch.dtype) -> "list[Gate]":
        """Those of all layers with experts, without anything else. Raises StorageError."""
        return [
            cls(
                router=files.shape.router,
                weight_ED=gate["router"],
                bias_E=gate.get("router_bias"),
                correction_E=gate.get("router_correction"),
            )
            for gate in load_gates(files, dtype)
        ]
