"""Tokens by the expert that they have chosen.

Shape letters: T tokens of the pass, R rows, E experts, K experts per token, M tokens of one expert.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertTokens(NamedTuple):
    """The tokens that chose an expert, ascending."""

    rows_M: Tensor
    """Row of each token in the pass, int64."""
    choices_M: Tensor
    """Which of its K choices the expert is, int64."""

    @property
    def num_tokens(self) -> int:
        """M, by the shape: ``len`` of a tensor takes torch three times as long (0.4 us), and a host
        looks at many experts."""
        return self.rows_M.shape[0]


def group_by_expert(experts_TK: Tensor, rows: slice, num_experts: int) -> dict[int, ExpertTokens]:
    """Tokens of every expert that was chosen, among some rows; waits for a GPU to know how many."""
    return group_rows(experts_TK, (rows,), count_by_expert(experts_TK[rows], num_experts))


def count_by_expert(experts_RK: Tensor, num_experts: int) -> dict[int, int]:
    """How often each expert was chosen that was chosen at all, ascending; waits for a GPU."""
    chosen = experts_RK.flatten()
    # Like bincount, which makes a GPU wait three times.
    counts_E = chosen.new_zeros(num_experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))
    return read_back(counts_E[:-1])


def read_back(counts_E: Tensor) -> dict[int, int]:
    """How often each expert was chosen that was chosen at all, ascending; waits for a GPU."""
    return {expert: count for expert, count in enumerate(counts_E.tolist()) if count}


def group_rows(
    experts_TK: Tensor, rows: Sequence[slice], counts: Mapping[int, int]
) -> dict[int, ExpertTokens]:
    """The same by one sort, where it is known how often each expert was chosen in those rows.

    `counts` is in ascending order of experts.
    """
    num_choices = experts_TK.shape[1]
    chosen_TK = experts_TK[rows[0]] if len(rows) == 1 else torch.cat([experts_TK[r] for r in rows])
    # Left out ones come last, where `split` cuts them off.
    order = chosen_TK.flatten().argsort(stable=True)
    return split(ExpertTokens(_in_pass(order // num_choices, rows), order % num_choices), counts)


def split(tokens: ExpertTokens, counts: Mapping[int, int]) -> dict[int, ExpertTokens]:
    """Tokens of several experts, one behind the other in the order of `counts`, by expert."""
    sizes = list(counts.values())
    parts = zip(*(torch.split(each[: sum(sizes)], sizes) for each in tokens), strict=True)
    return {expert: ExpertTokens(*part) for expert, part in zip(counts, parts, strict=True)}


def rank_among_alike(keys_R: Tensor) -> Tensor:
    """How many equal keys stand before each, [R]."""
    order_R = keys_R.argsort(stable=True)
    sorted_R, places_R = keys_R[order_R], torch.arange(len(keys_R), device=keys_R.device)
    is_new_R = torch.ones_like(sorted_R, dtype=torch.bool)
    is_new_R[1:] = sorted_R[1:] != sorted_R[:-1]
    starts_R = places_R.where(is_new_R, 0).cummax(0).values
    return torch.empty_like(order_R).index_copy_(0, order_R, places_R - starts_R)


def _in_pass(places: Tensor, rows: Sequence[slice]) -> Tensor:
    """Rows of the pass, from places among some of them taken together."""
    if len(rows) == 1:
        return places.add_(rows[0].start)
    parts = [torch.arange(part.start, part.stop, device=places.device) for part in rows]
    return torch.cat(parts)[places]
