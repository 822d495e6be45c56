"""Kinds of layers: which of them see a window, have experts, or attend in another way."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

from moebatch.spec.model.attention import Attention
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention

Windows = tuple[int | None, ...]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""As ``layer_types`` of most families calls them."""


def layer_types(
    keys: ConfigKeys,
    usual: Sequence[str],
    known: Sequence[str] = (FULL, SLIDING),
    key: str = "layer_types",
) -> Sequence[str]:
    """What `key` says of every layer, which must be `known`; what is `usual` where it says
    nothing."""
    types = keys.value(key)
    if types is None:
        return usual
    if not isinstance(types, list) or any(kind not in known for kind in types):
        keys.fault(key, "a list of " + " and ".join(known), types)
    elif len(types) != len(usual):
        message = f"{key} has {len(types)} entries for {len(usual)} layers"
        keys.wrong(key, message)
    else:
        return types
    return usual


def windows_of(
    keys: ConfigKeys, types: Sequence[str], kind: str = SLIDING, key: str = "sliding_window"
) -> Windows:
    """What `key` says holds for layers of that kind; the others see everything."""
    window = keys.count(key) if kind in types else None
    return tuple(window if each == kind else None for each in types)


def everywhere(keys: ConfigKeys, num_layers: int) -> Windows:
    """``sliding_window`` holds for all layers, if there is one."""
    window = None if keys.value("sliding_window") is None else keys.count("sliding_window")
    return (window,) * num_layers


def by_layer_types(keys: ConfigKeys, num_layers: int, otherwise: Callable[[int], bool]) -> Windows:
    """``sliding_window`` holds for layers that ``layer_types`` names; where there are no such
    types, for those that `otherwise` names."""
    if keys.value("sliding_window") is None:
        return (None,) * num_layers
    usual = [SLIDING if otherwise(layer) else FULL for layer in range(num_layers)]
    return windows_of(keys, layer_types(keys, usual))


def by_mlp_types(keys: ConfigKeys, num_layers: int, otherwise: Container[int]) -> tuple[int, ...]:
    """Layers that ``mlp_layer_types`` calls sparse; where there are no such types, those that are
    in `otherwise`."""
    dense, sparse = known = ("dense", "sparse")
    usual = [sparse if layer in otherwise else dense for layer in range(num_layers)]
    types = layer_types(keys, usual, known, key="mlp_layer_types")
    return tuple(layer for layer, kind in enumerate(types) if kind == sparse)


def in_layers(
    num_layers: int, usual: Attention, other: Attention, others: Container[int]
) -> tuple[Attention, ...]:
    """How each layer attends, where some do in another way than is usual."""
    return tuple(other if layer in others else usual for layer in range(num_layers))


def in_two_ways(
    windows: Windows, sliding: GroupedAttention, full: GroupedAttention
) -> dict[str, Any]:
    """What `Layers` says of attention where layers with a window attend otherwise than those that
    see everything."""
    of_layers = tuple(full if window is None else sliding for window in windows)
    return {
        "attention": sliding if sliding in of_layers else full,
        "layer_attentions": of_layers,
        "sliding_windows": windows,
    }


def rotated_by_windows(
    keys: ConfigKeys,
    attention: GroupedAttention,
    windows: Windows,
    *,
    rotated: Container[int] = (),
    recurrent: Container[int] = (),
) -> dict[str, Any]:
    """What `Layers` says of attention where layers without a window have no rotary positions, but
    for those in `rotated`; those that are `recurrent` do not attend."""
    others = [layer for layer, window in enumerate(windows) if window is None]
    unrotated = [each for each in others if each not in rotated and each not in recurrent]
    if len(others) == len(windows) and not any(layer in rotated for layer in others):
        keys.wrong("layer_types", "no layer has rotary positions; models without are not run")
    plain = replace(attention, num_rotated=0)
    return {
        "attention": attention,
        "layer_attentions": in_layers(len(windows), attention, plain, unrotated),
        "sliding_windows": windows,
    }
