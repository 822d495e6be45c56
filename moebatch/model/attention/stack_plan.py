"""What attention of an encoder, or of layers behind one, must know about a micro-batch.

Shape letters: T tokens of the micro-batch, S positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.model.attention.gathering import Gathered, Seen
from moebatch.model.attention.span import Span, new_rows, placed


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
        return bool(self.prompts)

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device, gather_rows: int) -> "StackPlan":
        """For spans that follow each other; `gather_rows` bounds the rows of a `Gathered`, unless
        one sequence has more."""
        first = spans[0].start
        new_rows_T = new_rows(spans, device)
        places = [span.tokens_from(first) for span in spans]
        if not spans[0].context:
            assert all(s.num_tokens == s.num_encoded for s in spans), "prompts are encoded whole"
            return cls(new_rows_T=new_rows_T, prompts=tuple(places))
        singles = [span for span in spans if span.num_tokens == 1]

        def gathered(rows_of: Callable[[Span], Ints]) -> tuple[Gathered, ...]:
            seen = [Seen(span.start - first, rows_of(span)) for span in singles]
            return tuple(group.to(device) for group in Gathered.all_of(seen, gather_rows))

        return cls(
            new_rows_T=new_rows_T,
            own=gathered(lambda span: span.rows_S[span.num_encoded :]),
            encoded=gathered(lambda span: span.rows_S[: span.num_encoded]),
            slices=tuple(
                AnswerSlice(
                    tokens=place,
                    own_S=placed([span.rows_S[span.num_encoded :]], device),
                    prompt_S=placed([span.rows_S[: span.num_encoded]], device),
                )
                for span, place in zip(spans, places, strict=True)
                if span.num_tokens > 1
            ),
        )
