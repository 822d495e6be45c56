"""Shapes of models out of their ``config.json``."""

from collections.abc import Mapping
from typing import Any

from moebatch.quoting import shown
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.config_keys import ConfigFault, FaultyConfig
from moebatch.spec.model.shape import ModelShape

_ACTIVATIONS = (
    "gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh "
    "hardswish laplace leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu "
    "sqrtsoftplus swish tanh xielu"
)
ACTIVATIONS = frozenset(_ACTIVATIONS.split())
"""Names that transformers knows: looking there would take seconds."""
_LEARNT = ("prelu", "xielu")


def read_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a raw ``config.json`` describes, absent keys as transformers fills them.

    Raises FaultyConfig, with ``where`` and all faults at once, for architectures and
    quantisations that are not supported and for figures that make no sense.
    """
    return _family(config, where).shape(config, where)


def read_planned_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """As `read_shape`, of a model that has experts to be placed. Raises FaultyConfig for others."""
    shape = read_shape(config, where)
    if not shape.moe_layers:
        message = "no layer has experts; Mixture-of-Experts models are planned and run"
        raise FaultyConfig(where, [ConfigFault("architectures", message, names_key=True)])
    return shape


def read_runnable_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """As `read_planned_shape`, of a model that the decoder computes. Raises FaultyConfig for
    others."""
    shape = read_planned_shape(config, where)
    name = shape.activation
    if name not in ACTIVATIONS or name in _LEARNT:
        why = "has weights of its own, which are not read" if name in _LEARNT else "is not known"
        message = f"hidden_act {shown(name)} {why}"
        raise FaultyConfig(where, [ConfigFault("hidden_act", message, names_key=True)])
    return shape


def _family(config: Mapping[str, Any], where: str) -> FamilySpec:
    architectures = config.get("architectures")
    model_type = config.get("model_type")
    if isinstance(architectures, list) and architectures:
        found = architectures[0]
        family = FAMILIES.get(found) if isinstance(found, str) else None
        if family is not None and model_type not in family.types:
            others = (each for each in FAMILIES.values() if each.runs_as == found)
            family = next((each for each in others if model_type in each.types), family)
    else:
        found = model_type
        by_type = {family.model_type: family for family in FAMILIES.values()}
        family = by_type.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        message = (
            f"architecture {shown(found)} is not supported; docs/models.md lists the families of "
            "models with experts that are"
        )
        raise FaultyConfig(where, [ConfigFault("architectures", message, names_key=True)])
    return family
