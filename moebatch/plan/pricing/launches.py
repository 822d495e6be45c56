"""How many kernels and copies a task is to a GPU: each of them has to be launched.

Counted from what the engine does, operator by operator; tests hold these numbers against it. What
depends on lengths that a `PassLoad` does not know is said where it is guessed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

from moebatch.layout.footprint import Dtypes
from moebatch.layout.fused import (
    attends_in_place,
    by_rows,
    chooses_at_once,
    groups_experts,
    is_grouped,
    portions,
    steps_at_once,
    takes_stored,
)
from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import (
    GATHER_ROWS,
    MAX_GEMM_ROWS,
    MLP_NORMS,
    PROMPT_ROWS,
    logits_rows,
)
from moebatch.layout.setup import CHUNK_BYTES
from moebatch.schedule.task import Kind
from moebatch.spec.model.attention import Attention, GateOpening
from moebatch.spec.model.blocks import ClampedGate, Residual, Router
from moebatch.spec.model.cache_layout import UNLIMITED
from moebatch.spec.model.compressed_attention import CompressedAttention
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.recurrence import (
    CHUNK_TOKENS,
    Recurrence,
)
from moebatch.spec.model.shape import ModelShape


class _RowLaunches(NamedTuple):
    """Launches of what goes through rows."""

    norm: int
    norm_gated: int
    rotation: int
    """Of queries, and of keys."""
    gate: int
    clamping: int
    """What else a gate does that clamps."""
    place: int
    """What an expert has made is weighed and put back."""
    add: int
    """Outputs of experts are summed, with those of a shared one, and added."""
    sum: int
    """The same for a norm."""


_BY_TORCH = _RowLaunches(
    norm=9, norm_gated=11, rotation=12, gate=2, clamping=6, place=5, add=3, sum=3
)
"""A norm: into float32, sum of squares, five for its root, back, times the weight. A gated one is
in float32 already, and is multiplied by silu of its gate there. A rotation: six for queries, and
for keys."""
_FUSED = _RowLaunches(norm=1, norm_gated=1, rotation=2, gate=1, clamping=0, place=1, add=1, sum=2)
_LAYER_NORM = 11
"""Without a bias."""
_DECODE_GROUP = 3
"""Queries are gathered, attend to what is gathered of the cache, and results are put back."""
_PROMPT_SLICE = 2
_SINK_SCORES = 12
"""Attention with scores of its own for sinks, which no single operator knows."""
_ABSORBED = 2
"""Queries brought to latents, and the part with positions behind them."""
_BROUGHT_BACK = 1
"""Of sums of latents to values."""
_EXPANDED = 2
"""Latents of a slice are gathered, and the rotated key goes to all heads."""
_OUTPUT_GATE: Mapping[GateOpening, int] = MappingProxyType({"sigmoid": 3, "softplus": 4})
"""Its product, what it goes through, and what it weighs."""
_WIDENED = 2
"""Gates and fading of a recurrence, each of a few numbers."""
_MERGED = 15
"""Streams of hidden states, before a part of a layer."""
_SPREAD = 22
"""What it makes, over them: with how they are mixed as it is at first."""
_SPREAD_UNMIXED = 16
"""The same, over streams that are not mixed with each other."""
_BALANCING = 6
"""Of its rows and columns, once more."""
_COMPRESSED = 26
"""Attention to a window and entries, but for its norms: products, rotations there and back, what is
cached, and the groups of its output."""
_OF_ENTRIES = 4
"""What they are made of, projected."""
_SEEN = 5
"""By tokens of a sequence: rows, gathered."""
_ENTRIES_SEEN = 6
"""Entries beside these, and what they are made of kept."""
_QUERY_BLOCK = 11
"""Of a sequence: scores, masked, softmax, and what is summed."""
_ENTRIES_MASKED = 5
_ENTRY_MADE = 20
_BLOCK_QUERIES = 16
_OUT = 2
"""Projection, and the sum with what it is added to."""
_CONVOLVED = 4
"""Sequences that decode, in neighbouring rows of the state, or some tokens of a prompt, beside the
taps of the convolution."""
_ROUNDING = 8
"""States in float16 are widened, and rounded again."""
_TAP = 2
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
class Launches:
    """Those of a model on a GPU; of tasks that a CPU does they say nothing."""

    shape: ModelShape
    is_fused: bool
    """Kernels in Triton go through rows, and compute experts of few rows together."""
    is_taken: bool = True
    """The latter take experts as they are stored."""
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
        latents = _LATENTS * (shape.latent_width is not None)
        before = self._before(shape.norm_of_mlps)
        gate = before + own_norm + chosen + latents
        gate += self._grouping + _READING_BACK + _LEFT_OUT * bool(shape.router.num_identities)
        behind = self._norm * ("mlp_out_norm" in shape.norms)
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
        few = [*filter(self.groups, rows)]
        alike = Counter(rows).items()
        others = sum(num * self._of_expert(each) for each, num in alike if not self.groups(each))
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

    def of_head(self, rows: float, dtype_bytes: int) -> float:
        """Logits after so many tokens, block by block: rows gathered, normed, multiplied, copied,
        and scaled perhaps."""
        end = (self.shape.logit_scale != 1) + 3 * (self.shape.logit_cap is not None)
        return (self._merged + self._norm + 3 + end) * ceil(
            rows / logits_rows(self.shape, dtype_bytes)
        )

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
        norms = (self._norm + self._rows.sum) * len(MLP_NORMS & {*shape.norms, *shape.moe_norms})
        latents = (self._rows.sum + 1) * (shape.latent_width is not None)
        others = self._residual(shape.mlp_residual) + shape.scales_layers + latents + given_back
        added = (self._rows.sum + 1 if late else self._rows.add) + _LOOKING
        return added + shared + mixed + norms + others + self._attended + self._spread

    @property
    def _attended(self) -> int:
        """What attention has made is added, where that comes late."""
        return int(self.shape.adds_attention_late)

    @property
    def _rows(self) -> _RowLaunches:
        return _FUSED if self.is_fused else _BY_TORCH

    @property
    def _norm(self) -> int:
        norm = self.shape.norm
        return _LAYER_NORM + norm.has_bias if norm.kind == "layer" else self._rows.norm

    def _before(self, role: str) -> int:
        """A norm of hidden states, or without it a copy; of streams, when they are merged."""
        return self._merged + (self._norm if role in self.shape.norms else 1)

    @property
    def _merged(self) -> int:
        return _MERGED * (self.shape.streams is not None)

    @property
    def _spread(self) -> int:
        streams = self.shape.streams
        if streams is None:
            return 0
        if streams.num_balancings is None:
            return _SPREAD_UNMIXED
        return _SPREAD + _BALANCING * (streams.num_balancings - 1)

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

    def _projection(self, attention: Attention) -> int:
        """Up to what is cached, rotated, from the norm on."""
        before = self._before("input_norm")
        rotation = self._rows.rotation * (attention.rotary_dim > 0)
        if not isinstance(attention, LatentAttention):
            scaling = isinstance(attention, GroupedAttention) and attention.value_scale != 1
            return before + 1 + self._norm * attention.num_norms + rotation + scaling
        compressing = 0 if attention.query_rank is None else 1 + self._norm
        return before + compressing + 2 + self._norm + (attention.latent_scale != 1) + rotation

    def _of_mixer(self, load: PassLoad) -> float:
        """Of a mean layer, which attends or recurs."""
        shape, found = self.shape, 0.0
        for attention, count in self._attentions:
            found += count * self._of_attention(attention, load)
        if shape.recurrence is not None:
            recurring = self._of_recurrence(shape.recurrence, load)
            recurring += self._added(shape.recurrent_residual)
            found += len(shape.recurrent_layers) * recurring
        return found / shape.num_layers

    @cached_property
    def _attentions(self) -> tuple[tuple[Attention, int], ...]:
        """What layers attend with, and how many do so."""
        shape = self.shape
        attending = [n for n in range(shape.num_layers) if not shape.is_recurrent(n)]
        return tuple(Counter(map(shape.attention_of, attending)).items())

    def _of_attention(self, attention: Attention, load: PassLoad) -> float:
        if isinstance(attention, CompressedAttention):
            return self._of_compressed(attention, load)
        parts = self._num_parts
        group, one_slice = _DECODE_GROUP + parts, _PROMPT_SLICE
        if isinstance(attention, LatentAttention):
            group += _ABSORBED + _BROUGHT_BACK
            one_slice += _EXPANDED + 2 * attention.num_heads
        if attention.has_sink_scores:
            group += _SINK_SCORES
            one_slice += _SINK_SCORES
        groups = ceil(load.decode_positions / GATHER_ROWS)
        if self.is_fused and attends_in_place(self.shape):
            groups, group = int(load.decode_positions > 0), 1
        slices = ceil(load.prompt_tokens / PROMPT_ROWS)
        core = parts + groups * group + slices * one_slice
        added = self._added(self.shape.attention_residual)
        return self._projection(attention) + core + self._gating(attention) + added

    def _of_compressed(self, attention: CompressedAttention, load: PassLoad) -> float:
        """Sequences are attended one after the other, some of their tokens at a time."""
        slices = ceil(load.prompt_tokens / PROMPT_ROWS)
        blocks = load.decode_sequences + ceil(load.prompt_tokens / _BLOCK_QUERIES)
        own, seen, block = _COMPRESSED + 3 * self._rows.norm, float(_SEEN), _QUERY_BLOCK
        if attention.entries is not None:
            own, block = own + _OF_ENTRIES, block + _ENTRIES_MASKED
            made = min(1.0, 1 / attention.entries.num_tokens)
            seen += _ENTRIES_SEEN + _ENTRY_MADE * made
        core = own + (load.decode_sequences + slices) * seen + blocks * block
        return self._before("input_norm") + core + self._added(self.shape.attention_residual)

    def _of_recurrence(self, recurrence: Recurrence, load: PassLoad) -> float:
        """Rows of states are taken for neighbours, as they are until sequences end."""
        own, sequences = recurrence.launches, load.decode_sequences
        taps = _TAP * recurrence.conv_width + recurrence.conv_bias
        rounding = _ROUNDING * (recurrence.state_dtype == "float16")
        chunks = ceil(load.prompt_tokens / recurrence.chunk_tokens) * (own.chunk + rounding)
        if self.is_fused and steps_at_once(recurrence):
            steps = int(sequences > 0)
        else:
            steps = ceil(sequences / recurrence.states_at_once) * (own.step + rounding)
        parts = ceil(sequences / CHUNK_TOKENS) + ceil(load.prompt_tokens / CHUNK_TOKENS)
        convolved = parts * (_CONVOLVED + taps) * (recurrence.conv_width > 0)
        normed = own.norms * self._norm + own.gated_norms * self._rows.norm_gated
        once = own.once + recurrence.conv_bias + _WIDENED * bool(recurrence.widened_width)
        return self._norm + normed + 1 + once + convolved + steps + chunks

    def _of_pre(self, load: PassLoad) -> float:
        """Queries, and what is cached, are laid out for another device."""
        attention = self.shape.attention
        absorbed = _ABSORBED * isinstance(attention, LatentAttention)
        return self._projection(attention) + absorbed + 1 + self._num_parts

    def _of_out(self, load: PassLoad) -> float:
        """Sums of latents are brought back before, and what opens gates, or is kept of hidden
        states, is normed once more."""
        attention, residual = self.shape.attention, self.shape.attention_residual
        brought = _BROUGHT_BACK * isinstance(attention, LatentAttention)
        gating = self._gating(attention)
        again = self._before("input_norm") * (gating > 0 or residual.keeps_normed)
        return brought + gating + again + self._added(residual)

    @staticmethod
    def _gating(attention: Attention) -> int:
        return 0 if attention.output_gate is None else _OUTPUT_GATE[attention.output_gate]

    def _added(self, residual: Residual) -> int:
        """What is projected at last, and added to the hidden states."""
        if self.shape.streams is not None:
            return 1 + self._spread
        normed = self._norm * ("attention_out_norm" in self.shape.norms)
        return _OUT + self._residual(residual) + normed

    def _residual(self, residual: Residual) -> int:
        """What becomes of hidden states, and of what is added to them, before."""
        kept = residual.keeps_normed + (residual.kept != 1)
        return kept + (residual.added != 1 and not self.is_fused)

    def _of_off(self, load: PassLoad) -> float:
        return 1 + self._num_parts

    def _of_load(self, load: PassLoad) -> float:
        return 1

    def _of_kv_up(self, load: PassLoad) -> float:
        """Pages are gathered out of pinned memory. Where they follow each other they are copied run
        by run, in which case the link takes longer than the host."""
        return self._num_moved_parts

    def _of_kv_down(self, load: PassLoad) -> float:
        """New rows are gathered, and scattered into pinned memory."""
        return 2 * self._num_moved_parts

    @cached_property
    def _num_moved_parts(self) -> float:
        """Of what a mean layer caches of a token, or keeps as a state, which is moved part by
        part."""
        groups = self.shape.cache_groups(UNLIMITED)
        num_parts = sum(len(group.layers) * len(group.layout.parts) for group in groups)
        return num_parts / self.shape.num_keeping_layers

    @property
    def _num_parts(self) -> int:
        """Of what a layer that attends caches of a token."""
        return len(self.shape.attention.cached_parts.parts)


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
    Kind.ATTEND: Launches._of_mixer,
    Kind.PRE: Launches._of_pre,
    Kind.OUT: Launches._of_out,
    Kind.OFF: Launches._of_off,
    Kind.LOAD: Launches._of_load,
    Kind.KV_UP: Launches._of_kv_up,
    Kind.KV_DOWN: Launches._of_kv_down,
}
