"""What changes the answers of a model for the sake of speed."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from moebatch.model.gating import AdaptiveGating


@dataclass(frozen=True, kw_only=True, slots=True)
class Approximation:
    """How far passes depart from what the model says: as `EXACT` says, not at all.

    It decides over answers like the weights themselves, so it is part of a job's identity.
    """

    gating: AdaptiveGating | None = None
    """Leaves out experts that matter little."""

    @property
    def fields(self) -> Mapping[str, str]:
        """All that it depends on, by the names under which a user knows them; empty if exact."""
        if self.gating is None:
            return {}
        return {
            "experts.gating": "adaptive",
            "experts.threshold": repr(self.gating.threshold),
            "experts.sensitivities": _digest(
                {str(layer): repr(of) for layer, of in self.gating.sensitivities.items()}
            ),
        }

    @property
    def fingerprint(self) -> str:
        """A short name for all of that; empty if exact."""
        return f"adaptive-{_digest(self.fields)}" if self.gating else ""

    def __str__(self) -> str:
        if self.gating is None:
            return "exact"
        return f"adaptive, threshold {self.gating.threshold:.4g}"


EXACT = Approximation()


def _digest(values: Mapping[str, str]) -> str:
    text = json.dumps(dict(values), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
