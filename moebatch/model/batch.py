"""What attention must know about a pass: whose tokens lie where, and what each of them sees.

Everything here is worked out once per pass and serves all layers.

Shape letters: T tokens of the micro-batch, B decoding sequences, S positions, Q queries of a
block, C head size.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from moebatch.layout.scratch import bucket_positions
from moebatch.model.native import loader
from moebatch.model.native.query_slices import QuerySlices
from moebatch.model.native.single_queries import SingleQueries
from moebatch.model.rope import Rope

QUERY_BLOCK = 512
"""Queries of a prompt that are attended at a time where a mask is needed: bounds its size."""
_MAX_PADDING = 0.25
_FEW_TOKENS = 4
"""New tokens of one sequence that the compiled kernel takes one by one: the later ones find most of
what they read in a cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """New tokens of one sequence: the flat rows [start, start + num_tokens) of the pass."""

    start: int
    num_tokens: int
    context: int
    """Tokens of the sequence that are in the KV cache already."""
    rows_S: Tensor
    """KV-cache row of each of its positions, new ones included; int64 [context + num_tokens]."""
    rope_length: int
    """Prompt length: the least length that length-dependent rotary scalings count with."""

    def with_rows(self, rows_S: Tensor) -> "Span":
        """The same tokens in other rows of a cache."""
        return replace(self, rows_S=rows_S)

    def pieces(self, most_tokens: int) -> Iterator["Span"]:
        """The same tokens as spans of at most that many, to be attended in this order."""
        for done in range(0, self.num_tokens, most_tokens):
            num_tokens = min(most_tokens, self.num_tokens - done)
            context = self.context + done
            yield replace(
                self,
                start=self.start + done,
                num_tokens=num_tokens,
                context=context,
                rows_S=self.rows_S[: context + num_tokens],
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """One-token spans of similar length, padded to a common number of positions."""

    tokens_B: Tensor
    """Row of each span's token in the micro-batch."""
    rows_BS: Tensor
    """Cache rows that each of them sees; padding repeats the newest, since rows that no token has
    written may hold NaN, which no mask hides."""
    mask_B11S: Tensor
    """0 where a position counts, -inf where it is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """Several new tokens of one sequence."""

    offset: int
    """Row of the first of them in the micro-batch."""
    num_tokens: int
    context: int
    first_key: int
    """First position that any of them sees."""
    rows: Tensor | slice
    """Cache rows of all positions from `first_key` on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """What the tokens of a micro-batch see under one sliding window."""

    window: int | None
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptSlice, ...]
    band_QS: Tensor | None
    """Additive mask of a block of prompt queries, right-aligned: its last row and its last column
    are the newest position of the block. None where no slice needs one."""
    singles: SingleQueries | None = None
    """Tokens that are left to a compiled kernel, where there is one; they are in no decode group
    and no slice."""
    slices: QuerySlices | None = None
    """Slices that are left to another one; they are not among `prompts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The flat rows [start, stop) of a pass, which attention takes at once.

    The angles are where queries and keys are projected, cache rows and plans where the cache is
    and attention is computed; these may be two devices.
    """

    start: int
    stop: int
    new_rows_T: Tensor
    """Cache row into which each token's keys and values go."""
    cos_TR: Tensor
    sin_TR: Tensor
    """Rotary angles, [T, C/2]."""
    plans: Mapping[int | None, AttentionPlan]
    """By sliding window."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.stop - self.start

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        *,
        rope: Rope,
        windows: Collection[int | None],
        dtype: torch.dtype,
        gather_rows: int,
        attention_device: torch.device | None = None,
    ) -> "MicroBatch":
        """Plans for spans that follow each other without gaps.

        `gather_rows` bounds the rows that a decode group gathers, unless one sequence has more.
        Attention is computed on `attention_device`, that of `rope` if nothing is said.
        """
        device = rope.device if attention_device is None else attention_device
        start = spans[0].start
        stop = spans[-1].start + spans[-1].num_tokens
        assert stop - start == sum(span.num_tokens for span in spans), "spans must be contiguous"
        positions_T, lengths_T = _positions(spans)
        cos_TR, sin_TR = rope.angles(positions_T, lengths_T, dtype)
        plans = {window: _plan(spans, window, dtype, gather_rows, device) for window in windows}
        return cls(
            start=start,
            stop=stop,
            new_rows_T=torch.cat([span.rows_S[span.context :] for span in spans]).to(device),
            cos_TR=cos_TR,
            sin_TR=sin_TR,
            plans=plans,
        )


def _positions(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Position of each token in its sequence, and the length of the sequence as it counts there.

    A token counts with the prompt's length even if only a slice of the prompt is there yet, so
    results do not depend on how a prompt is sliced.
    """
    # In numpy: torch would wake all its threads for a few numbers.
    counts = [span.num_tokens for span in spans]
    first_T = np.repeat([span.context - span.start for span in spans], counts)
    lengths_T = np.repeat([span.rope_length for span in spans], counts)
    positions_T = np.arange(len(first_T)) + spans[0].start + first_T
    return torch.from_numpy(positions_T), torch.from_numpy(np.maximum(lengths_T, positions_T + 1))


def _plan(
    spans: Sequence[Span],
    window: int | None,
    dtype: torch.dtype,
    gather_rows: int,
    device: torch.device,
) -> AttentionPlan:
    first = spans[0].start
    singles, slices, others = _by_kernel(spans, dtype, device)
    decodes = [span for span in others if span.num_tokens == 1]
    prompts = tuple(_prompt(span, first, window, device) for span in others if span.num_tokens > 1)
    keys = [_block_keys(prompt, window) for prompt in prompts if _needs_band(prompt, window)]
    return AttentionPlan(
        window=window,
        decodes=tuple(
            _decode_group(group, first, window, dtype, device)
            for group in _similar_lengths(decodes, window, gather_rows)
        ),
        prompts=prompts,
        band_QS=_band(max(keys), window, device, dtype) if keys else None,
        singles=_singles(singles, first, window),
        slices=_slices(slices, first, window),
    )


def _by_kernel(
    spans: Sequence[Span], dtype: torch.dtype, device: torch.device
) -> tuple[list[Span], list[Span], list[Span]]:
    """Those whose tokens are left to a compiled kernel one by one, those that are left to one as
    slices, and the rest, for torch."""
    kernels = loader.kernels() if device.type == "cpu" else None
    few = _FEW_TOKENS if kernels is not None and kernels.attends(dtype) else 0
    many = [span for span in spans if span.num_tokens > few]
    takes_slices = kernels is not None and kernels.attends_slices(dtype)
    slices = [span for span in many if span.num_tokens > 1 and takes_slices]
    others = [span for span in many if span.num_tokens == 1 or not takes_slices]
    return [span for span in spans if span.num_tokens <= few], slices, others


def _singles(spans: Sequence[Span], first: int, window: int | None) -> SingleQueries | None:
    """All tokens of the spans, longest context first, so that threads finish together."""
    singles = [span for span in spans if span.num_tokens == 1]
    for span in spans:
        if span.num_tokens > 1:
            singles.extend(span.pieces(1))
    if not singles:
        return None
    singles.sort(key=lambda span: -span.context)
    seen = [span.rows_S[_first_key(span.context, window) :] for span in singles]
    return SingleQueries(
        tokens_B=torch.tensor([span.start - first for span in singles]),
        starts_B=torch.tensor([0, *accumulate(map(len, seen))]),
        rows_N=torch.cat(seen),
    )


def _slices(spans: Sequence[Span], first: int, window: int | None) -> QuerySlices | None:
    """As they are, those with most to compute first, so that threads finish together."""
    if not spans:
        return None
    spans = sorted(spans, key=lambda span: -span.num_tokens * len(span.rows_S))
    seen = [span.rows_S[_first_key(span.context, window) :] for span in spans]
    return QuerySlices(
        tokens_B=torch.tensor([span.start - first for span in spans]),
        counts_B=torch.tensor([span.num_tokens for span in spans]),
        starts_B=torch.tensor([0, *accumulate(map(len, seen))]),
        rows_N=torch.cat(seen),
        num_pairs=sum(span.num_tokens * len(rows) for span, rows in zip(spans, seen, strict=True)),
    )


def _prompt(span: Span, first: int, window: int | None, device: torch.device) -> PromptSlice:
    first_key = _first_key(span.context, window)
    return PromptSlice(
        offset=span.start - first,
        num_tokens=span.num_tokens,
        context=span.context,
        first_key=first_key,
        rows=_as_slice(span.rows_S[first_key:], device),
    )


def _first_key(position: int, window: int | None) -> int:
    """First position that a token at `position` sees: with itself it sees `window` of them."""
    return 0 if window is None else max(0, position - window + 1)


def _needs_band(prompt: PromptSlice, window: int | None) -> bool:
    """Whether plain causal attention over the new tokens would be wrong."""
    return prompt.context > 0 or (window is not None and prompt.num_tokens > window)


def _block_keys(prompt: PromptSlice, window: int | None) -> int:
    """Most positions that a block of queries of the slice looks at together."""
    end = prompt.context + prompt.num_tokens
    if window is None:
        return end
    return min(end, window + min(QUERY_BLOCK, prompt.num_tokens))


def _band(num_keys: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    queries_back = torch.arange(QUERY_BLOCK - 1, -1, -1, device=device)[:, None]
    keys_back = torch.arange(num_keys - 1, -1, -1, device=device)
    hidden = keys_back < queries_back
    if window is not None:
        hidden |= keys_back >= queries_back + window
    zeros = torch.zeros(hidden.shape, device=device, dtype=dtype)
    return zeros.masked_fill_(hidden, -torch.inf)


def _similar_lengths(
    decodes: Sequence[Span], window: int | None, gather_rows: int
) -> list[list[Span]]:
    """Spans in groups of descending length, with little padding and few enough rows each."""
    groups: list[list[Span]] = []
    for span in sorted(decodes, key=lambda span: -_num_seen(span, window)):
        if groups:
            longest = _num_seen(groups[-1][0], window)
            fits = (len(groups[-1]) + 1) * bucket_positions(longest) <= gather_rows
            if fits and _num_seen(span, window) >= longest * (1 - _MAX_PADDING):
                groups[-1].append(span)
                continue
        groups.append([span])
    return groups


def _decode_group(
    spans: Sequence[Span],
    first: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    """Laid out where the rows of the spans are, and then moved: many small steps for a GPU."""
    counts = [_num_seen(span, window) for span in spans]
    num_positions = bucket_positions(max(counts))
    seen = [span.rows_S[_first_key(span.context, window) :] for span in spans]
    newest_B = torch.stack([rows_S[-1] for rows_S in seen])
    counts_B = torch.tensor(counts, device=newest_B.device)
    hidden_BS = torch.arange(num_positions, device=newest_B.device) >= counts_B[:, None]
    rows_BS = newest_B[:, None].repeat(1, num_positions)
    rows_BS[~hidden_BS] = torch.cat(seen)
    mask_BS = torch.zeros(hidden_BS.shape, dtype=dtype, device=hidden_BS.device)
    return DecodeGroup(
        tokens_B=torch.tensor([span.start - first for span in spans], device=device),
        rows_BS=rows_BS.to(device),
        mask_B11S=mask_BS.masked_fill_(hidden_BS, -torch.inf).to(device)[:, None, None],
    )


def _num_seen(span: Span, window: int | None) -> int:
    return span.context + 1 - _first_key(span.context, window)


def _as_slice(rows_S: Tensor, device: torch.device) -> Tensor | slice:
    """Rows that follow each other as a slice, so that nothing has to be gathered."""
    first = int(rows_S[0])
    if bool((rows_S.diff() == 1).all()):
        return slice(first, first + len(rows_S))
    return rows_S.to(device)
