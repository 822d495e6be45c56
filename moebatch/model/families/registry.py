"""How all families are computed."""

from dataclasses import replace

from moebatch.model.families.family import Family
from moebatch.model.families.usual import USUAL
from moebatch.model.latent_attention import LatentAttentionBlock
from moebatch.registry import Registry
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.registry import FAMILIES as DESCRIBED

_LATENT = replace(USUAL, attention=LatentAttentionBlock)
_UNUSUAL = {
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT,
}
FAMILIES = Registry({name: _UNUSUAL.get(name, USUAL) for name in DESCRIBED})
"""By the class name in ``architectures``."""


def register(described: FamilySpec, computed: Family) -> None:
    """Adds a family from outside the package, for as long as the program runs. Raises ValueError
    for an architecture that is known already."""
    DESCRIBED.register(described.architecture, described)
    FAMILIES.register(described.architecture, computed)
