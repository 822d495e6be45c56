"""What a family says of ``config.json`` and of its checkpoints, and the pieces that most share.

Released configurations omit what equals the default of the family's class in transformers, so
these defaults are part of the format: ``written.json`` has them, by ``model_type``, and the names
that a key may have there, as ``python -m tests.spec.written`` has read them in those classes.
"""

import json
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from moebatch.formats.registry import FORMATS, configured_format
from moebatch.formats.weight_format import WeightFormat
from moebatch.quoting import shown
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.blocks import ClampedGate, ExpertGroups, Router
from moebatch.spec.model.config_keys import ConfigFault, ConfigKeys, FaultyConfig, Wording
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.recurrence import MOST_SEEN, StateSpace
from moebatch.spec.model.shape import Layers, ModelShape
from moebatch.spec.model.tensor_names import TensorNames

Windows = tuple[int | None, ...]
_USUAL = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False}
_WRITTEN: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(
    Path(__file__).with_name("written.json").read_text()
)
_ALIASES = {"num_local_experts": "num_experts"}
"""Of a family that transformers does not know."""
_SILU = ("silu", "swish")
_UNLIMITED = (None, [0.0, inf], [0.0, {"__float__": "Infinity"}])
"""The last is how transformers writes it."""
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

    @property
    def types(self) -> tuple[str, ...]:
        """All that ``model_type`` may be."""
        return (self.model_type, *self.other_types)

    def shape(self, config: Mapping[str, Any], where: str) -> ModelShape:
        """What a raw ``config.json`` describes. Raises FaultyConfig with all faults at once."""
        quantised = _quantised(config, where)
        keys = self.keys(config)
        model_type = config.get("model_type", self.model_type)
        if model_type not in self.types:
            expected = f"{shown(self.model_type)} as in the architecture"
            keys.fault("model_type", expected, model_type)
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
        return {**_USUAL, **self._of_class.get("defaults", {})}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Those of that class."""
        return self._of_class.get("aliases", _ALIASES)

    @property
    def _of_class(self) -> Mapping[str, Mapping[str, Any]]:
        return _WRITTEN.get(self.written_type, {})

    def keys(self, config: Mapping[str, Any]) -> ConfigKeys:
        """Figures of a raw ``config.json``."""
        keys = ConfigKeys(config, self)
        if self.reworded is not None:
            keys.reword(self.reworded(keys))
        return keys

    def beside_others(self, architecture: str, model_type: str) -> "FamilySpec":
        """The same in a configuration that has other models beside it, such as for images; these
        are not read, and their tensors are left alone."""
        return replace(
            self,
            architecture=architecture,
            model_type=model_type,
            config_type=self.written_type,
            within="text_config.",
        )

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


def _quantised(config: Mapping[str, Any], where: str) -> WeightFormat | None:
    """The format that ``quantization_config`` names, None where there is none."""
    quantization = config.get("quantization_config")
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


def grouped_attention(
    keys: ConfigKeys,
    *,
    biases: str | None = None,
    qkv_bias: str | None = None,
    rotates_part: bool = False,
    fills_hidden: bool = False,
    **others: Any,
) -> GroupedAttention:
    """Attention with keys and values of their own; `biases` is the key that says whether all
    projections have one, `qkv_bias` whether all but the last have, `rotates_part` says that a part
    of a head may rotate alone, as rotary parameters of its kind have it, and `fills_hidden` that
    heads together have to be as wide as hidden states. What else the attention of a family is like,
    it says in fields of `GroupedAttention`."""
    has_biases = biases is not None and keys.flag(biases)
    heads, kv_heads, head_dim = keys.heads(fill_hidden=fills_hidden)
    return GroupedAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=has_biases or (qkv_bias is not None and keys.flag(qkv_bias)),
        output_bias=has_biases,
        num_rotated=keys.rotary_dim(head_dim, others.get("rotary")) if rotates_part else None,
        **others,
    )


def softmax_router(keys: ConfigKeys) -> Router:
    """A softmax over all experts, whose best may be made to sum to one (``norm_topk_prob``)."""
    return Router(norm_order=1.0 if keys.flag("norm_topk_prob") else None)


def corrected_router(keys: ConfigKeys) -> Router:
    """DeepSeek-V3's: sigmoids, corrected where experts are chosen, those of the best groups alone.

    transformers adds 1e-20 to the sum of weights; here it is at least that, which is the same
    for all sums above 1e-13.
    """
    return Router(
        scores="sigmoid",
        groups=expert_groups(keys, num_scored=2),
        has_correction=True,
        norm_order=1.0 if keys.flag("norm_topk_prob") else None,
        least_norm=1e-20,
        scale=keys.positive_or_none("routed_scaling_factor") or 1.0,
        has_exact_logits=True,
        has_exact_weights=True,
    )


def expert_groups(keys: ConfigKeys, *, num_scored: int) -> ExpertGroups | None:
    """``n_group`` groups of which ``topk_group`` are kept; None where that leaves all experts."""
    num_groups, num_kept = keys.count("n_group"), keys.count("topk_group")
    num_experts, num_chosen = keys.count("num_experts"), keys.experts_per_token()
    group_size, rest = divmod(num_experts, num_groups)
    if rest or group_size < num_scored:
        keys.wrong(
            "n_group",
            f"n_group ({num_groups}) must divide {num_experts} experts into groups of at least "
            f"{num_scored}",
        )
    elif not num_chosen <= num_kept * group_size <= num_experts:
        keys.wrong(
            "topk_group",
            f"topk_group ({num_kept}) of {num_groups} groups of {group_size} experts do not hold "
            f"the {num_chosen} experts of a token",
        )
    elif num_kept < num_groups:
        return ExpertGroups(num_groups, num_kept, num_scored)
    return None


def everywhere(keys: ConfigKeys, num_layers: int) -> Windows:
    """``sliding_window`` holds for all layers, if there is one."""
    window = None if keys.value("sliding_window") is None else keys.count("sliding_window")
    return (window,) * num_layers


def by_layer_types(keys: ConfigKeys, num_layers: int, otherwise: Callable[[int], bool]) -> Windows:
    """``sliding_window`` holds for layers that ``layer_types`` names; where there are no such
    types, for those that `otherwise` names."""
    if keys.value("sliding_window") is None:
        return (None,) * num_layers
    window, full, sliding = keys.count("sliding_window"), "full_attention", "sliding_attention"
    usual = [sliding if otherwise(layer) else full for layer in range(num_layers)]
    types = layer_types(keys, usual, known=(full, sliding))
    return tuple(window if kind == sliding else None for kind in types)


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


def by_mlp_types(keys: ConfigKeys, num_layers: int, otherwise: Container[int]) -> tuple[int, ...]:
    """Layers that ``mlp_layer_types`` calls sparse; where there are no such types, those that are
    in `otherwise`."""
    dense, sparse = known = ("dense", "sparse")
    usual = [sparse if layer in otherwise else dense for layer in range(num_layers)]
    types = layer_types(keys, usual, known, key="mlp_layer_types")
    return tuple(layer for layer, kind in enumerate(types) if kind == sparse)


def require_silu(keys: ConfigKeys, key: str = "hidden_act") -> None:
    """`key` says what transformers activates convolutions of layers that recur with: experts are so
    in most families. Here SiLU follows all of them."""
    if keys.value(key) not in _SILU:
        keys.fault(key, " or ".join(_SILU), keys.value(key))


def require_done(keys: ConfigKeys, done: Mapping[str, Sequence[object]]) -> None:
    """Notes a fault for each key that transformers passes over where it says what is not `done`;
    files need not have it."""
    for key, known in done.items():
        value = keys.value(key)
        if value is not None and value not in known:
            keys.fault(key, " or ".join(map(shown, known)), value)


def clamps_by_layer(keys: ConfigKeys, key: str, num_layers: int) -> tuple[ClampedGate | None, ...]:
    """What a list with a limit for each layer says; 0 and null are none."""
    limits = keys.value(key)
    if limits is None:
        return ()
    if not isinstance(limits, list) or len(limits) != num_layers:
        keys.fault(key, f"a list with a number for each of {num_layers} layers", limits)
        return ()
    return tuple(
        ClampedGate(limit=keys.positive_number(key, limit), clamps_activated=True)
        if limit is not None and limit != 0
        else None
        for limit in limits
    )


def state_space(keys: ConfigKeys, heads: int, head_dim: int) -> StateSpace:
    """Mamba-2 with so many heads of values, whose steps may be of any length."""
    limit, groups = keys.value("time_step_limit"), keys.count("mamba_n_groups")
    if limit not in _UNLIMITED:
        keys.fault("time_step_limit", "[0.0, Infinity]", limit)
    if heads % groups:
        heads_text = keys.worded("mamba_n_heads", heads)
        groups_text = keys.worded("mamba_n_groups", groups)
        keys.wrong("mamba_n_heads", f"{heads_text} must be a multiple of {groups_text}")
    return StateSpace(
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=keys.count("mamba_d_state"),
        value_head_dim=head_dim,
        conv_width=keys.count("mamba_d_conv", least=2, most=MOST_SEEN),
        conv_bias=keys.flag("mamba_conv_bias"),
        bias=keys.flag("mamba_proj_bias"),
    )


def recurrent_layers(
    keys: ConfigKeys, usual: Sequence[str], *, recur: Sequence[str], attend: Sequence[str]
) -> tuple[int, ...]:
    """Layers that ``layer_types`` names in one of the ways of those that recur; `usual` where it
    says nothing. All others must attend, and one has to."""
    types = layer_types(keys, usual, known=(*attend, *recur))
    require_attention(keys, bool(set(types) & set(attend)))
    return tuple(layer for layer, kind in enumerate(types) if kind in recur)


def require_attention(keys: ConfigKeys, is_there: bool) -> None:
    """Notes a fault where no layer attends."""
    if not is_there:
        keys.wrong("layer_types", "no layer has full attention; models without it are not run")


def layer_types(
    keys: ConfigKeys, usual: Sequence[str], known: Sequence[str], key: str = "layer_types"
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
