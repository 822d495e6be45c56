"""Formats of experts by the names that users give them, and those that `moebatch pack` writes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import get_args

from moebatch.errors import ConfigError
from moebatch.formats.packed_integers import PACKED_INT4, PACKED_INT8
from moebatch.formats.plain import PlainFormat
from moebatch.formats.registry import FORMATS
from moebatch.formats.scaled_bytes import FP8
from moebatch.formats.weight_format import WeightFormat
from moebatch.quoting import shown
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.files.suggestion import names_instead
from moebatch.spec.model.precision import GROUPS, Precision
from moebatch.spec.model.shape import ModelShape


def int4_group(widths: Iterable[int], options: Iterable[int] = GROUPS) -> int | None:
    """Columns of a group that matrices of these widths can have, the first of the options; None
    where they can have none."""
    widths = list(widths)
    return next((size for size in options if not any(width % size for width in widths)), None)


def why_unpacked(shape: ModelShape) -> str | None:
    """What keeps `moebatch pack` from writing a model; None where nothing does."""
    if shape.expert.bias:
        return "experts have biases, for which the formats that are written have no place"
    if not FAMILIES[shape.architecture].names.apart:
        return (
            "experts of this family are known only in tensors that hold several matrices, and "
            "other programs read packed ones matrix by matrix"
        )
    return None


def written_formats(shape: ModelShape) -> dict[str, WeightFormat]:
    """What `moebatch pack` makes of a model: nothing of one that it refuses, and no int4 where
    experts cannot be grouped."""
    if why_unpacked(shape) is not None:
        return {}
    plain = FORMATS[shape.dtype]
    assert isinstance(plain, PlainFormat), "computed in numbers that lie one after the other"
    sizes = shape.expert.matrices(shape.expert_size).values()
    group = int4_group(size[1] for size in sizes)
    int4 = {"int4": replace(PACKED_INT4, group=group, scale_dtype=plain.dtype)} if group else {}
    return {**int4, "int8": replace(PACKED_INT8, scale_dtype=plain.dtype), "fp8": FP8}


def unknown_format(name: str) -> Iterator[str]:
    """What is wrong with a name that no format has."""
    known = tuple(dict.fromkeys((*get_args(Precision), *FORMATS)))
    if name not in known:
        yield f"no format is named {shown(name)}; {names_instead(name, known)}"


def named_format(name: str, shape: ModelShape) -> WeightFormat:
    """Of what a model's experts would be stored in: as `moebatch pack` would write it, by its name
    there or here, else as most others publish it. Raises ConfigError where they cannot be."""
    written = written_formats(shape)
    known = {**FORMATS, **{each.name: each for each in written.values()}, **written}
    if name not in known:
        reason = why_unpacked(shape)
        width = f"needs widths of experts that are multiples of {GROUPS[-1]}; choose int8 or fp8"
        message = f"{reason}; moebatch pack refuses this model" if reason else width
        raise ConfigError.at(shown(name), message)
    return known[name]
