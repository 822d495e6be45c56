"""All formats of weights that there are."""

from collections.abc import Mapping
from typing import Any

from moebatch.errors import CheckpointError
from moebatch.formats.codebooks import FP4, NF4
from moebatch.formats.four_bit_floats import (
    DEEPSEEK_FP4,
    MXFP4,
    NVFP4,
    PACKED_MXFP4,
    PACKED_NVFP4,
)
from moebatch.formats.packed_integers import PACKED_INT4, PACKED_INT8
from moebatch.formats.plain import BFLOAT16, FLOAT16, FLOAT32
from moebatch.formats.scaled_bytes import FP8, INT8
from moebatch.formats.weight_format import Look, WeightFormat
from moebatch.formats.words import AWQ, GPTQ, GPTQ_INT8
from moebatch.quoting import shown
from moebatch.registry import Registry

_PLAIN = (FLOAT32, BFLOAT16, FLOAT16)
_FOUR_BITS = (
    *(PACKED_INT4, GPTQ, AWQ, NF4, FP4),
    *(MXFP4, PACKED_MXFP4, DEEPSEEK_FP4, NVFP4, PACKED_NVFP4),
)
_EIGHT_BITS = (PACKED_INT8, FP8, INT8, GPTQ_INT8)
FORMATS: Registry[WeightFormat] = Registry(
    {format.name: format for format in (*_PLAIN, *_FOUR_BITS, *_EIGHT_BITS)}
)
"""By name. ``FORMATS.register`` adds one from outside the package."""


def measured_formats() -> tuple[WeightFormat, ...]:
    """Those whose decoding is measured, some of them in several variants."""
    return tuple(variant for stored in FORMATS.values() for variant in stored.variants)


def find_format(
    name: str, shape: tuple[int, ...], look: Look, likely: WeightFormat | None = None
) -> WeightFormat | None:
    """The format in which a checkpoint stores the weight `name`: the tensors say so, whatever
    ``config.json`` says. None where no format fits, for a missing weight among others.

    `likely` is one whose parameters hold wherever the tensors have its shapes: small matrices may
    leave open how large the groups are that share a scale.
    """
    if len(shape) < 2:  # vectors are not quantised
        return next((plain for plain in _PLAIN if plain.found(name, shape, look)), None)
    scale = f"{name.removesuffix('.weight')}.pre_quant_scale"
    if look(scale):
        raise CheckpointError(f"{shown(scale)}: scales of what goes into a weight are not computed")
    if likely is not None and likely.fits(name, shape, look):
        return likely
    known = [likely, *FORMATS.values()] if likely is not None else FORMATS.values()
    found = [stored for each in known if (stored := each.found(name, shape, look))]
    fitting = (stored for stored in found if stored.fits(name, shape, look))
    return next(fitting, found[0] if found else None)


def configured_format(quantization: Mapping[str, Any]) -> WeightFormat | None:
    """The format that a ``quantization_config`` describes, None where it is not known. Raises
    ValueError for values that make no sense."""
    found = (known.configured(quantization) for known in FORMATS.values())
    return next(filter(None, found), None)
