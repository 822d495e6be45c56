"""Seconds of the pieces of a pass: one matrix product, one layer's attention, one transfer."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple, TypeVar

from moebatch.formats.weight_format import WeightFormat
from moebatch.layout.footprint import FLOAT_BYTES, Dtypes, layer_bytes
from moebatch.layout.fused import steps_at_once
from moebatch.layout.ladder import Ladder
from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import (
    MAX_GEMM_ROWS,
    PROMPT_ROWS,
    logits_rows,
    rows_decoded_at_once,
)
from moebatch.once import cached_property
from moebatch.plan.pricing.dense import DenseParams
from moebatch.plan.pricing.launches import Launches, num_chunks, of_transfer
from moebatch.schedule.lanes import lane_of
from moebatch.schedule.steps.kv_route import Place
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import Hardware, LinkName, Processor
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import UNLIMITED
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Policy

_MOST_KNOWN = 8192
"""Answers that are kept: a few megabytes."""
LaneTime = tuple[str, float]
Found = TypeVar("Found")


class _Attending(NamedTuple):
    """Layers in which tokens attend alike and see as far."""

    attention: Attention
    window: int | None
    share: float
    """Of all layers."""
    token_bytes: int
    """What is read of a token that is attended to, in one of them."""
    key_bytes: float
    """What is read of one that may be chosen."""
    entries: float
    """What is seen of a token that is in no window."""
    most_unscored: float
    decode_flops: int
    """For a query of an answer and a position that it sees."""
    choosing_flops: float
    """For a query and a position that it may choose."""

    def scored(self, positions: float, queries: float) -> float:
        """Those of so many positions among which queries alike choose, that many: all or none."""
        return positions if positions > self.most_unscored * queries else 0.0

    def scored_pairs(self, load: PassLoad) -> float:
        """Pairs of a prompt token that chooses and a position that it may choose."""
        most, longest = self.most_unscored, _longest(load)
        return load.prompt_pairs * (1 - (most / longest) ** 2) if longest > most else 0.0


def _longest(load: PassLoad) -> float:
    """Positions that the last of the tokens of prompts see."""
    return 2 * load.prompt_pairs / max(1.0, load.prompt_tokens)


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class Prices:
    """What one model costs on one machine, piece by piece."""

    shape: ModelShape
    dtypes: Dtypes
    hardware: Hardware
    ladder: Ladder
    """The levels of the hardware."""
    has_gpu_kernels: bool | None = None
    """Whether kernels in Triton run on the GPU. None says so of those of compute capability 8.0 and
    more, which have bfloat16 of their own."""

    @cached_property
    def top(self) -> Place:
        """Where everything is computed that a policy puts nowhere else."""
        return self.ladder.top

    @cached_property
    def lanes(self) -> Mapping[Kind, str]:
        """The lane of tasks of each kind."""
        return {kind: lane_of(kind, self.top).name for kind in Kind}

    @cached_property
    def main(self) -> Processor:
        """What computes everything that a policy does not leave to the CPU."""
        return self.hardware.levels[self.top].processor or self.cpu

    @cached_property
    def launches(self) -> Launches:
        """Of tasks on a GPU."""
        there = (
            "bfloat16" in self.main.gemm if self.has_gpu_kernels is None else self.has_gpu_kernels
        )
        is_fused = self.ladder.has_gpu and there
        return Launches.of(self.shape, self.dtypes, is_fused=is_fused)

    @cached_property
    def dense(self) -> DenseParams:
        """Numbers of weights outside experts."""
        return DenseParams(self.shape)

    @cached_property
    def is_cpu(self) -> bool:
        """Whether a CPU computes everything, maybe in place of a GPU that is emulated: it knows
        experts that have just arrived from those that stayed, and its kernels have names."""
        return not self.ladder.has_gpu

    @cached_property
    def cpu(self) -> Processor:
        """The processor at main memory."""
        assert self.hardware.dram.processor is not None, "main memory has a processor"
        return self.hardware.dram.processor

    def computes_like(self, other: "Prices") -> bool:
        """Whether all that a pass computes takes as long on another machine, or under other dtypes:
        levels compute as fast, and so do links between them, over which go queries that a CPU
        attends to and sums of several GPUs."""
        return self._computing == other._computing

    @property
    def _computing(self) -> tuple[object, ...]:
        """What decides over it."""
        levels, links = self.hardware.levels, self.hardware.links
        processors = {name: (each.num_devices, each.processor) for name, each in levels.items()}
        between = links.get("dram->vram"), links.get("vram->dram")
        return self.shape, self.dtypes, self.ladder, self.has_gpu_kernels, processors, between

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the mean, as it lies in its file."""
        return self.dtypes.expert_bytes(self.shape)

    @cached_property
    def num_chunks(self) -> int:
        """Pieces in which an expert is moved."""
        return num_chunks(self.expert_bytes)

    @cached_property
    def num_copies(self) -> int:
        """Copies of one."""
        return of_transfer(self.expert_bytes, self.dtypes.num_runs)

    def once(self, key: Hashable, work_out: Callable[[], Found]) -> Found:
        """The same answer for the same key, worked out once: most passes that a search compares
        have micro-batches, or experts over as many tokens, of another one."""
        found: Found | None = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = work_out()
        return found

    @cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    # --- matrix products ------------------------------------------------------------------------

    def dense_gemm_s(
        self, processor: Processor, load: PassLoad, params: int, micro_batch_size: int
    ) -> float:
        """Seconds in which all tokens go through weights of so many numbers outside the experts,
        micro-batch by micro-batch."""
        decoding, prompts = load.decode_sequences, load.prompt_tokens
        decoding_s = self._gemm_s(processor, decoding, params, min(decoding, micro_batch_size))
        return decoding_s + self._gemm_s(processor, prompts, params, min(prompts, PROMPT_ROWS))

    def head_s(self, processor: Processor, rows: float) -> float:
        """Seconds of the logits after so many tokens, block by block: each reads the weights."""
        at_once = min(rows, self.logits_rows)
        params = self.shape.vocab_size * self.shape.hidden_size
        moved = rows * self.shape.vocab_size * FLOAT_BYTES
        gemm_s = self._gemm_s(processor, rows, params, at_once)
        return gemm_s + moved / processor.elementwise_bandwidth

    @cached_property
    def logits_rows(self) -> int:
        """Rows of such a block."""
        return logits_rows(self.shape, self.dtypes.compute_bytes)

    def cpu_expert_s(self, processor: Processor, rows: float, *, fresh: float) -> float:
        """Seconds of one expert on a CPU over so many rows, padding counted; with the chance
        `fresh` it has just arrived from the level below."""
        arrived_s = stayed_s = self.expert_s(processor, rows)
        if processor.gemm_streamed:
            arrived_s = self.expert_s(processor, rows, streamed=True)
        # Where noise says that arriving helps, it does not.
        return fresh * max(arrived_s, stayed_s) + (1 - fresh) * stayed_s

    def expert_s(self, processor: Processor, rows: float, *, streamed: bool = False) -> float:
        """Seconds of one expert over so many rows. Where a kernel decodes weights on the way, that
        adds to arithmetic at its peak; few rows are no faster than with weights that are numbers,
        since threads take turns as often. A GPU's kernels decode beside their reading."""
        if rows <= 0:
            return 0.0
        params, at_once = self.shape.expert_params, min(rows, MAX_GEMM_ROWS)
        computed, stored_bytes = self.dtypes.compute, self.expert_bytes
        product_s = self._gemm_s(
            processor, rows, params, at_once, stored_bytes=stored_bytes, streamed=streamed
        )
        if not self.dtypes.converts or self.launches.groups(rows):
            return product_s
        peak = processor.gemm_for(computed, streamed=streamed).peak

        def seconds(stored: WeightFormat) -> float:
            """If all weights were stored so."""
            decoded_rows = rows_decoded_at_once(stored, computed, processor.instruction_set)
            num_decodings = ceil(rows / min(at_once, decoded_rows))
            decoding_s = num_decodings * stored_bytes / processor.decoding_rate(stored, rows)
            if decoded_rows == MAX_GEMM_ROWS:
                return decoding_s + product_s
            return max(product_s, decoding_s + 2 * rows * params / peak)

        return sum(share * seconds(each) for each, share in self.dtypes.stored.shares)

    def _gemm_s(
        self,
        processor: Processor,
        rows: float,
        params: int,
        rows_at_once: float,
        *,
        stored_bytes: int | None = None,
        streamed: bool = False,
    ) -> float:
        """Eq 14: the slower of arithmetic and reading the weights from the level's memory, where
        they take `stored_bytes`, if not those of the compute dtype."""
        if rows <= 0:
            return 0.0
        if stored_bytes is None:
            stored_bytes = params * self._compute_bytes
        curve = processor.gemm_for(self.dtypes.compute, streamed=streamed)
        rate = curve.at(max(1.0, rows_at_once))
        num_reads = ceil(rows / rows_at_once)
        read_s = num_reads * stored_bytes / processor.bandwidth
        return max(2 * rows * params / rate, read_s)

    # --- the rest of arithmetic -----------------------------------------------------------------

    def moving_s(self, processor: Processor, hidden_states: float) -> float:
        """Seconds in which norms, routing and combining read or write so many hidden states."""
        return self.hidden_bytes(hidden_states) / processor.elementwise_bandwidth

    def decode_attention_s(self, load: PassLoad, processor: Processor) -> float:
        """Seconds of the attention of decoding sequences in a mean layer, projections left out."""
        if not load.decode_sequences:
            return 0.0
        flops, num_bytes = self.decode_attention(load)
        fixed_s = load.decode_sequences * processor.sequence_s
        read_s = num_bytes / processor.attention_rate(self.shape.attention.cache_dtype)
        return fixed_s + max(read_s, flops / processor.attention_flops)

    def decode_attention(self, load: PassLoad) -> tuple[float, float]:
        """FLOP of it, and bytes of the cache that it reads."""
        num_bytes = flops = 0.0
        for kind in self._attending:
            positions = self._in_window(load.decode_positions, load.decode_sequences, kind.window)
            positions += load.decode_positions * kind.entries
            scored = kind.scored(load.decode_positions, load.decode_sequences)
            num_bytes += kind.share * (positions * kind.token_bytes + scored * kind.key_bytes)
            flops += kind.share * positions * kind.decode_flops
            flops += kind.share * scored * kind.choosing_flops
        return flops, num_bytes

    def prompt_attention_s(self, load: PassLoad, processor: Processor) -> float:
        """Seconds of the attention among tokens of prompts in a mean layer."""
        if not load.prompt_tokens:
            return 0.0
        num_bytes = flops = 0.0
        for kind in self._encoding:
            pieces = load.pieces(PROMPT_ROWS)
            context = self._in_window(load.prompt_context, pieces, kind.window)
            context += load.prompt_context * kind.entries
            scored = kind.scored(load.prompt_context, pieces)
            pairs = self._pairs_in_window(load, kind.window)
            pairs += load.prompt_pairs * kind.entries
            flops += kind.share * self._prompt_flops(load, kind, pairs, context)
            num_bytes += kind.share * (context * kind.token_bytes + scored * kind.key_bytes)
        rate = processor.attention_rate(self.shape.attention.cache_dtype)
        return flops / processor.attention_flops + num_bytes / rate

    def _prompt_flops(
        self, load: PassLoad, kind: _Attending, pairs: float, context: float
    ) -> float:
        """FLOP in one layer of tokens of prompts that attend to so many `pairs`; those that choose
        attend to what is cached as it is."""
        attention, longest, chosen = kind.attention, _longest(load), 0.0
        if (most := attention.most_chosen) is not None and longest > most:
            chosen = load.prompt_tokens * (1 - most / longest) * most
        return (
            attention.prompt_flops(pairs - chosen, context)
            + chosen * kind.decode_flops
            + kind.scored_pairs(load) * kind.choosing_flops
        )

    def recurrence_s(self, load: PassLoad, processor: Processor) -> float:
        """Seconds of what recurrent layers do in a mean layer, projections left out: at the rate of
        attention states take a step each, or are read and written once by a slice of a prompt."""
        shape, delta = self.shape, self.shape.recurrence
        if delta is None:
            return 0.0
        compute_bytes, sequences = self.dtypes.compute_bytes, load.decode_sequences
        by_torch = not (self.is_cpu or (self.launches.is_fused and steps_at_once(delta)))
        moved_bytes = sequences * delta.step_bytes(compute_bytes, by_torch=by_torch)
        moved_bytes += load.pieces(PROMPT_ROWS) * delta.step_bytes(compute_bytes, by_torch=False)
        moved_bytes += load.prompt_tokens * delta.scanned_bytes * by_torch
        flops = sequences * delta.decode_flops + load.prompt_tokens * delta.prompt_flops
        moving_s, computing_s = (
            moved_bytes / processor.attention_bandwidth,
            flops / processor.attention_flops,
        )
        return len(shape.recurrent_layers) / shape.num_layers * max(moving_s, computing_s)

    @cached_property
    def _attending(self) -> tuple["_Attending", ...]:
        """Layers in which tokens of answers attend alike and see as far."""
        return self._shares(range(self.shape.num_encoding_layers, self.shape.num_layers))

    @cached_property
    def _encoding(self) -> tuple["_Attending", ...]:
        """The same of tokens of prompts, which an encoder may take in."""
        return self._shares(range(self.shape.num_encoding_layers or self.shape.num_layers))

    def _shares(self, layers: range) -> tuple["_Attending", ...]:
        shape = self.shape
        attentions = {
            layer: shape.attention_of(layer) for layer in layers if not shape.is_recurrent(layer)
        }
        counts = Counter(
            (attention, shape.sliding_windows[layer] or attention.most_chosen)
            for layer, attention in attentions.items()
        )
        num_bytes = self.dtypes.compute_bytes
        return tuple(
            _Attending(
                each,
                window,
                count / shape.num_layers,
                token_bytes=each.caches[0].token_bytes(num_bytes),
                key_bytes=each.choosing_bytes_per_pair(num_bytes),
                entries=each.entries_per_token,
                most_unscored=each.most_unscored,
                decode_flops=each.decode_flops_per_pair,
                choosing_flops=each.choosing_flops_per_pair,
            )
            for (each, window), count in counts.items()
        )

    def _in_window(self, positions: float, num_queries: float, window: int | None) -> float:
        """How many of the positions of so many sequences alike a window leaves: half of a chunk in
        the mean."""
        if window is None or positions <= window * num_queries:
            return positions
        return window * num_queries / (2 if self.shape.windows_are_chunks else 1)

    def _pairs_in_window(self, load: PassLoad, window: int | None) -> float:
        """How many of the pairs among tokens of prompts a window leaves, if prompts are as long as
        twice what a token would see in the mean."""
        mean = load.prompt_pairs / load.prompt_tokens if load.prompt_tokens else 0.0
        if window is None or window >= 2 * mean:
            return load.prompt_pairs
        seen = 1 / 2 if self.shape.windows_are_chunks else 1 - window / (4 * mean)
        return load.prompt_tokens * window * seen

    # --- transfers ------------------------------------------------------------------------------

    def link_s(self, name: LinkName, num_bytes: float, num_pieces: float = 0.0) -> float:
        """Seconds of so many bytes on a link, in so many pieces that lie apart; infinite where the
        machine lacks it."""
        if not num_bytes:
            return 0.0
        link = self.hardware.links.get(name)
        return num_bytes / link.bandwidth + num_pieces * link.operation_s if link else float("inf")

    def layer_bytes(self, layer: int) -> int:
        """What may come up with a layer beside its experts."""
        return layer_bytes(self.shape, self.dtypes.compute_bytes, layer)

    def staging_s(self, num_bytes: float, policy: Policy) -> float:
        """Seconds of the copy into pinned buffers; 0 where weights lie ready."""
        if not self.ladder.copies_through_buffers(policy):
            return 0.0
        link = self.hardware.links.get("dram->vram")
        rate = link.staging_bandwidth if link else None
        return num_bytes / rate if rate else 0.0

    def cached_bytes(self, load: PassLoad) -> float:
        """What the cache of a mean layer that has one holds of decoding sequences, and of those
        whose prompts are computed."""

        def rows(group: CacheGroup) -> float:
            decoding = min(load.decode_positions, group.most_rows * load.decode_sequences)
            return decoding + min(load.prompt_context, group.most_rows * load.pieces(PROMPT_ROWS))

        return self._mean_bytes(load.resumed, rows)

    def new_bytes(self, load: PassLoad) -> float:
        """What of it is new afterwards."""
        return self._mean_bytes(load.sequences, lambda group: load.tokens)

    def touched_bytes(self, load: PassLoad) -> float:
        """The pages that this lies in, which go to a disk as wholes."""
        decoding, prompts = load.decode_sequences, load.prompt_tokens
        return self._mean_bytes(load.sequences, lambda group: decoding * group.page_rows + prompts)

    def num_pieces(self, sequences: float) -> float:
        """Runs of pages of a mean layer that lie apart: one for each sequence, as long as the cache
        is young, in each group that the layer is in."""
        return sequences * self._num_in_groups / self.shape.num_keeping_layers

    @cached_property
    def _num_in_groups(self) -> int:
        """Layers, each counted for every group that it is in."""
        return sum(len(group.layers) for group, _ in self._kept)

    def _mean_bytes(self, states: float, rows_of: Callable[[CacheGroup], float]) -> float:
        """Of a layer, for so many rows in a group of them, or so many states."""
        of_groups = (
            (states if group.is_state else rows_of(group)) * num_bytes
            for group, num_bytes in self._kept
        )
        return sum(of_groups) / self.shape.num_keeping_layers

    @cached_property
    def _kept(self) -> tuple[tuple[CacheGroup, int], ...]:
        """Groups of layers, with the bytes of a row in all of them."""
        compute_bytes = self.dtypes.compute_bytes
        return tuple(
            (group, len(group.layers) * group.layout.token_bytes(compute_bytes))
            for group in self.shape.cache_groups(UNLIMITED)
        )

    def attended_bytes(self, tokens: float) -> float:
        """Results of attention of so many tokens in a mean layer."""
        return tokens * self._attended_bytes

    def query_bytes(self, tokens: float) -> float:
        """Queries of so many tokens in a mean layer, as they meet what is cached."""
        return tokens * self._mean_width(lambda attention: attention.meeting_width)

    def projected_bytes(self, tokens: float) -> float:
        """The same, and keys and values before they are cached."""
        return tokens * self._projected_bytes

    @cached_property
    def _attended_bytes(self) -> float:
        return self._mean_width(lambda attention: attention.result_width)

    @cached_property
    def _projected_bytes(self) -> float:
        return self._mean_width(lambda attention: attention.sent_width)

    def _mean_width(self, width_of: Callable[[Attention], int]) -> float:
        """Bytes of so many numbers of a token, in a mean layer."""
        width = sum(kind.share * width_of(kind.attention) for kind in self._attending)
        return width * self._compute_bytes

    def hidden_bytes(self, tokens: float) -> float:
        """Hidden states of so many tokens."""
        return tokens * self._hidden_bytes

    @cached_property
    def _hidden_bytes(self) -> int:
        return self.shape.hidden_width * self._compute_bytes

    @cached_property
    def _compute_bytes(self) -> int:
        return self.dtypes.compute_bytes
