"""Typed figures out of a raw ``config.json``, every fault collected on the way."""

import sys
from collections.abc import Mapping
from typing import Any

from moebatch.quoting import shown
from moebatch.spec.config_faults import ConfigFault
from moebatch.spec.hardware import Dtype
from moebatch.spec.shape_keys import FamilyKeys

MAX_LAYERS = 10_000
MAX_COUNT = 2**31 - 1
MAX_EXPERTS = 2**18
"""Of all layers together: ten times what the largest models have, each of which has a name."""
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


class ConfigKeys:
    """Reads typed figures out of one config and collects what is wrong in ``faults``.

    A faulty figure reads as a harmless stand-in, so that reading goes on to the next fault.
    """

    def __init__(self, config: Mapping[str, Any], family: FamilyKeys) -> None:
        self._config = config
        self._family = family
        self.faults: list[ConfigFault] = []
        model_type = config.get("model_type", family.model_type)
        if model_type != family.model_type:
            self._fault(
                "model_type", f"{shown(family.model_type)} as in the architecture", model_type
            )

    def count(self, key: str, most: int = MAX_COUNT) -> int:
        """A whole number of at least 1."""
        if key == "num_hidden_layers":
            most = MAX_LAYERS
        return self._checked_count(key, self._value(key), most)

    def count_or_none(self, key: str) -> int | None:
        """A whole number of at least 1, or null."""
        return None if self._value(key) is None else self.count(key)

    def count_or_zero(self, key: str) -> int:
        """A whole number of at least 0; null is 0."""
        value = self._value(key)
        return 0 if value is None or (type(value) is int and value == 0) else self.count(key)

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
        if number and 0 < value <= sys.float_info.max:
            return float(value)
        self._fault(key, "a number above 0", value)
        return 1.0

    def positive_or_none(self, key: str) -> float | None:
        """A finite number above zero, or null."""
        return None if self._value(key) is None else self.positive(key)

    def dtype(self) -> Dtype:
        """The declared data type; where there is none, that of the family's released files, or
        float32 as torch has it."""
        key = "dtype" if self._config.get("dtype") is not None else "torch_dtype"
        value = self._config.get(key)
        name = self._family.defaults.get("torch_dtype", DTYPES[0]) if value is None else value
        for dtype in DTYPES:
            if isinstance(name, str) and name.removeprefix("torch.") == dtype:
                return dtype
        self._fault(key, "one of " + ", ".join(DTYPES), value)
        return DTYPES[0]

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and the size of a head."""
        num_faults = len(self.faults)
        heads, hidden = self.count("num_attention_heads"), self.count("hidden_size")
        kv_heads = self.count_or_none("num_key_value_heads") or heads
        given_head_dim = self.count_or_none("head_dim")
        head_dim = given_head_dim or hidden // heads
        if len(self.faults) > num_faults:
            return 1, 1, 2
        heads_text = self._shown("num_attention_heads", heads)
        head_text = self._shown("head_dim", head_dim)
        hidden_text = self._shown("hidden_size", hidden)
        if heads % kv_heads:
            kv_text = self._shown("num_key_value_heads", kv_heads)
            self._wrong("num_attention_heads", f"{heads_text} must be a multiple of {kv_text}")
        if hidden % heads and given_head_dim is None:
            rule = f"must be a multiple of {heads_text} where head_dim is not given"
            self._wrong("hidden_size", f"{hidden_text} {rule}")
        elif head_dim % 2:
            self._wrong("head_dim", f"{head_text} must be even for rotary positions")
        elif self._family.qk_norm == "full" and heads * head_dim != hidden:
            rule = f"must be {hidden_text} in {self._family.architecture}"
            self._wrong("num_attention_heads", f"{heads_text} x {head_text} {rule}")
        return heads, kv_heads, head_dim

    def num_experts(self) -> int:
        """Experts of a layer, under either of the two names in use or the family's own."""
        if "num_experts" in self._family.spelling:
            return self.count("num_experts")
        given = {
            key: self._config[key]
            for key in ("num_experts", "num_local_experts")
            if self._config.get(key) is not None
        }
        if len(given) == 2 and given["num_experts"] != given["num_local_experts"]:
            self._wrong(
                "num_experts",
                f"num_experts ({shown(given['num_experts'])}) and num_local_experts "
                f"({shown(given['num_local_experts'])}) contradict each other",
            )
        for key, value in given.items():
            return self._checked_count(key, value)
        return int(self._family.defaults["num_experts"])

    def require_countable(self, num_layers: int, num_experts: int) -> None:
        """Refuses more experts than could be looked at one by one."""
        if num_layers * num_experts > MAX_EXPERTS:
            experts = f"{self._shown('num_experts', num_experts)} in {num_layers} layers"
            self._wrong("num_experts", f"{experts} are more than {MAX_EXPERTS} in all")

    def experts_per_token(self) -> int:
        """Experts that each token chooses, at most all of them."""
        chosen, experts = self.count("num_experts_per_tok"), self.num_experts()
        if chosen > experts and not self._is_faulty("num_experts", "num_local_experts"):
            chosen_text = self._shown("num_experts_per_tok", chosen)
            experts_text = self._shown("num_experts", experts)
            self._wrong("num_experts_per_tok", f"{chosen_text} is more than {experts_text}")
        return chosen

    def moe_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers with experts, ascending."""
        kind = self._family.dense_layers
        if kind == "none":
            return tuple(range(num_layers))
        if kind == "leading":
            first, step = self.count_or_zero("first_k_dense_replace"), self.count("moe_layer_freq")
            return tuple(layer for layer in range(first, num_layers) if layer % step == 0)
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
        if kind in ("all", "switched"):
            return (window,) * num_layers
        return tuple(window if slides else None for slides in self._sliding_layers(num_layers))

    def _sliding_layers(self, num_layers: int) -> list[bool]:
        types = self._config.get("layer_types")
        if types is None and self._family.windows == "alternating":
            return [layer % 2 == 0 for layer in range(num_layers)]
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
            message = f"layer_types has {len(types)} entries for {num_layers} layers"
            self._wrong("layer_types", message)
        else:
            return [kind == "sliding_attention" for kind in types]
        return [False] * num_layers

    def _value(self, key: str) -> Any:
        found: Any = self._config
        steps = self._spelled(key).split(".")
        for depth, step in enumerate(steps):
            if found is not None and not isinstance(found, Mapping):
                self._fault(".".join(steps[:depth]), "an object with keys", found)
            if not isinstance(found, Mapping) or step not in found:
                return self._family.defaults.get(key)
            found = found[step]
        return found

    def _is_faulty(self, *keys: str) -> bool:
        spelled = {self._spelled(key) for key in keys}
        return any(fault.key in spelled for fault in self.faults)

    def _spelled(self, key: str) -> str:
        return self._family.spelling.get(key, key)

    def _shown(self, key: str, value: int) -> str:
        return f"{self._spelled(key)} ({value})"

    def _checked_count(self, key: str, value: Any, most: int = MAX_COUNT) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
        self._fault(key, f"a whole number from 1 to {most}", value)
        return 1

    def _fault(self, key: str, expected: str, found: object) -> None:
        message = f"expected {expected}, got {shown(found)}"
        self._add(ConfigFault(self._spelled(key), message))

    def _wrong(self, key: str, message: str) -> None:
        self._add(ConfigFault(self._spelled(key), message, names_key=True))

    def _add(self, fault: ConfigFault) -> None:
        if fault not in self.faults:
            self.faults.append(fault)
