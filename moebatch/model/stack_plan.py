"""What attention of an encoder, or of layers behind one, must know about a micro-batch.

Shape letters: T tokens of the micro-batch, B decoding sequences, S positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.layout.scratch import bucket_positions
from moebatch.model.span import Span

_MAX_PADDING = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """One-token spans that see similarly many rows, padded to a common number of them."""

    tokens_B: Tensor
    """Row of each span's token in the micro-batch."""
    rows_BS: Tensor
    """Cache rows that each of them sees; padding repeats the last one."""
    back_BS: Tensor
    """How far each is behind the last; -1 where it is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSlice:
    """Several tokens of an answer, computed once more."""

    tokens: slice
    """Rows of the micro-batch."""
    own_S: Tensor
    """Cache rows of the answer up to the last of them."""
    prompt_S: Tensor
    """Cache rows of what has been encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackPlan:
    """A micro-batch of whole prompts, or one of tokens of answers."""

    new_rows_T: Tensor
    """Cache row of each token: for keys and values of what it is encoded as, or for its own."""
    prompts: tuple[slice, ...] = ()
    """Rows of each prompt."""
    own: tuple[Gathered, ...] = ()
    """What newest tokens of answers see of these."""
    encoded: tuple[Gathered, ...] = ()
    """What they see of prompts."""
    slices: tuple[AnswerSlice, ...] = ()

    @property
    def encodes(self) -> bool:
        """Whether it is one of prompts."""
        return bool(self.prompts)

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device, gather_rows: int) -> "StackPlan":
        """For spans that follow each other; `gather_rows` bounds the rows of a `Gathered`, unless
        one sequence has more."""
        first = spans[0].start
        new_rows_T = torch.cat([span.rows_S[span.context :] for span in spans]).to(device)
        places = [slice(s.start - first, s.start - first + s.num_tokens) for s in spans]
        if not spans[0].context:
            assert all(s.num_tokens == s.num_encoded for s in spans), "prompts are encoded whole"
            return cls(new_rows_T=new_rows_T, prompts=tuple(places))
        singles = [span for span in spans if span.num_tokens == 1]

        def gathered(seen: Callable[[Span], Tensor]) -> tuple[Gathered, ...]:
            pairs = [(span.start - first, seen(span)) for span in singles]
            return tuple(_gathered(some, device) for some in _similar(pairs, gather_rows))

        return cls(
            new_rows_T=new_rows_T,
            own=gathered(lambda span: span.rows_S[span.num_encoded :]),
            encoded=gathered(lambda span: span.rows_S[: span.num_encoded]),
            slices=tuple(
                AnswerSlice(
                    tokens=place,
                    own_S=span.rows_S[span.num_encoded :].to(device),
                    prompt_S=span.rows_S[: span.num_encoded].to(device),
                )
                for span, place in zip(spans, places, strict=True)
                if span.num_tokens > 1
            ),
        )


_Seen = tuple[int, Tensor]
"""A token of the micro-batch, and the rows that it sees."""


def _similar(seen: Sequence[_Seen], gather_rows: int) -> Iterator[list[_Seen]]:
    """In groups of descending length, with little padding and few enough rows each."""
    group: list[_Seen] = []
    for one in sorted(seen, key=lambda one: -len(one[1])):
        if group:
            longest = len(group[0][1])
            fits = (len(group) + 1) * bucket_positions(longest) <= gather_rows
            if not fits or len(one[1]) < longest * (1 - _MAX_PADDING):
                yield group
                group = []
        group.append(one)
    if group:
        yield group


def _gathered(seen: Sequence[_Seen], device: torch.device) -> Gathered:
    counts_B = torch.tensor([len(rows_S) for _, rows_S in seen])
    num_positions = bucket_positions(int(counts_B.max()))
    back_BS = (counts_B[:, None] - 1 - torch.arange(num_positions)).clamp_(min=-1)
    rows_BS = torch.stack([rows_S[-1] for _, rows_S in seen])[:, None].repeat(1, num_positions)
    rows_BS[back_BS >= 0] = torch.cat([rows_S for _, rows_S in seen])
    return Gathered(
        tokens_B=torch.tensor([token for token, _ in seen], device=device),
        rows_BS=rows_BS.to(device),
        back_BS=back_BS.to(device),
    )
