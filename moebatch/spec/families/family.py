"""What a family says of ``config.json`` and of its checkpoints.

Released configurations omit what equals the default of the family's class in transformers, so
these defaults are part of the format: ``written.json`` has them, by ``model_type``, and the names
that a key may have there, as ``python -m tests.spec.written`` has read them in those classes.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moebatch.formats.registry import FORMATS, configured_format
from moebatch.formats.weight_format import WeightFormat
from moebatch.quoting import shown
from moebatch.spec.model.config_keys import ConfigFault, ConfigKeys, FaultyConfig, Wording
from moebatch.spec.model.shape import Layers, ModelShape
from moebatch.spec.model.tensor_names import TensorNames

USUAL = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False}
USUAL_ALIASES = {"num_local_experts": "num_experts"}
"""What holds where the class of a family says nothing else, or transformers does not know it."""
_WRITTEN: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(
    Path(__file__).with_name("written.json").read_text()
)
_READABLE = (
    "FP8, MXFP4, NVFP4, GPTQ, AWQ, compressed-tensors' integers of 4 or 8 bits or bitsandbytes' NF4"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilySpec(Wording):
    """One architecture, as its files describe it."""

    architecture: str
    model_type: str
    runs_as: str | None = None
    """Class of transformers that computes it, where that is another family's: files that
    transformers writes have its name in ``architectures``, and tell both by ``model_type``."""
    other_types: tuple[str, ...] = ()
    """``model_type`` of others that are alike."""
    layers: Callable[[ConfigKeys, int], Layers]
    """Reads what the layers consist of, given how many there are."""
    names: TensorNames
    """What its tensors are called in files."""
    config_type: str | None = None
    """``model_type`` of the class of transformers whose defaults files may leave out; None is the
    family's own."""
    reworded: Callable[[ConfigKeys], Mapping[str, Any]] | None = None
    """Values of keys as transformers writes them, of files that say the same in other words."""
    rotary_type: str | None = None
    """``model_type`` in whose way rotary positions are configured; None is `config_type`."""
    rotary_keys: Collection[str] = ()
    """Rotary parameters that are read of this family, and passed over in all others."""
    computed: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Keys that files need not have, such as transformers passes over, of which nothing else is
    computed than these values."""

    @property
    def types(self) -> tuple[str, ...]:
        """All that ``model_type`` may be."""
        return (self.model_type, *self.other_types)

    def shape(self, config: Mapping[str, Any], where: str) -> ModelShape:
        """What a raw ``config.json`` describes. Raises FaultyConfig with all faults at once."""
        keys = self.keys(config)
        quantised = _quantised(keys, config, where)
        model_type = config.get("model_type", self.model_type)
        if model_type not in self.types:
            expected = f"{shown(self.model_type)} as in the architecture"
            keys.fault("model_type", expected, model_type)
        for key, computed in self.computed.items():
            _require_one_of(keys, key, computed)
        shape = self._shape(keys, quantised)
        keys.require_countable(len(shape.moe_layers), shape.num_experts)
        if keys.faults:
            raise FaultyConfig(where, keys.faults)
        return shape

    @property
    def written_type(self) -> str:
        """As `config_type` says."""
        return self.config_type or self.model_type

    @property
    def written(self) -> Mapping[str, Any]:
        """Defaults of that class, by names in files."""
        return {**USUAL, **self._of_class.get("defaults", {})}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Those of that class."""
        return self._of_class.get("aliases", USUAL_ALIASES)

    @property
    def _of_class(self) -> Mapping[str, Mapping[str, Any]]:
        return _WRITTEN.get(self.written_type, {})

    def keys(self, config: Mapping[str, Any]) -> ConfigKeys:
        """Figures of a raw ``config.json``."""
        keys = ConfigKeys(config, self)
        if self.reworded is not None:
            keys.reword(self.reworded(keys))
        return keys

    def beside_others(self, architecture: str, model_type: str, **changes: Any) -> "FamilySpec":
        """The same in a configuration that has other models beside it, such as for images; these
        are not read, and their tensors are left alone. `changes` are other fields."""
        own = {"config_type": self.written_type, "within": "text_config.", **changes}
        return replace(self, architecture=architecture, model_type=model_type, **own)

    def _shape(self, keys: ConfigKeys, quantised: WeightFormat | None) -> ModelShape:
        num_layers = keys.count("num_hidden_layers")
        layers = self.layers(keys, num_layers)
        windows = layers.sliding_windows or (None,) * num_layers
        return ModelShape(
            **{**vars(layers), "sliding_windows": windows},
            architecture=self.architecture,
            num_layers=len(windows),
            hidden_size=keys.count("hidden_size"),
            vocab_size=keys.count("vocab_size"),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            num_experts=keys.count("num_experts"),
            experts_per_token=keys.experts_per_token(),
            rms_eps=keys.positive("rms_norm_eps"),
            activation=keys.name("hidden_act"),
            max_positions=keys.count("max_position_embeddings"),
            dtype=keys.dtype(),
            expert_format=quantised or FORMATS[keys.dtype()],
        )


def _quantised(keys: ConfigKeys, config: Mapping[str, Any], where: str) -> WeightFormat | None:
    """The format that ``quantization_config`` names, beside everything else or among the `keys` of
    the text; None where there is none."""
    quantization = config.get("quantization_config")
    if quantization is None:
        quantization = keys.value("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        quantization = {}
    try:
        found = configured_format(quantization)
    except ValueError as error:
        raise _faulty_quantisation(where, f"quantization_config.{error}") from None
    if found is not None:
        return found
    said = (quantization.get(key) for key in ("quant_method", "format", "quant_algo"))
    method = " ".join(shown(name) for name in said if name) or "unnamed"
    raise _faulty_quantisation(
        where,
        f"quantization_config ({method}): such checkpoints are not read; use the model in "
        f"bfloat16, or quantised as {_READABLE}",
    )


def _faulty_quantisation(where: str, message: str) -> FaultyConfig:
    return FaultyConfig(where, [ConfigFault("quantization_config", message, names_key=True)])


def _require_one_of(keys: ConfigKeys, key: str, known: Sequence[object]) -> None:
    """Of a key that a file need not have."""
    value = keys.value(key)
    if value is not None and value not in known:
        words = (each if isinstance(each, str) else shown(each) for each in known)
        keys.fault(key, " or ".join(words), value)
