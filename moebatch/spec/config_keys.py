"""Typed figures out of a raw ``config.json``, every fault collected on the way."""

import math
from collections.abc import Mapping
from typing import Any

from moebatch.spec.shape_keys import FamilyKeys

MAX_LAYERS = 10_000
MAX_COUNT = 2**31 - 1
DTYPES = ("float32", "float16", "bfloat16")


class ConfigKeys:
    """Reads typed figures out of one config and collects what is wrong in ``faults``.

    A faulty figure reads as a harmless stand-in, so that reading goes on to the next fault.
    """

    def __init__(self, config: Mapping[str, Any], family: FamilyKeys) -> None:
        self._config = config
        self._family = family
        self.faults: list[str] = []
        model_type = config.get("model_type", family.model_type)
        if model_type != family.model_type:
            self._fault("model_type", f"{family.model_type!r} as in the architecture", model_type)

    def count(self, key: str, most: int = MAX_COUNT) -> int:
        """A whole number of at least 1."""
        if key == "num_hidden_layers":
            most = MAX_LAYERS
        return self._checked_count(key, self._value(key), most)

    def flag(self, key: str) -> bool:
        """``true`` or ``false``."""
        value = self._value(key)
        if not isinstance(value, bool):
            self._fault(key, "true or false", value)
        return value is True

    def name(self, key: str) -> str:
        """A text that is not empty."""
        value = self._value(key)
        if isinstance(value, str) and value:
            return value
        self._fault(key, "a name", value)
        return ""

    def positive(self, key: str) -> float:
        """A finite number above zero."""
        value = self._value(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and 0 < value < math.inf:
            return float(value)
        self._fault(key, "a number above 0", value)
        return 1.0

    def positive_or_none(self, key: str) -> float | None:
        """A finite number above zero, or null."""
        return None if self._value(key) is None else self.positive(key)

    def dtype(self) -> str:
        """The declared data type; float32 where there is none, as torch has it."""
        key = "dtype" if self._config.get("dtype") is not None else "torch_dtype"
        value = self._config.get(key)
        name = "float32" if value is None else value
        if isinstance(name, str) and name.removeprefix("torch.") in DTYPES:
            return name.removeprefix("torch.")
        self._fault(key, "one of " + ", ".join(DTYPES), value)
        return DTYPES[0]

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and the size of a head."""
        num_faults = len(self.faults)
        heads, hidden = self.count("num_attention_heads"), self.count("hidden_size")
        kv_heads, head_dim = heads, hidden // heads
        if self._value("num_key_value_heads") is not None:
            kv_heads = self.count("num_key_value_heads")
        has_head_dim = self._config.get("head_dim") is not None
        if has_head_dim:
            head_dim = self.count("head_dim")
        if len(self.faults) > num_faults:
            return 1, 1, 2
        if heads % kv_heads:
            self._wrong(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({kv_heads})"
            )
        if hidden % heads and not has_head_dim:
            self._wrong(
                f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}) "
                "where head_dim is not given"
            )
        elif head_dim % 2:
            self._wrong(f"head_dim ({head_dim}) must be even for rotary positions")
        elif self._family.qk_norm == "full" and heads * head_dim != hidden:
            self._wrong(
                f"num_attention_heads ({heads}) x head_dim ({head_dim}) must be hidden_size "
                f"({hidden}) in {self._family.architecture}"
            )
        return heads, kv_heads, head_dim

    def num_experts(self) -> int:
        """Experts of a layer, under either of the two names in use."""
        given = {
            key: self._config[key]
            for key in ("num_experts", "num_local_experts")
            if self._config.get(key) is not None
        }
        if len(given) == 2 and given["num_experts"] != given["num_local_experts"]:
            self._wrong(
                f"num_experts ({given['num_experts']!r}) and num_local_experts "
                f"({given['num_local_experts']!r}) contradict each other"
            )
        for key, value in given.items():
            return self._checked_count(key, value, MAX_COUNT)
        return int(self._family.defaults["num_experts"])

    def experts_per_token(self) -> int:
        """Experts that each token chooses, at most all of them."""
        chosen = self.count("num_experts_per_tok")
        faults = len(self.faults)
        experts = self.num_experts()
        del self.faults[faults:]  # told once already
        if chosen > experts:
            self._wrong(f"num_experts_per_tok ({chosen}) is more than num_experts ({experts})")
        return chosen

    def moe_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers with experts: every ``decoder_sparse_step``-th, less ``mlp_only_layers``."""
        if not self._family.has_dense_layers:
            return tuple(range(num_layers))
        step = self.count("decoder_sparse_step")
        dense = self._value("mlp_only_layers") or ()
        whole = isinstance(dense, list | tuple) and all(type(layer) is int for layer in dense)
        if not whole:
            self._fault("mlp_only_layers", "a list of layer numbers", dense)
            dense = ()
        every = range(step - 1, num_layers, step)
        return tuple(layer for layer in every if layer not in dense)

    def sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Per layer the number of positions in view, or None."""
        kind = self._family.windows
        switched_off = kind in ("switched", "layered") and not self.flag("use_sliding_window")
        if kind == "none" or switched_off or self._value("sliding_window") is None:
            return (None,) * num_layers
        window = self.count("sliding_window")
        if kind != "layered":
            return (window,) * num_layers
        return tuple(window if slides else None for slides in self._sliding_layers(num_layers))

    def _sliding_layers(self, num_layers: int) -> list[bool]:
        types = self._config.get("layer_types")
        if types is None:
            # transformers lets only every other layer below max_window_layers slide.
            below = self._value("max_window_layers")
            if below != 0:
                below = self.count("max_window_layers")
            return [layer % 2 == 0 and layer < below for layer in range(num_layers)]
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or any(kind not in known for kind in types):
            self._fault("layer_types", "a list of " + " and ".join(known), types)
        elif len(types) != num_layers:
            self._wrong(f"layer_types has {len(types)} entries for {num_layers} layers")
        else:
            return [kind == "sliding_attention" for kind in types]
        return [False] * num_layers

    def _value(self, key: str) -> Any:
        return self._config.get(key, self._family.defaults.get(key))

    def _checked_count(self, key: str, value: Any, most: int = MAX_COUNT) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
        self._fault(key, f"a whole number from 1 to {most}", value)
        return 1

    def _fault(self, key: str, expected: str, found: object) -> None:
        shown = repr(found)
        self._wrong(f"{key}: expected {expected}, got {shown[:60]}")

    def _wrong(self, message: str) -> None:
        if message not in self.faults:
            self.faults.append(message)
