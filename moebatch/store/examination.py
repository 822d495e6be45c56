"""Whether stored weights can be those of a model: a few rows of some of them, decoded.

Numbers of trained models lie about zero, and weights of one role are of similar size in all layers.
What a wrong scale or zero point makes of them is far from both.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median_low

import torch
from torch import Tensor

from moebatch.checkpoint.index import Weight
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import Fault
from moebatch.formats.decoding import widened
from moebatch.formats.weight_format import BadParts
from moebatch.quoting import shown
from moebatch.store.dense import TensorReader
from moebatch.units import named_layers

_EXPERTS_OF_LAYER = 4
_LINES = 16
"""Rows, or columns, that are read at the beginning of a weight and from its middle on."""
_MOST_NUMBERS = 2**26
"""Of all weights of one role: a second of decoding."""
_WINDOW_BYTES = 2**20
_FAR = 16.0
"""Times as large, or as small, as the median of a role; layers of trained models differ less."""
_LARGEST, _SMALLEST = 16.0, 2.0**-20
"""Root mean squares of weights that are computed with."""
_MOST_TILT = 0.15
"""A zero point that is off by one moves weights of four bits by 0.27 (groups of 32) to 0.45 of
their root mean square (whole rows); others have means near zero."""
_TILT_ERRORS = 6
"""Standard errors by which the mean of a few numbers may be off."""
_MOST_ZERO_SCALES = 0.01
_UNLIKE = ("router", "router_bias", "shared_mix")
"""Roles whose weights may differ in size from layer to layer."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What has been found, a line for each sort of damage."""

    faults: tuple[Fault, ...] = ()
    """Numbers that are none: rows that need them fail."""
    suspicions: tuple[Fault, ...] = ()
    """What hardly any sound model has."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """Some rows, or columns, of a matrix."""

    role: str
    layer: int | None
    weight: Weight
    index: str = ""
    """Behind the names of tensors that hold all experts of a layer, which of them it is."""

    @property
    def num_numbers(self) -> int:
        return prod(self.weight.shape)


@dataclass(frozen=True, slots=True)
class _Sample:
    """What some numbers of a weight are like."""

    lines: _Lines
    name: str
    path: Path
    size: float = 0.0
    """Root mean square."""
    tilt: float = 0.0
    """Their mean as a share of the former."""
    tilt_error: float = 0.0
    """By which the latter may be off by chance."""
    zero_scales: float = 0.0
    """Share of scales that are zero."""
    broken: str | None = None
    """Why its numbers are none."""


def examine(files: ModelFiles) -> Examined:
    """Reads rows of experts of every layer, and of all other matrices. Raises StorageError."""
    by_role: dict[str, list[_Lines]] = defaultdict(list)
    for lines in _candidates(files):
        by_role[lines.role].append(lines)
    with closing(TensorReader(_WINDOW_BYTES)) as reader:
        samples = {
            role: [_sampled(reader, lines) for lines in _thinned(of_role)]
            for role, of_role in by_role.items()
        }
    return _judged(samples)


def _candidates(files: ModelFiles) -> Iterator[_Lines]:
    """Other experts in every layer, so that all have their turn."""
    count = files.shape.num_experts
    step = max(1, count // _EXPERTS_OF_LAYER)
    for layer in files.shape.moe_layers:
        for number in range(min(count, _EXPERTS_OF_LAYER)):
            expert = (layer + number * step) % count
            index = f"[{expert}]" if files.experts.is_stacked else ""
            for place, weight in enumerate(files.expert_weights(layer, expert)):
                for part in weight.sampled(_LINES) if len(weight.shape) == 2 else ():
                    yield _Lines(f"expert {place}", layer, part, index)
    for of_layer, role, weight in files.weights_beside_experts():
        for part in weight.sampled(_LINES) if len(weight.shape) == 2 else ():
            yield _Lines(role, of_layer, part)


def _thinned(lines: list[_Lines]) -> list[_Lines]:
    """Of many numbers a part, evenly."""
    total = sum(each.num_numbers for each in lines)
    return lines[:: -(-total // _MOST_NUMBERS) or 1]


def _sampled(reader: TensorReader, lines: _Lines) -> _Sample:
    weight = lines.weight
    name, path = weight.name + lines.index, weight.extents[0].path
    decoded, parts = torch.empty(weight.shape), reader.parts(weight)
    try:
        zero_scales = _zero_scales(weight, parts)
        weight.format.decode(parts, decoded)
    except BadParts as error:
        return _Sample(lines, name, path, broken=str(error))
    if not decoded.isfinite().all():
        name, path = _broken_part(weight, parts)
        return _Sample(lines, name + lines.index, path, broken="NaN or infinity")
    size = float(decoded.square().mean(dtype=torch.float64).sqrt())
    can_tilt = weight.format.has_zero_points and size > 0
    return _Sample(
        lines,
        name,
        path,
        size=size,
        tilt=float(decoded.mean(dtype=torch.float64)) / size if can_tilt else 0.0,
        tilt_error=decoded.numel() ** -0.5,
        zero_scales=zero_scales,
    )


def _zero_scales(weight: Weight, parts: list[Tensor]) -> float:
    matrix = weight.format.coded(parts, (weight.shape[0], weight.shape[1]))
    scales = matrix.scales if matrix else None
    return 0.0 if scales is None else float((widened(scales) == 0).float().mean())


def _broken_part(weight: Weight, parts: list[Tensor]) -> tuple[str, Path]:
    """Name and file of the part in which numbers are none; of the weight where it is none of its
    floats."""
    stored = weight.format.parts(weight.name, weight.shape)
    for said, part, extent in zip(stored, parts, weight.extents, strict=True):
        is_exponent = said.dtype == "F8_E8M0" or (said.dtype == "U8" and "scale" in said.name)
        numbers = widened(part) if is_exponent or part.is_floating_point() else None
        if numbers is not None and not numbers.isfinite().all():
            return said.name, extent.path
    return weight.name, weight.extents[0].path


def _judged(by_role: dict[str, list[_Sample]]) -> Examined:
    """Samples with the same damage share a line."""
    faults: dict[str, list[_Sample]] = defaultdict(list)
    odd: dict[str, list[_Sample]] = defaultdict(list)
    usual: dict[str, float] = {}
    for role, samples in by_role.items():
        sizes = [each.size for each in samples if each.broken is None]
        usual[role] = median_low(sizes) if sizes else 0.0
        for each in samples:
            if each.broken is not None:
                faults[f"holds no numbers: {each.broken}"].append(each)
            elif (what := _oddity(each, usual[role])) is not None:
                odd[what].append(each)
    return Examined(
        tuple(_fault(samples, what) for what, samples in faults.items()),
        tuple(
            _fault(samples, f"{what} ({_figures(samples[0], usual[samples[0].lines.role])})")
            for what, samples in odd.items()
        ),
    )


def _oddity(sample: _Sample, usual: float) -> str | None:
    """What is odd about a sample of a role with weights of a `usual` size."""
    if sample.zero_scales > _MOST_ZERO_SCALES:
        return "has scales that are zero"
    if sample.size == 0:
        return "holds only zeros in the rows read" if usual else None
    if abs(sample.tilt) > max(_MOST_TILT, _TILT_ERRORS * sample.tilt_error):
        return "has weights that are not about zero; zero points may be off by one"
    if sample.lines.role in _UNLIKE:
        return None
    if not usual / _FAR < sample.size < usual * _FAR:
        return (
            "has weights of another size than other layers and experts have; scales may be upside "
            "down, or another weight's"
        )
    if not _SMALLEST < usual < _LARGEST:
        return "has weights of a size that models do not have; scales may be upside down"
    return None


def _figures(sample: _Sample, usual: float) -> str:
    if sample.zero_scales > _MOST_ZERO_SCALES:
        return f"{sample.zero_scales:.0%} of those read"
    if abs(sample.tilt) > _MOST_TILT:
        return f"mean {sample.tilt:+.2f} of their root mean square"
    return f"root mean square {sample.size:.2g}, {usual:.2g} in the median"


def _fault(samples: list[_Sample], what: str) -> Fault:
    """File, first tensor, how many more there are, and in which layers."""
    first, names = samples[0], {each.name for each in samples}
    more = f" and {len(names) - 1} more of those read" if len(names) > 1 else ""
    layers = {each.lines.layer for each in samples if each.lines.layer is not None}
    where = f", {named_layers(layers)}," if more and layers else ""
    return Fault(file=str(first.path), message=f"{shown(first.name)}{more}{where} {what}")
