"""What changes the answers of a model for the sake of speed."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from moebatch.model.dense_weights import DenseWeights
from moebatch.model.routing.gating import AdaptiveGating
from moebatch.model.routing.pregates import PreGates
from moebatch.spec.model.cache_layout import CacheDtype, SinkWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class Approximation:
    """How far passes depart from what the model says: as `EXACT` says, not at all.

    It decides over answers like the weights themselves, so it is part of a job's identity.
    """

    gating: AdaptiveGating | None = None
    """Leaves out experts that matter little."""
    pregates: PreGates | None = None
    """Gates instead of the model's own, which choose for later layers."""

    cache_dtype: CacheDtype | None = None
    """8 bits in which keys and values are cached, as the shape of the model then says."""

    has_half_states: bool = False
    """States of recurrences are kept in float16, as the shape of the model then says."""

    sink_window: SinkWindow | None = None
    """What tokens see of long sequences, as the shape of the model then says."""

    @property
    def gating_name(self) -> str:
        """As a job names it."""
        return "adaptive" if self.gating else "pre-gated" if self.pregates else "exact"

    @property
    def activation_level(self) -> int:
        """Gates choose for so many layers with experts ahead; 0 where each chooses for its own."""
        return self.pregates.activation_level if self.pregates else 0

    @property
    def fields(self) -> Mapping[str, str]:
        """All that it depends on, by the names under which a user knows them; empty if exact."""
        found = {} if self.gating_name == "exact" else {"experts.gating": self.gating_name}
        if self.gating is not None:
            sensitivities = self.gating.sensitivities.items()
            found["experts.threshold"] = repr(self.gating.threshold)
            found["experts.sensitivities"] = _digest({str(i): repr(of) for i, of in sensitivities})
        if self.pregates is not None:
            found["experts.pre-gates"] = self.pregates.fingerprint
        if self.cache_dtype is not None:
            found["resources.kv_cache"] = self.cache_dtype
        if self.has_half_states:
            found["resources.state_cache"] = "float16"
        if self.sink_window is not None:
            found["model.attention"] = str(self.sink_window)
        return found

    @property
    def fingerprint(self) -> str:
        """A short name for all of that; empty if exact."""
        names = [self.gating_name] if self.gating_name != "exact" else []
        names += [f"kv-{self.cache_dtype}"] if self.cache_dtype else []
        names += ["half-states"] if self.has_half_states else []
        names += ["sinks"] if self.sink_window else []
        return "-".join([*names, _digest(self.fields)]) if names else ""

    @property
    def gating_text(self) -> str:
        """What chooses experts, for a reader."""
        if self.gating is not None:
            return f"{self.gating_name}, threshold {self.gating.threshold:.4g}"
        if self.pregates is None:
            return self.gating_name
        return f"{self.gating_name}, activation level {self.activation_level}"

    def __str__(self) -> str:
        """All that is not as the model has it."""
        parts = [f"gating is {self.gating_text}"] if self.gating_name != "exact" else []
        parts += [f"keys and values are cached in {self.cache_dtype}"] if self.cache_dtype else []
        parts += ["states are kept in float16"] if self.has_half_states else []
        parts += [f"tokens see {self.sink_window}"] if self.sink_window else []
        return "; ".join(parts) or "exact"

    def replace_routers(self, weights: DenseWeights) -> None:
        """Writes gates that are not the model's own over those that are, in place."""
        if self.pregates is not None:
            self.pregates.replace_routers(weights)


EXACT = Approximation()


def _digest(values: Mapping[str, str]) -> str:
    text = json.dumps(dict(values), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
