"""Logits in, tokens out.

A token depends on its own row, request, choice and position only, never on the other rows of the
block. Rows that just want the likeliest token, and the check for broken logits, share one look at
the block; all other rows are copied to float32 a few at a time.

Shapes: R rows, V vocabulary, B blocks of a row, W columns of a block, K alternatives.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.engine.sampling import mass, penalties
from moebatch.engine.sampling.mass import noise
from moebatch.engine.sequence import Sequence as TokenSequence
from moebatch.layout.scratch import SAMPLING_LOGITS
from moebatch.spec.request import TokenLogprob

_BLOCK_COLUMNS = 640
_GROUP_LOGITS_GPU = 2**24
"""Logits in float32 at a time where a group costs kernel launches and waits for their results."""


class Sampled(NamedTuple):
    """The next token of a row."""

    token: int
    """-1 if there is none, since the logits were not finite."""
    logprob: TokenLogprob | None = None
    """Under the raw distribution; None unless the request asks for it."""
    fault: str = ""
    """Why the answer cannot be held to its grammar any more."""

    @property
    def finite(self) -> bool:
        """Whether there is a token: no NaN, no +Inf, and not -Inf everywhere."""
        return self.token >= 0


class Sampler:
    """Chooses the next token of every row of a block."""

    def __init__(self, *, vocab_size: int, end_tokens: frozenset[int], job_seed: int) -> None:
        assert vocab_size <= mass.MAX_VOCAB, f"masses of {vocab_size} tokens could overflow"
        self._vocab_size = vocab_size
        self.end_tokens = end_tokens
        self._job_seed = job_seed

    def sample(self, logits_RV: Tensor, rows: Sequence[TokenSequence]) -> list[Sampled]:
        """Next tokens from float32 or bfloat16 logits, one row each; the logits stay untouched."""
        expected = (len(rows), self._vocab_size)
        assert logits_RV.shape == expected, f"logits of {expected}, not {tuple(logits_RV.shape)}"
        sampled = _checked(*first_max(logits_RV))
        special = [
            place for place, row in enumerate(rows) if sampled[place].finite and not _is_plain(row)
        ]
        for group in _groups(special, logits_RV):
            chosen = self._sample_group(logits_RV[group].float(), [rows[i] for i in group])
            for place, result in zip(group, chosen, strict=True):
                sampled[place] = result
        return sampled

    def _sample_group(self, logits_RV: Tensor, rows: Sequence[TokenSequence]) -> list[Sampled]:
        reported = [i for i, row in enumerate(rows) if row.request.sampling.logprobs is not None]
        logprobs_RV = logits_RV[reported].log_softmax(-1) if reported else None
        faults = []
        for logits_V, row in zip(logits_RV, rows, strict=True):
            faults.append(_restrict(logits_V, row))
            if penalties.changes_logits(row.request.sampling, len(row.output_tokens)):
                penalties.adjust(logits_V, row.request, row.output_tokens, self.end_tokens)
        sampled = self._choose(logits_RV, rows)
        if logprobs_RV is not None:
            most = [rows[i].request.sampling.logprobs or 0 for i in reported]
            tokens = [sampled[i].token for i in reported]
            for i, logprob in zip(reported, _logprobs(logprobs_RV, tokens, most), strict=True):
                if sampled[i].finite:
                    sampled[i] = Sampled(token=sampled[i].token, logprob=logprob)
        return [s._replace(fault=fault) for s, fault in zip(sampled, faults, strict=True)]

    def _choose(self, logits_RV: Tensor, rows: Sequence[TokenSequence]) -> list[Sampled]:
        """Tokens from the adjusted logits, greedy or drawn."""
        peak_R, token_R = first_max(logits_RV)
        sampled = _checked(peak_R, token_R)
        drawn = [
            i for i, row in enumerate(rows) if sampled[i].finite and not row.request.sampling.greedy
        ]
        if not drawn:
            return sampled
        if len(drawn) < len(rows):
            logits_RV, peak_R = logits_RV[drawn], peak_R[drawn]
        tokens = self._draw(logits_RV, peak_R, [rows[i] for i in drawn])
        for i, token in zip(drawn, tokens, strict=True):
            sampled[i] = Sampled(token=token)
        return sampled

    def _draw(self, logits_RV: Tensor, peak_R: Tensor, rows: Sequence[TokenSequence]) -> list[int]:
        samplings = [row.request.sampling for row in rows]
        mass_RV = mass.to_mass(logits_RV, peak_R, [s.temperature for s in samplings])
        mass.keep(
            mass_RV,
            min_ps=[s.min_p for s in samplings],
            top_ks=[s.top_k for s in samplings],
            top_ps=[s.top_p for s in samplings],
        )
        noises = [
            noise(
                row.request,
                choice=row.choice,
                position=len(row.output_tokens),
                job_seed=self._job_seed,
            )
            for row in rows
        ]
        return mass.draw(mass_RV, noises)


def _restrict(logits_V: Tensor, row: TokenSequence) -> str:
    constraint = row.constraint
    return "" if constraint is None else constraint.restrict(logits_V, row.output_tokens)


def first_max(x_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of every row and its first column; a NaN counts as the largest.

    Same as ``x_RV.max(-1)`` at half its time, and a ninth of that of ``x_RV.argmax(-1)`` in
    bfloat16: the first look at all columns wants values only, which is vectorised.
    """
    num_columns = x_RV.shape[1]
    num_blocks = num_columns // _BLOCK_COLUMNS
    if num_blocks < 2:
        value_R, column_R = x_RV.max(-1)
        return value_R, column_R
    covered = num_blocks * _BLOCK_COLUMNS
    blocks_RBW = x_RV[:, :covered].view(-1, num_blocks, _BLOCK_COLUMNS)
    block_max_RB = blocks_RBW.amax(-1)
    if covered < num_columns:
        rest_max_R1 = x_RV[:, covered:].amax(-1, keepdim=True)
        block_max_RB = torch.cat((block_max_RB, rest_max_R1), dim=1)
    value_R, block_R = block_max_RB.max(-1)
    # The last window reaches back into the block before it, whose values are all smaller.
    start_R1 = (block_R * _BLOCK_COLUMNS).clamp_(max=num_columns - _BLOCK_COLUMNS)[:, None]
    window_RW = start_R1 + torch.arange(_BLOCK_COLUMNS, device=x_RV.device)
    return value_R, start_R1[:, 0] + x_RV.gather(1, window_RW).max(-1).indices


def _checked(peak_R: Tensor, token_R: Tensor) -> list[Sampled]:
    """Tokens, or the mark of a broken row; the largest logit shows it, since NaN and +Inf win."""
    return list(map(Sampled, token_R.where(peak_R.isfinite(), -1).tolist()))


def _is_plain(row: TokenSequence) -> bool:
    """Whether the likeliest token is all that the row wants."""
    sampling = row.request.sampling
    return (
        sampling.greedy
        and sampling.logprobs is None
        and not penalties.changes_logits(sampling, len(row.output_tokens))
    )


def _groups(places: Sequence[int], logits_RV: Tensor) -> Iterator[list[int]]:
    budget = SAMPLING_LOGITS if logits_RV.device.type == "cpu" else _GROUP_LOGITS_GPU
    num_rows = max(1, budget // logits_RV.shape[1])
    for start in range(0, len(places), num_rows):
        yield list(places[start : start + num_rows])


def _logprobs(
    logprobs_RV: Tensor, tokens: Sequence[int], most: Sequence[int]
) -> Iterator[TokenLogprob]:
    """The chosen tokens and the ``most`` likeliest of each row, ties by the lowest id."""
    columns = torch.arange(logprobs_RV.shape[1], device=logprobs_RV.device)
    # Log-probabilities are never positive, so their bits without the sign rise as they fall.
    magnitude_RV = (logprobs_RV.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    order_RV = (magnitude_RV << 31) | columns
    most_of_all = min(max(most), logprobs_RV.shape[1])
    top_RK = order_RV.topk(most_of_all, -1, largest=False).values & (2**31 - 1)
    chosen_R1 = columns.new_tensor(tokens)[:, None]
    chosen = logprobs_RV.gather(1, chosen_R1.clamp(min=0))[:, 0].tolist()
    tops = zip(top_RK.tolist(), logprobs_RV.gather(1, top_RK).tolist(), strict=True)
    for token, logprob, k, (ids, values) in zip(tokens, chosen, most, tops, strict=True):
        top = dict(zip(ids[:k], values[:k], strict=True))
        yield TokenLogprob(token=token, logprob=logprob, top=top)
