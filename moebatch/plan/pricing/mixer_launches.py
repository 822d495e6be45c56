"""How many kernels and copies attention and recurrence are to a GPU, as `launches.py` counts them.

What depends on lengths that a `PassLoad` does not know is said where it is guessed.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

from moebatch.layout.fused import attends_in_place, steps_at_once
from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import GATHER_ROWS, PROMPT_ROWS
from moebatch.plan.pricing.row_launches import RowLaunches
from moebatch.spec.model.attention import Attention, AttentionLaunches, GateOpening
from moebatch.spec.model.blocks import Residual
from moebatch.spec.model.compressed_attention import QUERY_BLOCK
from moebatch.spec.model.recurrence import CHUNK_TOKENS, Recurrence

_OUTPUT_GATE: Mapping[GateOpening, int] = MappingProxyType({"sigmoid": 3, "softplus": 4})
"""Its product, what it goes through, and what it weighs."""
_WIDENED = 2
"""Gates and fading of a recurrence, each of a few numbers; or what it selects by, and its steps."""
_OUT = 2
"""Projection, and the sum with what it is added to."""
_CONVOLVED = 4
"""Sequences that decode, in neighbouring rows of the state, or some tokens of a prompt, beside the
taps of the convolution."""
_ROUNDING = 10
"""States in float16 are widened, and rounded again."""
_TAP = 2


class _Attending(NamedTuple):
    """What a layer that attends launches whatever it has to do, beside its `own`."""

    own: AttentionLaunches
    before: int
    """Up to what is cached."""
    parts: int
    """Of what is cached of a token."""
    behind: int
    """Norms of results, gates, the projection, and what it is added to."""


class MixerLaunches(RowLaunches):
    """What tells tokens of each other: each layer attends or recurs."""

    def of_mixer(self, load: PassLoad) -> float:
        """Of a mean layer."""
        shape, found = self.shape, 0.0
        for count, attending in self._attending:
            found += count * self._of_attention(attending, load)
        if shape.recurrence is not None:
            recurring = self._of_recurrence(shape.recurrence, load)
            recurring += self._added(shape.recurrent_residual)
            found += len(shape.recurrent_layers) * recurring
        return found / shape.num_layers

    def of_pre(self, load: PassLoad) -> float:
        """Queries, and what is cached, are laid out for another device."""
        return self._laid_out + self.of_off(load)

    @cached_property
    def _laid_out(self) -> float:
        def of(attention: Attention) -> int:
            return self._projection(attention) + attention.launches.absorbed

        return self._mean(of)

    def of_out(self, load: PassLoad) -> float:
        """What opens gates, or is kept of hidden states, is normed once more."""
        return self._put_out

    @cached_property
    def _put_out(self) -> float:
        residual = self.shape.attention_residual

        def of(attention: Attention) -> int:
            gates = self._gates(attention)
            own, normed = attention.launches, gates > 0 or residual.keeps_normed
            again = self._before("input_norm") * normed
            reopened = own.reopening + self._norm * (own.reopening > 0)
            return again + reopened + own.brought_back + self._behind(attention)

        return self._mean(of) + self._added(residual)

    def of_off(self, load: PassLoad) -> float:
        """Queries, and each part of what is cached."""
        return self._sent

    @cached_property
    def _sent(self) -> float:
        return 1 + self._mean(self._num_parts)

    @cached_property
    def _attentions(self) -> tuple[tuple[Attention, int], ...]:
        """What layers attend with, and how many do so."""
        shape = self.shape
        attending = [n for n in range(shape.num_layers) if not shape.is_recurrent(n)]
        return tuple(Counter(map(shape.attention_of, attending)).items())

    @cached_property
    def _attending(self) -> tuple[tuple[int, "_Attending"], ...]:
        """How many layers attend alike, with what they launch."""
        added = self._added(self.shape.attention_residual)
        return tuple(
            (
                count,
                _Attending(
                    attention.launches,
                    before=self._projection(attention),
                    parts=self._num_parts(attention),
                    behind=self._behind(attention) + added,
                ),
            )
            for attention, count in self._attentions
        )

    @cached_property
    def _in_place(self) -> bool:
        """Whether sequences that decode attend to what is cached where it lies."""
        return self.is_fused and attends_in_place(self.shape)

    def _mean(self, of: Callable[[Attention], int]) -> float:
        """Of layers that attend."""
        counts = [count for _, count in self._attentions]
        return sum(count * of(each) for each, count in self._attentions) / sum(counts)

    @staticmethod
    def _num_parts(attention: Attention) -> int:
        """Of what a layer caches of a token."""
        return len(attention.cached_parts.parts)

    def _projection(self, attention: Attention) -> int:
        """Up to what is cached, rotated, from the norm on."""
        own = attention.launches
        rotations = self._rows.rotation * own.rotations
        return self._before("input_norm") + own.projected + self._norm * own.norms + rotations

    def _behind(self, attention: Attention) -> int:
        """Norms and gates of what a layer puts out."""
        return self._norm * attention.launches.results + self._gates(attention)

    @staticmethod
    def _gates(attention: Attention) -> int:
        """Of what a layer puts out."""
        if attention.output_gate is None:
            return 0
        return _OUTPUT_GATE[attention.output_gate] + attention.has_gate_biases

    def _of_attention(self, attending: "_Attending", load: PassLoad) -> float:
        own, sequences = attending.own, load.decode_sequences
        slices = load.pieces(PROMPT_ROWS)
        if self._in_place:
            groups = int(load.decode_positions > 0)
        else:
            groups = own.group * ceil(load.decode_positions / GATHER_ROWS)
        blocks = sequences + load.pieces(QUERY_BLOCK)
        alone = own.sequence * (sequences + slices) + own.query_block * blocks
        core = attending.parts + groups + own.prompt_slice * slices + alone
        return attending.before + core + attending.behind

    def _of_recurrence(self, recurrence: Recurrence, load: PassLoad) -> float:
        """Rows of states are taken for neighbours, as they are until sequences end."""
        own, sequences = recurrence.launches, load.decode_sequences
        taps = _TAP * recurrence.conv_width + recurrence.conv_bias
        rounding = _ROUNDING * (recurrence.state_dtype == "float16")
        chunks = load.pieces(recurrence.chunk_tokens) * (own.chunk + rounding)
        steps = ceil(sequences / recurrence.states_at_once) * (own.step + rounding)
        if self.is_fused and steps_at_once(recurrence):
            taken = sequences + load.prompt_tokens * recurrence.is_scanned
            steps, chunks = int(taken > 0), chunks * (not recurrence.is_scanned)
        parts = ceil(sequences / CHUNK_TOKENS) + ceil(load.prompt_tokens / CHUNK_TOKENS)
        convolved = parts * (_CONVOLVED + taps) * (recurrence.conv_width > 0)
        normed = own.norms * self._norm + own.gated_norms * self._rows.norm_gated
        once = own.once + recurrence.conv_bias + _WIDENED * bool(recurrence.further_rooms(1))
        return self._norm + normed + 1 + once + convolved + steps + chunks

    def _added(self, residual: Residual) -> int:
        """What is projected at last, and added to the hidden states."""
        if self.shape.streams is not None:
            return 1 + self._spread
        return _OUT + self._residual(residual) + self._norm_made("attention_out_norm")
