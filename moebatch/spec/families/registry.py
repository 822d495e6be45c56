"""All families: those that the modules of this folder describe."""

from importlib import import_module
from pkgutil import iter_modules

from moebatch.registry import Registry
from moebatch.spec import families
from moebatch.spec.families.family import FamilySpec

_MODULES = [
    import_module(f"{families.__name__}.{found.name}") for found in iter_modules(families.__path__)
]
FAMILIES = Registry(
    {
        family.architecture: family
        for module in _MODULES
        for name, family in vars(module).items()
        if isinstance(family, FamilySpec) and not name.startswith("_")
    }
)
"""By the class name in ``architectures``. A family from outside the package is added by
`moebatch.model.families.registry.register`."""
