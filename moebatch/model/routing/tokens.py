"""Tokens by the expert that they have chosen.

Shape letters: T tokens of the pass, R rows, E experts, K experts per token, M tokens of one expert.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
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


class TokensByExpert(Mapping[int, ExpertTokens]):
    """Tokens of every expert that was chosen, ascending by expert.

    They are sorted when the first expert runs: of a micro-batch whose experts run over the whole
    pass nobody asks for more than how many there are.
    """

    def __init__(self, counts: Mapping[int, int], sort: Callable[[], ExpertTokens]) -> None:
        """`sort` gives those of all experts, one expert behind the other in the order of `counts`,
        which may end with others."""
        self.counts = counts
        self._sort = sort

    def __getitem__(self, expert: int) -> ExpertTokens:
        return self._parts[expert]

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def _parts(self) -> dict[int, ExpertTokens]:
        tokens, sizes = self._sort(), list(self.counts.values())
        parts = zip(*(torch.split(each[: sum(sizes)], sizes) for each in tokens), strict=True)
        return {
            expert: ExpertTokens(*part) for expert, part in zip(self.counts, parts, strict=True)
        }


def group_by_expert(experts_TK: Tensor, rows: slice, num_experts: int) -> TokensByExpert:
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
) -> TokensByExpert:
    """The same by one sort, where it is known how often each expert was chosen in those rows.

    `counts` is in ascending order of experts.
    """

    def sort() -> ExpertTokens:
        parts = [experts_TK[part] for part in rows]
        # Left out ones come last.
        order = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten().argsort(stable=True)
        num_choices = experts_TK.shape[1]
        return ExpertTokens(_in_pass(order // num_choices, rows), order % num_choices)

    return TokensByExpert(counts, sort)


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
