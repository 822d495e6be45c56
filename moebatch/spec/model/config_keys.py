"""Typed figures out of a raw ``config.json``, every fault collected on the way."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from moebatch.errors import CheckpointError, Fault, FaultyFile
from moebatch.quoting import shown
from moebatch.spec.machine.hardware import Dtype

MAX_LAYERS = 10_000
_LAYERS = ("num_hidden_layers", "num_decoder_layers")
MAX_COUNT = 2**31 - 1
MAX_EXPERTS = 2**18
"""Of all layers together: ten times what the largest models have, each of which has a name."""
_ABSENT = object()
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """What is wrong with one figure, or between two."""

    key: str
    """Way to the figure, such as ``ffn_config.moe_top_k``."""
    message: str
    names_key: bool = False
    """The message needs no key in front."""

    def __str__(self) -> str:
        return self.message if self.names_key else f"{self.key}: {self.message}"


class FaultyConfig(FaultyFile, CheckpointError):
    """A configuration that describes no model, or none that is supported."""

    def __init__(self, where: str, faults: Sequence[ConfigFault]) -> None:
        super().__init__([Fault(file=where, message=str(fault)) for fault in faults])
        self.config_faults = tuple(faults)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """How a family says in a configuration what it has in common with others."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a file may leave out and `written` does not say; of all others it is null
    then."""
    within: str = ""
    """The object of the file in which its keys are, with a dot behind, where there are others
    beside it."""
    else_within: str | None = None
    """The object that files without that one have; beside all other keys if it is empty. None is
    that there is always the first."""
    beside: Collection[str] = ("model_type", "torch_dtype", "tie_word_embeddings")
    """Keys that are not in that object."""
    spelling: Mapping[str, str] = field(default_factory=dict)
    """Where the family keeps a key under another name that is not in `aliases`;
    ``ffn_config.moe_top_k`` is nested."""
    synonyms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names under which keys are read beside the family's own, in place of those in `aliases`."""
    by_layer: Collection[str] = ()
    """Keys whose numbers files may give for each layer; all have to be the same."""

    @property
    def written(self) -> Mapping[str, Any]:
        """What a file says that leaves out nothing."""
        return {}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of keys by others that are read for them."""
        return {}

    def spelled(self, key: str) -> str:
        """The family's own name of a key. Two are in use for experts."""
        aliases = self.aliases
        usual = aliases.get("num_local_experts", key) if key == "num_experts" else key
        return self.spelling.get(key) or aliases.get(key, usual)

    def names_of(self, key: str) -> Sequence[str]:
        """All names of a key, the family's own first."""
        own = self.spelled(key)
        others = [other for other, name in self.aliases.items() if name == own]
        return own, *self.synonyms.get(key, others)


class ConfigKeys:
    """Reads typed figures out of one config and collects what is wrong in ``faults``.

    Keys have the names that most families use. A faulty figure reads as a harmless stand-in, so
    that reading goes on to the next fault.
    """

    def __init__(self, config: Mapping[str, Any], wording: Wording) -> None:
        self._config = config
        self._wording = wording
        has_object = config.get(wording.within.partition(".")[0]) is not None
        other = wording.else_within
        self._within = wording.within if has_object or other is None else other
        self._reworded: Mapping[str, Any] = {}
        self.faults: list[ConfigFault] = []

    def reword(self, words: Mapping[str, Any]) -> None:
        """Takes these values for what the file says of their keys."""
        self._reworded = words

    def count(self, key: str, most: int = MAX_COUNT, least: int = 1) -> int:
        """A whole number of at least that."""
        if key in _LAYERS:
            most = MAX_LAYERS
        return self.whole_number(key, self.value(key), most, least)

    def whole_number(self, key: str, value: Any, most: int = MAX_COUNT, least: int = 1) -> int:
        """The same of a value of a key that holds several."""
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self.fault(key, f"a whole number from {least} to {most}", value)
        return least

    def count_or_none(self, key: str) -> int | None:
        """A whole number of at least 1, or null."""
        return None if self.value(key) is None else self.count(key)

    def count_or_zero(self, key: str) -> int:
        """A whole number of at least 0; null is 0."""
        value = self.value(key)
        return 0 if value is None or (type(value) is int and value == 0) else self.count(key)

    def flag(self, key: str) -> bool:
        """``true`` or ``false``."""
        value = self.value(key)
        if not isinstance(value, bool):
            self.fault(key, "true or false", value)
        return value is True

    def name(self, key: str) -> str:
        """A text that is not empty."""
        value = self.value(key)
        if isinstance(value, str) and value:
            return value
        self.fault(key, "a name", value)
        return ""

    def positive(self, key: str) -> float:
        """A finite number above zero, with a reciprocal that is one as well."""
        return self.positive_number(key, self.value(key))

    def positive_number(self, key: str, value: Any) -> float:
        """The same of a value of a key that holds several."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and sys.float_info.min <= value <= sys.float_info.max:
            return float(value)
        self.fault(key, "a number above 0", value)
        return 1.0

    def positive_or_none(self, key: str) -> float | None:
        """A finite number above zero, or null."""
        return None if self.value(key) is None else self.positive(key)

    def dtype(self) -> Dtype:
        """The declared data type; where there is none, that of the family's released files, or
        float32 as torch has it."""
        key = "dtype" if self.value("dtype") is not None else "torch_dtype"
        value = self.value(key)
        if value is None:  # beside those of several models, which may say nothing of their own
            key, value = "dtype", self._config.get("dtype")
        name = self._usual("torch_dtype") or DTYPES[0] if value is None else value
        for dtype in DTYPES:
            if isinstance(name, str) and name.removeprefix("torch.") == dtype:
                return dtype
        self.fault(key, "one of " + ", ".join(DTYPES), value)
        return DTYPES[0]

    def heads(self, *, fill_hidden: bool = False, size: str = "head_dim") -> tuple[int, int, int]:
        """Query heads, KV heads and the size of a head; `fill_hidden` says that the heads together
        have to be as wide as hidden states, and `size` is the key of the last."""
        num_faults = len(self.faults)
        heads, hidden = self.count("num_attention_heads"), self.count("hidden_size")
        kv_heads = self.count_or_none("num_key_value_heads") or heads
        given_head_dim = self.count_or_none(size)
        head_dim = given_head_dim or hidden // heads
        if len(self.faults) > num_faults:
            return 1, 1, 2
        heads_text = self.worded("num_attention_heads", heads)
        head_text = self.worded(size, head_dim)
        hidden_text = self.worded("hidden_size", hidden)
        self.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
        if hidden % heads and given_head_dim is None:
            rule = f"must be a multiple of {heads_text} where head_dim is not given"
            self.wrong("hidden_size", f"{hidden_text} {rule}")
        elif head_dim % 2:
            self.wrong(size, f"{head_text} must be even for rotary positions")
        elif fill_hidden and heads * head_dim != hidden:
            message = f"{heads_text} x {head_text} must be {hidden_text} in this architecture"
            self.wrong("num_attention_heads", message)
        return heads, kv_heads, head_dim

    def rope(self) -> Mapping[str, Any]:
        """How positions rotate: of two ways to say it, transformers takes the older one."""
        said = self.value("rope_scaling") or self.value("rope_parameters") or {}
        if isinstance(said, Mapping):
            return said
        self.fault("rope_scaling", "an object", said)
        return {}

    def rotary_dim(self, head_dim: int, kind: str | None = None) -> int:
        """Numbers of a head that rotate: a share of them, ``partial_rotary_factor``, which stands
        among the rotary parameters, those of layers of that kind where each has its own, or beside
        them; else ``rotary_dim``, else all."""
        key = "partial_rotary_factor"
        parameters = self.rope() if kind is None else self.rope().get(kind)
        if not isinstance(parameters, Mapping):
            parameters = {}
        if "proportional" in (parameters.get("rope_type"), parameters.get("type")):
            return head_dim  # the share says which of them rotate fast
        share = parameters.get(key, self.value(key))
        if share is None:
            given = self.count_or_none("rotary_dim")
            share = 1.0 if given is None else given / head_dim
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0 < share <= 1:
            self.fault(key, "a number above 0 and at most 1", share)
            return head_dim
        rotary_dim = int(head_dim * share)
        if rotary_dim % 2 or not rotary_dim:
            self.wrong(key, f"{key} ({share}) of head_dim ({head_dim}) must be an even number")
        return rotary_dim

    def require_countable(self, num_layers: int, num_experts: int) -> None:
        """Refuses more experts than could be looked at one by one."""
        if num_layers * num_experts > MAX_EXPERTS:
            experts = f"{self.worded('num_experts', num_experts)} in {num_layers} layers"
            self.wrong("num_experts", f"{experts} are more than {MAX_EXPERTS} in all")

    def experts_per_token(self) -> int:
        """Experts that each token chooses, at most all of them."""
        chosen, experts = self.count("num_experts_per_tok"), self.count("num_experts")
        if chosen > experts and not self._is_faulty("num_experts"):
            chosen_text = self.worded("num_experts_per_tok", chosen)
            experts_text = self.worded("num_experts", experts)
            self.wrong("num_experts_per_tok", f"{chosen_text} is more than {experts_text}")
        return chosen

    def value(self, key: str) -> Any:
        """What the file holds, else the default."""
        if key in self._reworded:
            return self._reworded[key]
        found = self._found(key)
        return self._usual(key) if found is _ABSENT else found

    def _usual(self, key: str) -> Any:
        """What a key says that the file leaves out."""
        wording = self._wording
        if key in wording.defaults:
            return wording.defaults[key]
        written = wording.written
        return next((written[name] for name in wording.names_of(key) if name in written), None)

    def _names_of(self, key: str) -> Sequence[str]:
        """All names of a key in the file, the family's own first."""
        place = "" if key in self._wording.beside else self._within
        return [place + name for name in self._wording.names_of(key)]

    def _found(self, key: str) -> Any:
        """What the file holds, under any of its names."""
        names = self._names_of(key)
        found = {name: self._found_as(key, name) for name in names}
        given = {name: value for name, value in found.items() if value not in (None, _ABSENT)}
        for (name, value), (other, said) in pairwise(given.items()):
            if value != said:
                both = f"{name} ({shown(value)}) and {other} ({shown(said)})"
                self.wrong(key, f"{both} contradict each other")
        return [*given.values()][-1] if given else found[names[0]]

    def _found_as(self, key: str, name: str) -> Any:
        found: Any = self._config
        steps = name.split(".")
        for depth, step in enumerate(steps):
            if found is not None and not isinstance(found, Mapping):
                message = f"expected an object with keys, got {shown(found)}"
                self._add(ConfigFault(".".join(steps[:depth]), message))
            if not isinstance(found, Mapping) or step not in found:
                return _ABSENT
            found = found[step]
        return self._of_all_layers(name, found) if key in self._wording.by_layer else found

    def _of_all_layers(self, name: str, found: Any) -> Any:
        if not isinstance(found, list) or not found:
            return found
        if any(value != found[0] for value in found):
            message = f"expected the same for all layers, got {shown(found)}"
            self._add(ConfigFault(name, message))
        return found[0]

    def _is_faulty(self, key: str) -> bool:
        return any(fault.key == self._spelled(key) for fault in self.faults)

    def _spelled(self, key: str) -> str:
        """The name of a key in the file; the family's own where it is not there."""
        names = self._names_of(key)
        return next((name for name in names if self._found_as(key, name) is not _ABSENT), names[0])

    def require_multiple(self, key: str, value: int, of_key: str, of: int) -> None:
        """Notes a fault where a figure is no multiple of another."""
        if value % of:
            self.wrong(
                key, f"{self.worded(key, value)} must be a multiple of {self.worded(of_key, of)}"
            )

    def worded(self, key: str, value: int) -> str:
        """A figure as messages name it."""
        return f"{self._spelled(key)} ({value})"

    def fault(self, key: str, expected: str, found: object) -> None:
        """Notes that a figure is not what it should be."""
        message = f"expected {expected}, got {shown(found)}"
        self._add(ConfigFault(self._spelled(key), message))

    def wrong(self, key: str, message: str) -> None:
        """Notes what is wrong between figures, in a message that names them."""
        self._add(ConfigFault(self._spelled(key), message, names_key=True))

    def _add(self, fault: ConfigFault) -> None:
        if fault not in self.faults:
            self.faults.append(fault)
