"""Attention of decoding sequences and of prompts, through the decoder.

What surrounds attention itself (norm, projections, rotation, new keys and values) is timed with
micro-batches that attend to nothing, and taken off.

Shape letters: T tokens, D hidden.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.layout.scratch import Limits
from moebatch.measure.sizes import Sizes
from moebatch.measure.synthetic import synthetic_layer
from moebatch.measure.timer import Allocate, Timer
from moebatch.model.attention.plan import AttentionPlan, Sight
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.spec.model.cache_layout import KvCache
from moebatch.spec.policy.policy import PAGE_TOKENS, pages_of
from moebatch.store.kv.tensors import KvShape

_LEAST_SHARE = 0.05
"""Share of a measured time that is attention at the least, however noisy the rest."""
_LEAST_DETERMINANT = 1e-9
"""Below it samples are alike up to a factor, and two rates cannot be told apart."""
_LEAST_POSITIONS = 1e-5
"""Of the time of positions when sequences take none. Below it, other programs have disturbed the
samples so much that positions seem to take nothing, which is a rate without bounds."""


class DecodeSample(NamedTuple):
    """Seconds of one layer's decode attention, projections left out."""

    num_sequences: int
    positions: int
    """Positions that they see, all sequences together."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRates:
    """Seconds of decode attention per layer are ``sequences * sequence_s + bytes / bandwidth``."""

    sequence_s: float
    bandwidth: float
    """Bytes of keys and values per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRates:
    """What attention achieves at a level."""

    decode: DecodeRates
    prompt_flops: float
    """FLOP/s of attention among the tokens of a prompt."""


def few_points(sizes: Sizes) -> Sizes:
    """Those by which decoding is measured once more, by a cache in 8 bits."""
    return replace(
        sizes,
        decode_sequences=sizes.decode_sequences[-1:],
        decode_contexts=sizes.decode_contexts[-2:],
    )


def decode_rates(samples: Iterable[DecodeSample], position_bytes: int) -> DecodeRates:
    """The rates that explain `samples` best, neither of them below nothing.

    Samples of one context only are explained by the bandwidth alone. `position_bytes` are the
    keys and values of one position in the layer.
    """
    # Divided by its seconds, a sample says: sequence_s * x + position_s * y = 1.
    rows = [(s.num_sequences / s.seconds, s.positions / s.seconds) for s in samples]
    assert rows, "a fit needs samples"
    x, y = sum(x for x, _ in rows), sum(y for _, y in rows)
    xx, xy, yy = (
        sum(x * x for x, _ in rows),
        sum(x * y for x, y in rows),
        sum(y * y for _, y in rows),
    )
    sequence_s, position_s = 0.0, y / yy
    determinant = xx * yy - xy * xy
    if determinant > _LEAST_DETERMINANT * xx * yy:
        both = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if both[0] >= 0 and both[1] > _LEAST_POSITIONS * position_s:
            sequence_s, position_s = both
    return DecodeRates(sequence_s=sequence_s, bandwidth=position_bytes / position_s)


def nothing_to_attend(micro_batch: MicroBatch) -> MicroBatch:
    """The same tokens, none of which sees anything."""
    by_window = {}
    for window, of_window in micro_batch.by_window.items():
        empty = AttentionPlan(sight=Sight(window))
        by_window[window] = replace(of_window, plans=(empty,))
    choosing = micro_batch.choosing
    if choosing is not None:
        choosing = replace(choosing, plans=(AttentionPlan(sight=Sight()),))
    return replace(micro_batch, by_window=by_window, choosing=choosing)


class AttentionBench:
    """A layer, its cache, and the pages of the cache in no order. Batches for which `cache_bytes`
    are too little become smaller ones."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        timer: Timer,
        cache_bytes: int,
        allocate: Allocate,
        cached_in: KvCache = "full",
    ) -> None:
        longest_prompt = max(sizes.prompt_slices) + max(sizes.prompt_contexts)
        limits = Limits(
            pass_tokens=1,
            micro_batch_tokens=max(*sizes.decode_sequences, *sizes.prompt_slices),
            context_tokens=max(longest_prompt, max(sizes.decode_contexts) + 1),
            gather_rows=sizes.gather_rows,
        )
        layer = synthetic_layer(sizes.model, limits, dtype, timer.device, cached_in=cached_in)
        most = max(sizes.decode_sequences) * pages_of(max(sizes.decode_contexts) + 1)
        page_bytes = PAGE_TOKENS * layer.shape.kv_bytes_per_token(dtype.itemsize)
        least = pages_of(limits.context_tokens)
        num_pages = max(least, min(most, cache_bytes // page_bytes))
        shape = KvShape(cache=layer.shape.attention.cache, dtype=dtype)
        keys, _ = shape.cache.parts
        stored, width = shape.stored_as(keys)
        size = (2, num_pages * PAGE_TOKENS, keys.num_heads, width)
        cache = allocate(num_pages * page_bytes).view(stored)[: math.prod(size)].view(size)
        self.layer, self._sizes, self._timer = layer, sizes, timer
        self.keys_RGC, self.values_RGC = cache
        self._pages: Ints = np.random.default_rng(0).permutation(num_pages)

    def rates(self) -> AttentionRates:
        """Of one layer's attention over a cache whose pages lie scattered."""
        prompts = [
            self.prompt(num_tokens, context)
            for num_tokens in self._sizes.prompt_slices
            for context in self._sizes.prompt_contexts
        ]
        # All work over all time: large slices count most, as they do in a job.
        num_pairs = sum(pairs for pairs, _ in prompts)
        seconds = sum(seconds for _, seconds in prompts)
        flops_per_pair = self.layer.shape.attention.flops_per_pair
        return AttentionRates(
            decode=self.decode_rates(), prompt_flops=num_pairs * flops_per_pair / seconds
        )

    def decode_rates(self) -> DecodeRates:
        samples = [
            self.decode(num_sequences, context)
            for num_sequences in self._sizes.decode_sequences
            for context in self._sizes.decode_contexts
        ]
        dtype_bytes = self.layer.decoder.dtype.itemsize
        return decode_rates(samples, self.layer.shape.kv_bytes_per_token(dtype_bytes))

    def decode(self, num_sequences: int, context: int) -> DecodeSample:
        """One new token for each of so many sequences of one length."""
        num_pages = pages_of(context + 1)
        num_sequences = max(1, min(num_sequences, len(self._pages) // num_pages))
        spans = [self._span(i, 1, context, i * num_pages) for i in range(num_sequences)]
        return DecodeSample(num_sequences, num_sequences * (context + 1), self._attend_s(spans))

    def prompt(self, num_tokens: int, context: int) -> tuple[int, float]:
        """A slice of one prompt behind `context` cached tokens: pairs of a token and a position
        that it sees, and seconds."""
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return pairs, self._attend_s([self._span(0, num_tokens, context, 0)])

    def _span(self, start: int, num_tokens: int, context: int, first_page: int) -> Span:
        length = context + num_tokens
        pages = self._pages[first_page : first_page + pages_of(length)]
        rows_PS = pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        return Span(
            start=start,
            num_tokens=num_tokens,
            context=context,
            rows_S=rows_PS.reshape(-1)[:length],
            rope_length=length,
        )

    def _attend_s(self, spans: Sequence[Span]) -> float:
        micro_batch = self.layer.decoder.planner.plan(spans)
        x_TD = self.layer.hidden_states(micro_batch.stop)
        empty = nothing_to_attend(micro_batch)
        whole_s, rest_s = self._timer.seconds_of_each(
            lambda: self._attend(x_TD, micro_batch), lambda: self._attend(x_TD, empty)
        )
        return max(whole_s - rest_s, whole_s * _LEAST_SHARE)

    def _attend(self, x_TD: Tensor, micro_batch: MicroBatch) -> None:
        self.layer.decoder.attend(0, x_TD, micro_batch, (self.keys_RGC, self.values_RGC))
