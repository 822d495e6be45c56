"""Rotary positions: frequencies as transformers defines them for a config.

Shape letters: T tokens, H heads, C head size, R pairs of a head that rotate.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.quoting import named_reason
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.attention import Attention, LearntTemperature, PowerTemperature
from moebatch.spec.model.compressed_attention import CompressedAttention
from moebatch.spec.model.shape import ModelShape

_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "rotary_dim",
    "qk_rope_head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
_MAX_CACHED_LENGTHS = 4096


class Angles(NamedTuple):
    """By how much tokens are rotated; by nothing where there are no pairs."""

    cos_TR: Tensor
    sin_TR: Tensor
    query_scales_T11: Tensor | None = None
    """By what their queries are multiplied, float32, where attention has a temperature; or of
    what that is made, where it is learnt."""
    entries: "Angles | None" = None
    """Those of entries whose last tokens are there, which are rotated as their first ones, where
    layers make such."""


class Rope:
    """Turns positions into the angles by which queries and keys are rotated."""

    def __init__(
        self,
        attention: Attention,
        shape: ModelShape,
        config: Mapping[str, Any],
        device: torch.device,
        growth_R: Tensor | None = None,
    ) -> None:
        """By the exponential of `growth_R` frequencies are multiplied, where it is given.

        Raises CheckpointError where the raw config asks for what transformers cannot do.
        """
        self.device = device
        self._growth_R = growth_R if attention.rotary_dim else None
        self._temperature = attention.temperature
        self._entries = attention.entries if isinstance(attention, CompressedAttention) else None
        try:
            self._parameters = _RopeParameters(attention, shape, config)
            frequencies = self._frequencies(1)
            self._parameters.require_numbers(shape.max_positions)
        except Exception as error:
            # transformers checks little: a bad entry shows as almost any exception.
            raise CheckpointError(f"rope parameters: {named_reason(error)}") from error
        rotary_dim = attention.rotary_dim
        if frequencies.shape != (rotary_dim // 2,):
            raise CheckpointError(
                f"rope parameters rotate {2 * len(frequencies)} of "
                f"{attention.head_dim} head dimensions; {shape.architecture} rotates {rotary_dim}"
            )

    @classmethod
    def of_model(cls, files: ModelFiles) -> "list[Rope]":
        """Those of its layers on the CPU, as they lie in its files, which a CheckpointError names
        where they ask for what transformers cannot do."""
        try:
            return cls.by_layer(files.shape, files.config, torch.device("cpu"))
        except CheckpointError as error:
            raise CheckpointError(f"{files.described_in}: {error}") from error

    @classmethod
    def by_layer(
        cls,
        shape: ModelShape,
        config: Mapping[str, Any],
        device: torch.device,
        growth_R: Tensor | None = None,
    ) -> "list[Rope]":
        """That of each layer; those that attend alike have one."""
        return shape.by_layer(lambda attention: cls(attention, shape, config, device, growth_R))

    @property
    def depends_on_length(self) -> bool:
        """Whether a token is rotated otherwise in a longer sequence."""
        shortest, longest = self._parameters.effective_lengths(torch.tensor([1, 2**40])).tolist()
        return bool(shortest != longest)

    def angles(self, positions_T: Tensor, lengths_T: Tensor, dtype: torch.dtype) -> Angles:
        """Cosines and sines [T, R] of tokens at `positions_T` in sequences of `lengths_T`.

        Lengths matter only for scalings that depend on them (dynamic, longrope). Positions and
        lengths are best on the CPU; the angles are on the device that the rope was made for.
        """
        angles = self._at(positions_T, lengths_T, dtype)
        if self._entries is None:
            return angles
        first_T = (positions_T + 1 - self._entries.num_tokens).clamp(min=0)
        return angles._replace(entries=self._at(first_T, lengths_T, dtype))

    def _at(self, positions_T: Tensor, lengths_T: Tensor, dtype: torch.dtype) -> Angles:
        frequencies_TR = self._frequencies_of(lengths_T)
        angles = self._angles(positions_T, frequencies_TR)
        scale = self._parameters.scales(lengths_T, self.device)
        cos_TR, sin_TR = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
        return Angles(cos_TR, sin_TR, self._query_scales(positions_T))

    def turns(self, from_T: Tensor, to_T: Tensor, lengths_T: Tensor, dtype: torch.dtype) -> Angles:
        """The same for what is rotated to some positions already, and is to be at others."""
        frequencies_TR = self._frequencies_of(lengths_T)
        angles = self._angles(to_T, frequencies_TR) - self._angles(from_T, frequencies_TR)
        return Angles(angles.cos().to(dtype), angles.sin().to(dtype))

    def _query_scales(self, positions_T: Tensor) -> Tensor | None:
        if self._temperature is None:
            return None
        positions_T = positions_T.to(self.device, torch.float32)
        if isinstance(self._temperature, LearntTemperature):
            return positions_T.log1p()[:, None, None]
        step = self._temperature.step
        if isinstance(self._temperature, PowerTemperature):
            logs_T = ((positions_T + 1) / step).log1p()
            return (logs_T * self._temperature.exponent).exp()[:, None, None]
        first = self._temperature.first
        steps_T = ((positions_T + first) / step).floor()
        return (steps_T.log1p() * self._temperature.strength + 1)[:, None, None]

    def _angles(self, positions_T: Tensor, frequencies_TR: Tensor) -> Tensor:
        return positions_T.to(self.device, torch.float32)[:, None] * frequencies_TR

    def _frequencies_of(self, lengths_T: Tensor) -> Tensor:
        """Of tokens in sequences of these lengths, [T, R]."""
        effective_T = self._parameters.effective_lengths(lengths_T)
        lengths, choice_T = torch.unique(effective_T, return_inverse=True)
        frequencies = torch.stack([self._frequencies(length) for length in lengths.tolist()])
        return frequencies[choice_T.to(self.device)]

    def _frequencies(self, length: int) -> Tensor:
        cache = self._parameters.cache
        if length not in cache:
            if len(cache) >= _MAX_CACHED_LENGTHS:
                cache.clear()
            frequencies_R = self._parameters.frequencies(length).to(self.device)
            if self._growth_R is not None:
                frequencies_R = frequencies_R * self._growth_R.exp()
            cache[length] = frequencies_R
        return cache[length]


class _RopeParameters:
    """The standardised parameters of a config and the function that transformers has for them."""

    def __init__(self, attention: Attention, shape: ModelShape, config: Mapping[str, Any]) -> None:
        self.cache: dict[int, Tensor] = {}
        self._usual_scale = 1.0
        self._own_scales: tuple[float, float] | None = None
        self.kind, self._config, self._compute = "none", None, _nothing
        if not attention.rotary_dim:
            return
        self._config = _rope_config(attention, shape, config)
        self._config.standardize_rope_params()  # as its functions do, for keys beside parameters
        parameters = self._config.rope_parameters
        self.kind = parameters["rope_type"]
        own = {*FAMILIES[shape.architecture].rotary_keys} & parameters.keys()
        if self.kind == "dynamic" and "alpha" in own and parameters["alpha"]:
            self.kind = "alpha"  # as Hunyuan has it: whatever the length
        self._threshold = shape.max_positions
        if self.kind == "longrope":
            self._threshold = parameters["original_max_position_embeddings"]
        self._compute = _compute_function(self.kind)
        if self.kind == "longrope" and "long_mscale" in own:
            self._own_scales = float(parameters["short_mscale"]), float(parameters["long_mscale"])

    def effective_lengths(self, lengths_T: Tensor) -> Tensor:
        """Lengths with all that share their frequencies made equal."""
        if "dynamic" in self.kind:
            return lengths_T.clamp(min=self._threshold)
        if self.kind == "longrope":
            return self._threshold + (lengths_T > self._threshold).long()
        return torch.ones_like(lengths_T)

    def frequencies(self, length: int) -> Tensor:
        """Inverse frequencies [R], float32, for a sequence of that length."""
        frequencies, scale = self._compute(self._config, "cpu", seq_len=length)
        self._usual_scale = float(scale)
        return frequencies.float()

    def require_numbers(self, max_positions: int) -> None:
        """Raises ValueError where the last token of the longest sequence would turn all that it
        sees into NaN."""
        lengths = torch.tensor([max_positions])
        frequencies = self.frequencies(int(self.effective_lengths(lengths)))
        cos = ((max_positions - 1) * frequencies).cos() * self.scales(lengths, lengths.device)
        if not cos.isfinite().all():
            raise ValueError("angles are no numbers")

    def scales(self, lengths_T: Tensor, device: torch.device) -> Tensor | float:
        """By what cosines and sines of tokens in sequences of these lengths are multiplied, [T, 1],
        or all of them. Phi-3.5-MoE names two such factors."""
        if self._own_scales is None:
            return self._usual_scale
        short, long = self._own_scales
        is_long_T1 = (lengths_T > self._threshold)[:, None]
        return torch.where(is_long_T1, long, short).to(device, torch.float32)


def rotate(x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
    """Rotates each pair (i, i + R) of the first 2 R numbers of every head in place."""
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    first, second = x_THC[..., : 2 * cos_TR.shape[1]].chunk(2, dim=-1)
    first_sin, second_sin = first * sin, second * sin
    first.mul_(cos).sub_(second_sin)
    second.mul_(cos).add_(first_sin)


def rotate_neighbours(x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
    """The same of each pair (2 i, 2 i + 1) of all numbers of every head."""
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    first, second = x_THC[..., 0::2], x_THC[..., 1::2]
    first_sin, second_sin = first * sin, second * sin
    first.mul_(cos).sub_(second_sin)
    second.mul_(cos).add_(first_sin)


def _rope_config(attention: Attention, shape: ModelShape, config: Mapping[str, Any]) -> Any:
    """A transformers config with what matters for rotary positions and no more: it may be one of
    another family, which has rules of its own about sizes that do not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = FAMILIES[shape.architecture]
    model_type = family.rotary_type or family.written_type
    said = family.keys(config)
    given = {key: deepcopy(said.value(key)) for key in _KEYS if said.value(key) is not None}
    if attention.rotary is not None:
        of_kinds = given.get("rope_parameters") or family.written.get("rope_parameters", {})
        given["rope_parameters"] = _of_kind(attention.rotary, of_kinds)
    if attention.positioned_dim < attention.head_dim:  # which is that share of a head already
        for parameters in (given.get("rope_parameters"), given.get("rope_scaling")):
            if isinstance(parameters, dict):
                parameters.pop("partial_rotary_factor", None)
    return CONFIG_MAPPING[model_type](**given, head_dim=attention.positioned_dim)


def _of_kind(kind: str, rotary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters of layers of a kind, where each kind has its own. Raises ValueError where
    a base is missing, which no default of transformers replaces."""
    found = deepcopy(rotary.get(kind))
    if not isinstance(found, Mapping) or found.get("rope_theta") is None:
        raise ValueError(f"those of {kind} must have a rope_theta")
    return found


def _compute_function(kind: str) -> Callable[..., tuple[Tensor, float]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own = {"default": _default_frequencies, "alpha": _stretched_frequencies}
    return own.get(kind) or ROPE_INIT_FUNCTIONS[kind]


def _nothing(*_: object, **__: object) -> tuple[Tensor, float]:
    return torch.empty(0), 1.0


def _default_frequencies(config: Any, device: str, seq_len: int) -> tuple[Tensor, float]:
    parameters = config.rope_parameters
    rotary_dim = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    return 1.0 / parameters["rope_theta"] ** (steps / rotary_dim), 1.0


def _stretched_frequencies(config: Any, device: str, seq_len: int) -> tuple[Tensor, float]:
    """Those of a larger base, as NTK-aware scaling by ``alpha`` has it."""
    parameters, dim = config.rope_parameters, config.head_dim
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    base = parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2))
    return 1.0 / base ** (steps / dim), 1.0
