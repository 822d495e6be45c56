"""What the gates of a run have chosen, pass by pass: kept in a file, played back, also to a
simulation.

Shape letters: L MoE layers, T tokens of a pass, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moebatch.arrays import Floats
from moebatch.errors import CheckpointError, ConfigError
from moebatch.predict.array_file import (
    Arrays,
    Description,
    FileKind,
    Sizes,
    is_whole,
    whole_numbers,
)
from moebatch.predict.predictor import Chosen, counts_of
from moebatch.spec.model.shape import ModelShape

TRACE = FileKind(
    title="routing trace",
    file="trace",
    version=1,
    remedy="record one by `moebatch calibrate --trace`",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingTrace:
    """Passes in their order."""

    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    passes: tuple[Chosen, ...]
    """What each token of a pass has chosen at each MoE layer, [L, T, K]."""

    @classmethod
    def of(
        cls, passes: Sequence[Chosen], moe_layers: Sequence[int], *, num_experts: int
    ) -> "RoutingTrace":
        """Passes as arrays [L, T, K], at least one."""
        dtype = np.uint8 if num_experts <= 2**8 else np.uint16
        return cls(
            moe_layers=tuple(moe_layers),
            num_experts=num_experts,
            experts_per_token=passes[0].shape[-1],
            passes=tuple(experts_LTK.astype(dtype) for experts_LTK in passes),
        )

    @classmethod
    def load(cls, path: Path) -> "RoutingTrace":
        """A trace that `save` has written. Raises CheckpointError where it is damaged."""
        arrays, description = TRACE.load(path, None, _sizes)
        num_experts = description["num_experts"]
        for name, experts in arrays.items():
            if not experts.size or int(experts.max()) >= num_experts:
                fault = f"{name} is empty or names an expert that is not there"
                raise TRACE.refusal(path, None, fault)
        ordered = [arrays[f"pass.{number}"] for number in range(len(arrays))]
        return cls.of(ordered, description["moe_layers"], num_experts=num_experts)

    def save(self, path: Path, *, fingerprint: str = "") -> None:
        """Writes the trace of the model of that fingerprint. Raises StorageError."""
        arrays = {f"pass.{number}": experts for number, experts in enumerate(self.passes)}
        TRACE.save(
            path,
            None,
            arrays,
            model=fingerprint,
            moe_layers=list(self.moe_layers),
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
        )


def _sizes(found: Description, arrays: Arrays) -> Sizes | None:
    """Passes of any number of tokens, each number of an expert in one byte or two."""
    layers, num_choices = found.get("moe_layers"), found.get("experts_per_token")
    if not (whole_numbers(layers) and is_whole(found.get("num_experts")) and is_whole(num_choices)):
        return None
    assert isinstance(layers, list) and isinstance(num_choices, int), "checked above"
    names = [f"pass.{number}" for number in range(max(1, len(arrays)))]
    known = [(name, arrays.get(name)) for name in names]
    return {
        name: (
            (len(layers), 1 if of is None or of.ndim < 2 else of.shape[1], num_choices),
            "uint16" if of is not None and of.dtype == np.uint16 else "uint8",
        )
        for name, of in known
    }


def load_routing(path: Path, shape: ModelShape) -> "TraceRouting":
    """The trace of a file that a user names, for a model of that shape.

    Raises ConfigError where it is missing, damaged or of another model.
    """
    try:
        trace = RoutingTrace.load(path)
    except CheckpointError as error:
        raise ConfigError.at("--routing", str(error)) from None
    found = trace.moe_layers, trace.num_experts, trace.experts_per_token
    if found != (tuple(shape.moe_layers), shape.num_experts, shape.experts_per_token):
        message = (
            f"is of a model with {len(trace.moe_layers)} layers of {trace.num_experts} experts, "
            f"{trace.experts_per_token} per token; this one has {len(shape.moe_layers)} of "
            f"{shape.num_experts}, {shape.experts_per_token} per token"
        )
        raise ConfigError.at(path, message)
    return TraceRouting(trace)


class TraceRouting:
    """Tokens of a trace one behind the other, from the start again when they are used up."""

    def __init__(self, trace: RoutingTrace) -> None:
        self._layers = {layer: place for place, layer in enumerate(trace.moe_layers)}
        self._num_experts = trace.num_experts
        self._experts_LTK = np.concatenate(trace.passes, axis=1)
        # A token never chooses an expert twice, so these are chances.
        self._chances_LE = np.array(
            [counts_of(of, trace.num_experts) / len(of) for of in self._experts_LTK]
        )

    def rows(self, number: int, layer: int, micro_batch: int, tokens: float) -> Floats:
        """Tokens of each expert, [E]; every micro-batch of every pass takes tokens of its own, the
        same in all layers."""
        of_layer = self._experts_LTK[self._layers[layer]]
        count = max(1, round(tokens))
        first = int(np.random.default_rng((number, micro_batch)).integers(len(of_layer)))
        taken = np.arange(first, first + min(count, len(of_layer))) % len(of_layer)
        return counts_of(of_layer[taken], self._num_experts) * (count / len(taken))

    def chances(self, layer: int) -> Floats:
        """With what chance a token of the trace chooses each expert, [E]; K in all."""
        chances_E: Floats = self._chances_LE[self._layers[layer]]
        return chances_E
