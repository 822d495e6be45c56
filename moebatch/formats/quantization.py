"""What a ``quantization_config`` says, in numbers that are held to their limits.

All functions raise ValueError with a message that names the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moebatch.formats.blocks import WHOLE, Blocks
from moebatch.quoting import shown

_MOST = 2**20


def size_of(values: Mapping[str, Any], key: str, default: int) -> int:
    """The number of rows or columns that share a scale; null is the default, -1 all."""
    value = values.get(key)
    if value is None:
        return default
    if value == -1 and type(value) is int:
        return WHOLE
    if type(value) is not int or not 0 < value <= _MOST:
        raise ValueError(f"{key}: expected a size from 1 to {_MOST}, got {shown(value)}")
    return value


def blocks_of(values: Mapping[str, Any], key: str, default: Blocks) -> Blocks:
    """Blocks as a list of rows and columns; a missing key is the default, null the whole matrix."""
    if key not in values:
        return default
    value = values[key]
    if value is None:
        return Blocks(WHOLE, WHOLE)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{key}: expected a list of rows and columns, got {shown(value)}")
    rows, columns = (size_of({key: size}, key, WHOLE) for size in value)
    return Blocks(rows, columns)


def one_of(values: Mapping[str, Any], key: str, known: tuple[object, ...]) -> Any:
    """A value out of those that are known; a missing key is the first."""
    value = values.get(key, known[0])
    if any(value == each and type(value) is type(each) for each in known):
        return value
    raise ValueError(f"{key}: expected {' or '.join(map(shown, known))}, got {shown(value)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """What compressed-tensors says of the weights of experts."""

    layout: str
    """Its ``format``, such as ``pack-quantized``."""
    bits: int
    is_float: bool
    is_symmetric: bool
    blocks: Blocks

    @classmethod
    def of(cls, quantization: Mapping[str, Any]) -> Scheme | None:
        """That of the group that names experts, else of the first; None of other methods."""
        if quantization.get("quant_method") != "compressed-tensors":
            return None
        transforms = quantization.get("transform_config")
        if transforms and (not isinstance(transforms, Mapping) or transforms.get("config_groups")):
            raise ValueError("transform_config: rotations of what goes in are not computed")
        group = _group(quantization.get("config_groups"))
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise ValueError(f"config_groups: expected weights, got {shown(weights)}")
        return cls(
            layout=str(group.get("format") or quantization.get("format")),
            bits=one_of(weights, "num_bits", (8, 4)),
            is_float=one_of(weights, "type", ("int", "float")) == "float",
            is_symmetric=one_of(weights, "symmetric", (True, False)),
            blocks=_strategy_blocks(weights),
        )


_EXPERT = re.compile("(?<!shared_)expert")


def _group(groups: object) -> Mapping[str, Any]:
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    if not found or not all(isinstance(group, Mapping) for group in found):
        raise ValueError(f"config_groups: expected groups of modules, got {shown(groups)}")
    of_experts = (group for group in found if _EXPERT.search(str(group.get("targets"))))
    group: Mapping[str, Any] = next(of_experts, found[0])
    return group


def _strategy_blocks(weights: Mapping[str, Any]) -> Blocks:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return Blocks(WHOLE, WHOLE)
    if strategy == "channel":
        return Blocks(1, WHOLE)
    if strategy == "block":
        return blocks_of(weights, "block_structure", Blocks(128, 128))
    if strategy in (None, "group", "tensor_group"):
        return Blocks(1, size_of(weights, "group_size", WHOLE))
    raise ValueError(f"strategy: {shown(strategy)} is not known for weights")
