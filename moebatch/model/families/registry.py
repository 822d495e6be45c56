"""How all families are computed."""

from moebatch.model.families.family import Family
from moebatch.model.families.usual import USUAL
from moebatch.registry import Registry
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.registry import FAMILIES as DESCRIBED

FAMILIES = Registry(dict.fromkeys(DESCRIBED, USUAL))
"""By the class name in ``architectures``."""


def register(described: FamilySpec, computed: Family) -> None:
    """Adds a family from outside the package, for as long as the program runs. Raises ValueError
    for an architecture that is known already."""
    DESCRIBED.register(described.architecture, described)
    FAMILIES.register(described.architecture, computed)
