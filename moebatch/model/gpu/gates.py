"""What surrounds the experts of a layer: tokens choose them in one launch, and in one launch tokens
lie by expert.

Shape letters: T tokens of the pass, R rows, E experts, K experts per token, N choices.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.gpu.rows import FLOATS, block_of, launch
from moebatch.model.products import Weights
from moebatch.model.routing.tokens import ExpertTokens, TokensByExpert, read_back
from moebatch.spec.model.blocks import Router

_CHOICES_AT_ONCE = 1024
"""That a program looks at."""


class Formula(NamedTuple):
    """What the kernel of choices is compiled for: a `Router` of a model."""

    num_choices: int
    scores: str
    near: float
    wants_logits: bool
    """Experts are chosen by logits: these are corrected, or tell those from each other whose scores
    are alike."""
    has_correction: bool
    num_groups: int
    group_size: int
    num_kept: int
    num_scored: int
    others_are_zero: bool
    is_sorted: bool
    """Experts are weighed by other numbers than they are chosen by."""
    norm_order: float
    """0 leaves weights alone."""
    least_norm: float
    added_to_norm: float
    scale: float
    weighs_experts: bool
    rounds_to: str

    @classmethod
    def of(
        cls, router: Router, *, num_experts: int, num_choices: int, dtype: torch.dtype
    ) -> "Formula":
        """Weights are rounded to `dtype`, unless they are exact."""
        groups, is_softmax = router.groups, router.scores == "softmax"
        num_groups = 1 if groups is None else groups.num_groups
        has_correction = router.has_correction
        is_plain = not is_softmax and not has_correction and groups is None
        return cls(
            num_choices=num_choices,
            scores=router.scores,
            near=router.near,
            wants_logits=is_plain or router.corrects_logits,
            has_correction=has_correction,
            num_groups=num_groups,
            group_size=num_experts // num_groups,
            num_kept=1 if groups is None else groups.num_kept,
            num_scored=0 if groups is None else groups.num_scored,
            others_are_zero=groups is not None and groups.others_are_zero,
            is_sorted=not is_softmax or has_correction,
            norm_order=router.norm_order or 0.0,
            least_norm=router.least_norm,
            added_to_norm=router.added_to_norm,
            scale=router.scale,
            weighs_experts=router.weighs_experts,
            rounds_to="none" if router.has_exact_weights else FLOATS[dtype],
        )


class Grouped(NamedTuple):
    """Room for the tokens of all experts, one expert behind the other."""

    tokens: ExpertTokens
    """[N]; choices that were left out have no place there, and the end stays as it is."""
    counts_E: Tensor
    """How many each expert has, int64."""

    @classmethod
    def room(cls, num_choices: int, num_experts: int, device: torch.device) -> "Grouped":
        rows_N, choices_N, counts_E = (
            torch.empty(size, dtype=torch.int64, device=device)
            for size in (num_choices, num_choices, num_experts)
        )
        return cls(ExpertTokens(rows_N, choices_N), counts_E)


class GpuGates:
    """Experts of tokens, and tokens of experts."""

    def choose(
        self,
        logits_RE: Tensor,
        router: Router,
        into: tuple[Tensor, Tensor],
        weights: Weights,
        dtype: torch.dtype,
    ) -> None:
        """Fills weights, float32, and experts, [R, K], as `choose_experts` does."""
        weights_RK, experts_RK = into
        (num_rows, num_experts), num_choices = logits_RE.shape, weights_RK.shape[1]
        assert weights_RK.dtype == torch.float32 and experts_RK.dtype == torch.int64
        given = logits_RE, weights_RK, experts_RK
        assert all(each.is_contiguous() for each in given), "rows of a product, and of a pass"
        formula = Formula.of(router, num_experts=num_experts, num_choices=num_choices, dtype=dtype)
        if not num_rows:
            return
        launch(
            "choose",
            (num_rows,),
            weights_RK,
            experts_RK,
            logits_RE,
            weights.get("router_correction", logits_RE),
            weights.get("router_expert_weights", logits_RE),
            formula=formula,
            G=block_of(formula.num_groups),
            S=block_of(formula.group_size),
            K=block_of(num_choices),
        )

    def group(
        self,
        experts_TK: Tensor,
        rows: slice,
        num_experts: int,
        counts: Mapping[int, int] | None = None,
    ) -> TokensByExpert:
        """As `group_rows`; waits for the GPU to know counts that are not given."""
        num_choices = experts_TK[rows].numel()
        room = Grouped.room(num_choices, num_experts, experts_TK.device)
        self.fill(experts_TK, rows, room)
        counts = read_back(room.counts_E) if counts is None else counts
        return TokensByExpert(counts, lambda: room.tokens)

    def fill(self, experts_TK: Tensor, rows: slice, into: Grouped) -> None:
        """The tokens of all experts, among those rows of the pass."""
        chosen_RK, (tokens, counts_E) = experts_TK[rows], into
        assert chosen_RK.is_contiguous() and len(tokens.rows_M) == chosen_RK.numel()
        launch(
            "group",
            (len(counts_E),),
            *tokens,
            counts_E,
            chosen_RK,
            rows.start,
            chosen_RK.numel(),
            num_choices=chosen_RK.shape[1],
            block=_CHOICES_AT_ONCE,
        )
