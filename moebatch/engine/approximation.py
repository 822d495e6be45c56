"""What changes the answers of a model for the sake of speed."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from moebatch.model.dense_weights import DenseWeights
from moebatch.model.gating import AdaptiveGating
from moebatch.model.pregates import PreGates


@dataclass(frozen=True, kw_only=True, slots=True)
class Approximation:
    """How far passes depart from what the model says: as `EXACT` says, not at all.

    It decides over answers like the weights themselves, so it is part of a job's identity.
    """

    gating: AdaptiveGating | None = None
    """Leaves out experts that matter little."""
    pregates: PreGates | None = None
    """Gates instead of the model's own, which choose for later layers."""

    @property
    def name(self) -> str:
        """As a job names it."""
        return "adaptive" if self.gating else "pre-gated" if self.pregates else "exact"

    @property
    def activation_level(self) -> int:
        """Gates choose for so many layers with experts ahead; 0 where each chooses for its own."""
        return self.pregates.activation_level if self.pregates else 0

    @property
    def fields(self) -> Mapping[str, str]:
        """All that it depends on, by the names under which a user knows them; empty if exact."""
        found = {} if self == EXACT else {"experts.gating": self.name}
        if self.gating is not None:
            sensitivities = self.gating.sensitivities.items()
            found["experts.threshold"] = repr(self.gating.threshold)
            found["experts.sensitivities"] = _digest({str(i): repr(of) for i, of in sensitivities})
        if self.pregates is not None:
            found["experts.pre-gates"] = self.pregates.fingerprint
        return found

    @property
    def fingerprint(self) -> str:
        """A short name for all of that; empty if exact."""
        return f"{self.name}-{_digest(self.fields)}" if self.fields else ""

    def replace_routers(self, weights: DenseWeights) -> None:
        """Writes gates that are not the model's own over those that are, in place."""
        if self.pregates is not None:
            self.pregates.replace_routers(weights)

    def __str__(self) -> str:
        if self.gating is not None:
            return f"{self.name}, threshold {self.gating.threshold:.4g}"
        if self.pregates is None:
            return self.name
        return f"{self.name}, activation level {self.activation_level}"


EXACT = Approximation()


def _digest(values: Mapping[str, str]) -> str:
    text = json.dumps(dict(values), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
