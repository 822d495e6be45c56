"""Layers that recur in the place of attention."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from moebatch.spec.families.kinds import FULL, LINEAR, layer_types
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import MOST_SEEN, Recurrence, StateSpace

_SILU = ("silu", "swish")
_UNLIMITED = (None, [0.0, inf], [0.0, {"__float__": "Infinity"}])
"""The last is how transformers writes it."""


def recurring(
    keys: ConfigKeys,
    usual: Sequence[str],
    recurrence: Callable[[ConfigKeys], Recurrence],
    *,
    recur: Sequence[str] = (LINEAR,),
    attend: Sequence[str] = (FULL,),
) -> dict[str, Any]:
    """What `Layers` says of `recurrence`, which layers have that ``layer_types`` names in one of
    the ways of those that recur; `usual` where it says nothing. All others must attend, and one
    has to."""
    types = layer_types(keys, usual, known=(*attend, *recur))
    require_attention(keys, bool(set(types) & set(attend)))
    recurrent = tuple(layer for layer, kind in enumerate(types) if kind in recur)
    return recurring_in(keys, recurrent, recurrence)


def recurring_in(
    keys: ConfigKeys, recurrent: tuple[int, ...], recurrence: Callable[[ConfigKeys], Recurrence]
) -> dict[str, Any]:
    """The same of layers with these numbers; keys are not looked at where there are none."""
    return {
        "recurrence": recurrence(keys) if recurrent else None,
        "recurrent_layers": recurrent,
    }


def alike_heads(heads: int, head_dim: int) -> dict[str, Any]:
    """What a recurrence says whose heads of keys and of values are alike."""
    return {
        "num_key_heads": heads,
        "num_value_heads": heads,
        "key_head_dim": head_dim,
        "value_head_dim": head_dim,
    }


def require_attention(keys: ConfigKeys, is_there: bool) -> None:
    """Notes a fault where no layer attends."""
    if not is_there:
        keys.wrong("layer_types", "no layer has full attention; models without it are not run")


def require_silu(keys: ConfigKeys, key: str = "hidden_act") -> None:
    """`key` says what transformers activates convolutions of layers that recur with: experts are so
    in most families. Here SiLU follows all of them."""
    if keys.value(key) not in _SILU:
        keys.fault(key, " or ".join(_SILU), keys.value(key))


def conv_width(keys: ConfigKeys, key: str) -> int:
    """Tokens that the convolutions of layers see which recur."""
    return keys.count(key, least=2, most=MOST_SEEN)


def least_fading(keys: ConfigKeys, key: str) -> float | None:
    """What logarithms of what is left of channels are above, where they have an end."""
    least = keys.value(key)
    if isinstance(least, int | float) and -inf < least < 0:
        return float(least)
    keys.fault(key, "a number below 0", least)
    return None


def state_space(keys: ConfigKeys, heads: int, head_dim: int) -> StateSpace:
    """Mamba-2 with so many heads of values, whose steps may be of any length."""
    limit, groups = keys.value("time_step_limit"), keys.count("mamba_n_groups")
    if limit not in _UNLIMITED:
        keys.fault("time_step_limit", "[0.0, Infinity]", limit)
    keys.require_multiple("mamba_n_heads", heads, "mamba_n_groups", groups)
    return StateSpace(
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=keys.count("mamba_d_state"),
        value_head_dim=head_dim,
        conv_width=conv_width(keys, "mamba_d_conv"),
        conv_bias=keys.flag("mamba_conv_bias"),
        bias=keys.flag("mamba_proj_bias"),
    )
