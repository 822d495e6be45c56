"""How many kernels and copies a task is to a GPU: each of them has to be launched.

Counted from what the engine does, operator by operator; tests hold these numbers against it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from moebatch.layout.footprint import Dtypes
from moebatch.layout.fused import (
    by_rows,
    chooses_at_once,
    groups_experts,
    is_grouped,
    portions,
    takes_stored,
)
from moebatch.layout.load import PassLoad
from moebatch.layout.placed import CHUNK_BYTES
from moebatch.layout.scratch import MAX_GEMM_ROWS, MLP_NORMS
from moebatch.plan.pricing.mixer_launches import MixerLaunches
from moebatch.schedule.task import Kind
from moebatch.spec.model.blocks import ClampedGate, Router
from moebatch.spec.model.cache_layout import UNLIMITED
from moebatch.spec.model.shape import ModelShape

_LOGITS = 1
"""The product of a gate."""
_CHOICE = 4
"""Of experts: softmax, the best, and two copies of what was chosen."""
_NEXT_CHOICE = 10
"""Of one after the other: the best that is left, those near it, and their softmax."""
_ALL_CHOICES = 6
"""These put together and sorted, and the copies."""
_CAP = 3
"""Of logits."""
_CORRECTION = 4
"""Added; scores of what is chosen taken, and sorted."""
_GROUPS = 8
"""The best of each, their sum, the best groups, and others masked."""
_WEIGHING = 4
"""Weights of experts taken, multiplied, and all sorted anew."""
_COUNTING = 3
_SORTING = 4
"""Tokens by expert."""
_READING_BACK = 1
"""How many tokens each expert has."""
_ACTIVATIONS = {"relu2": 2}
"""Those that torch takes more than one for."""
_LATENTS = 2
"""What experts see is made, and kept by row."""
_LEFT_OUT = 3
"""Choices that compute nothing are found, and what was made in their places is taken off."""
_GIVEN_BACK = 5
"""What they give back: weights found and summed, and what they are multiplied with."""
_GATHERING = 1
"""Of an expert's tokens."""
_TABLE = 1
"""Where the experts of a group lie goes up."""
_TOGETHER = 2
"""Products of such, up to the gate and behind it."""
_LOOKING = 2
"""Whether numbers of rows are such."""


@dataclass(frozen=True)  # no slots: what follows from them is worked out once
class Launches(MixerLaunches):
    """Those of all tasks of a model."""

    is_taken: bool = True
    """Kernels that compute experts together take them as they are stored."""
    num_texts: int = 0
    """Of an expert, which are read back before it is computed with others."""

    @classmethod
    def of(cls, shape: ModelShape, dtypes: Dtypes, *, is_fused: bool) -> "Launches":
        """Of a model whose experts are stored and computed so."""
        stored = dtypes.stored
        texts = sum(part.is_text for part in stored.parts("", (1, 1)))
        return cls(
            shape,
            is_fused,
            is_taken=takes_stored(shape, stored, dtypes.compute),
            num_texts=len(shape.expert.roles) * texts,
        )

    def of_batch(self, kind: Kind, load: PassLoad) -> float:
        """Of a task that depends on nothing but what its micro-batch has to do; 0 of others."""
        count = _OF_BATCH.get(kind)
        return 0.0 if count is None else count(self, load)

    @cached_property
    def of_gates(self) -> tuple[int, ...]:
        """By layer: norm and router, or norm and MLP where there are no experts; none where there
        is no MLP."""
        shape = self.shape
        own_norm = self._norm * shape.router.has_own_norm
        chosen = _LOGITS + shape.router.has_exact_logits + self._choice
        latents = _LATENTS * (shape.latent_width is not None) + self._norm * shape.norms_latents
        before = self._before(shape.norm_of_mlps)
        gate = self._before(shape.norm_of_mlps, has_experts=True) + own_norm + chosen + latents
        gate += self._grouping + _READING_BACK + _LEFT_OUT * bool(shape.router.num_identities)
        behind = self._norm_made("mlp_out_norm")
        added = self._spread or (self._rows.add if shape.adds_experts_late else 1)
        dense = before + self._mlp + behind + added + self._attended
        dense += self._residual(shape.mlp_residual)

        def of_mlp(layer: int) -> int:
            clamps = shape.mlp_clamp(layer) is not None
            return (dense + self._rows.clamping * clamps) * shape.has_mlp(layer)

        return tuple(
            gate if shape.is_moe(layer) else of_mlp(layer) for layer in range(shape.num_layers)
        )

    def of_experts(self, rows: Sequence[float]) -> float:
        """Experts over so many tokens each, in one task: those of few rows together, the others
        portion by portion."""
        alike = Counter(rows)
        grouped = {each for each in alike if self.groups(each)}
        few = [each for each in rows if each in grouped]
        alone = (pair for pair in alike.items() if pair[0] not in grouped)
        others = sum(num * self._of_expert(each) for each, num in alone)
        num_portions = sum(1 for _ in portions(few, MAX_GEMM_ROWS))
        together = self.num_texts * len(few) + _TOGETHER * num_portions
        return others + (_TABLE + together if few else 0)

    def groups(self, rows: float) -> bool:
        """Whether an expert over so many tokens is computed together with others."""
        return self._groups and is_grouped(rows)

    def kinds(self, mean_rows: float) -> list[tuple[float, float]]:
        """Experts over so many tokens in the mean as far as they are computed alike: the share of
        each kind, and its own mean."""
        if not self._groups:
            return [(1.0, mean_rows)]
        return by_rows(mean_rows, self.shape.computed_per_token / self.shape.num_experts)

    def _of_expert(self, rows: float) -> float:
        expert = self.shape.expert
        beside = _GATHERING + self._rows.place + len(expert.roles) * expert.bias
        clamping = self._clamping_of_expert
        return (self._mlp + beside + clamping) * ceil(rows / MAX_GEMM_ROWS)

    def of_combine(self, *, is_joined: bool) -> float:
        """The end of a layer: outputs are added up, with those of a shared expert if there is
        one."""
        return self._adding + self._sorting(is_joined)

    @cached_property
    def of_head(self) -> float:
        """Logits of a block of tokens: rows gathered, normed, multiplied, copied, and scaled
        perhaps."""
        end = (self.shape.logit_scale != 1) + 3 * (self.shape.logit_cap is not None)
        return self._merged + self._norm + 3 + end

    # --- pieces ---------------------------------------------------------------------------------

    @cached_property
    def _clamping_of_expert(self) -> float:
        return self._clamping(self.shape.expert_clamp)

    def _clamping(self, clamp: Callable[[int], ClampedGate | None]) -> float:
        """In the mean of layers with experts, of which some may clamp."""
        layers = self.shape.moe_layers
        return self._rows.clamping * sum(clamp(n) is not None for n in layers) / len(layers)

    @cached_property
    def _adding(self) -> float:
        """That end, but for the sorting of tokens."""
        shape = self.shape
        late = shape.adds_experts_late
        shared = 0.0
        if shape.shared_expert:
            beside = not self.is_fused and not late
            scaled = shape.shared_scale != 1
            shared = self._mlp + beside + scaled + self._clamping(shape.mlp_clamp)
        given_back = (_GIVEN_BACK + (not self.is_fused)) * bool(shape.router.num_identities)
        mixed = 3 * bool(shared and shape.shared_expert_gate)
        own_norms = MLP_NORMS & {*shape.norms, *shape.moe_norms}
        norms = sum(self._norm_made(role) + self._rows.sum for role in own_norms)
        if shape.norms_each_expert:
            norms += shape.experts_per_token * (self._norm + 1) + 1
        latents = (self._rows.sum + 1) * (shape.latent_width is not None)
        others = self._residual(shape.mlp_residual) + shape.scales_layers + latents + given_back
        added = (self._rows.sum + 1 if late else self._rows.add) + _LOOKING
        return added + shared + mixed + norms + others + self._attended + self._spread

    @property
    def _attended(self) -> int:
        """What attention has made is added, where that comes late."""
        return int(self.shape.adds_attention_late)

    @property
    def _mlp(self) -> int:
        """Products of an MLP, and what comes between them."""
        shape, products = self.shape, len(self.shape.expert.roles)
        if shape.is_swiglu and shape.expert.is_gated:
            return products + self._rows.gate
        return products + _ACTIVATIONS.get(shape.activation, 1) + shape.expert.is_gated

    @cached_property
    def _groups(self) -> bool:
        return self.is_fused and self.is_taken and groups_experts(self.shape)

    @property
    def _choice(self) -> int:
        """What follows the logits of a gate."""
        return 1 if self._chooses else _choice(self.shape.router, self.shape.experts_per_token)

    @property
    def _grouping(self) -> int:
        """Tokens by expert; torch sorts them when experts run."""
        return 1 if self._chooses else _COUNTING

    def _sorting(self, is_joined: bool) -> int:
        """The same of all micro-batches of a pass, where it is known how many each expert has."""
        return int(is_joined) if self._chooses else _SORTING

    @cached_property
    def _chooses(self) -> bool:
        return self.is_fused and chooses_at_once(self.shape)

    @cached_property
    def num_moved_parts(self) -> float:
        """Of what a mean layer caches of a token, or keeps as a state, which is moved part by
        part."""
        groups = self.shape.cache_groups(UNLIMITED)
        num_parts = sum(len(group.layers) * len(group.layout.parts) for group in groups)
        return num_parts / self.shape.num_keeping_layers


def num_chunks(expert_bytes: int) -> int:
    """Pieces in which an expert is moved."""
    return max(1, ceil(expert_bytes / CHUNK_BYTES))


def of_transfer(expert_bytes: int, num_runs: int) -> int:
    """Copies of one expert: its pieces, cut once more where a run of its tensors ends."""
    return num_chunks(expert_bytes) + num_runs - 1


def _choice(router: Router, num_chosen: int) -> int:
    """What follows the logits of a gate, by torch."""
    one_by_one = router.scores == "sparsemixer"
    return (
        (_NEXT_CHOICE * num_chosen + _ALL_CHOICES if one_by_one else _CHOICE)
        + _CAP * (router.logit_cap is not None)
        + (router.scores == "sqrtsoftplus")
        + _CORRECTION * router.has_correction
        + _GROUPS * (router.groups is not None)
        + 2 * (router.norm_order is not None)
        + bool(router.least_norm)
        + bool(router.added_to_norm)
        + (router.scale != 1.0)
        + _WEIGHING * router.weighs_experts
    )


_OF_BATCH: Mapping[Kind, Callable[[Launches, PassLoad], float]] = {
    Kind.ATTEND: Launches.of_mixer,
    Kind.PRE: Launches.of_pre,
    Kind.OUT: Launches.of_out,
    Kind.OFF: Launches.of_off,
    Kind.LOAD: lambda own, load: 1,
    # Pages are gathered out of pinned memory. Where they follow each other they are copied run by
    # run, in which case the link takes longer than the host.
    Kind.KV_UP: lambda own, load: own.num_moved_parts,
    # New rows are gathered, and scattered into pinned memory.
    Kind.KV_DOWN: lambda own, load: 2 * own.num_moved_parts,
}
