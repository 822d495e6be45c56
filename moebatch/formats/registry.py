"""All formats of weights that there are."""

from collections.abc import Callable

from moebatch.formats.mxfp4 import MXFP4
from moebatch.formats.plain import BFLOAT16, FLOAT16, FLOAT32
from moebatch.formats.weight_format import WeightFormat
from moebatch.registry import Registry

FORMATS: Registry[WeightFormat] = Registry(
    {format.name: format for format in (FLOAT32, BFLOAT16, FLOAT16, MXFP4)}
)
"""By name. ``FORMATS.register`` adds one from outside the package."""


def find_format(
    name: str, shape: tuple[int, ...], dtype_of: Callable[[str], str | None]
) -> WeightFormat | None:
    """The format in which a checkpoint stores the weight `name`: the tensors say so, whatever
    ``config.json`` says. None where no format fits, for a missing weight among others."""
    decodable = (known for known in FORMATS.values() if known.is_decodable)
    return next((known for known in decodable if known.is_found(name, shape, dtype_of)), None)
