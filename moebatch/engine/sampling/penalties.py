"""What a request asks to be done to its logits before a token is chosen.

Shapes: V vocabulary. The order is vLLM's: ends held back, logit_bias, repetition, frequency and
presence penalty. Everything works in place on one row, since rows that ask for it are rare.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling


def changes_logits(sampling: Sampling, num_output_tokens: int) -> bool:
    """Whether `adjust` would touch a row at this position."""
    return num_output_tokens < sampling.min_tokens or sampling.changes_logits


def adjust(
    logits_V: Tensor,
    request: Request,
    output_tokens: Sequence[int],
    end_tokens: frozenset[int],
) -> None:
    """Apply min_tokens, logit_bias and penalties to one float32 row, in place.

    Token ids of logit_bias must lie in the vocabulary; they are checked when the request is read.
    """
    sampling = request.sampling
    if len(output_tokens) < sampling.min_tokens:
        others_V = _without(logits_V, end_tokens | sampling.stop_token_ids)
        # A grammar that is complete leaves nothing but the end.
        if sampling.grammar is None or others_V.max() > -torch.inf:
            logits_V.copy_(others_V)
    if sampling.logit_bias:
        ids_B = _ids(list(sampling.logit_bias), logits_V)
        logits_V[ids_B] += logits_V.new_tensor(list(sampling.logit_bias.values()))
    if sampling.repetition_penalty != 1.0:
        seen = (*request.prompt_tokens, *output_tokens)
        _penalise_repetition(logits_V, seen, sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids_U, counts_U = torch.unique(_ids(output_tokens, logits_V), return_counts=True)
        penalty_U = sampling.frequency_penalty * counts_U + sampling.presence_penalty
        logits_V[ids_U] -= penalty_U.to(logits_V.dtype)


def _without(logits_V: Tensor, ends: frozenset[int]) -> Tensor:
    # A stop token beyond the vocabulary can never come, so there is nothing to hold back.
    reachable = [token for token in sorted(ends) if token < logits_V.shape[0]]
    return logits_V.index_fill(0, _ids(reachable, logits_V), -torch.inf)


def _penalise_repetition(logits_V: Tensor, seen: Sequence[int], penalty: float) -> None:
    ids_U = torch.unique(_ids(seen, logits_V))
    seen_U = logits_V[ids_U]
    limits = torch.finfo(logits_V.dtype)
    penalty = max(penalty, limits.tiny)  # nor is any quotient infinite, as a broken model's logits
    raised_U = (seen_U / penalty).clamp(max=limits.max)
    logits_V[ids_U] = torch.where(seen_U > 0, raised_U, seen_U * penalty)


def _ids(tokens: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=like.device)
