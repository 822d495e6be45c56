"""Which experts each token chooses.

Shape letters: T tokens, D hidden, E experts, K experts per token.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.model.products import Weights
from moebatch.model.routing.tokens import TokensByExpert, group_rows
from moebatch.spec.model.blocks import Router

Group = Callable[[Tensor, Sequence[slice], Mapping[int, int]], TokensByExpert]
"""As `group_rows`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """A MoE layer's input, what its tokens chose, and what their experts made of it.

    The tensors have all rows of the pass. A routing is about some of them; the others may be in
    another layer at that time, with routings of their own.
    """

    rows: tuple[slice, ...]
    """The rows that have been routed: ascending, with a gap between each two slices."""
    normed_TD: Tensor
    weights_TK: Tensor
    """Float32."""
    experts_TK: Tensor
    """Int64; the number of experts stands for a choice that was left out, whose weight is 0, and
    for one that gives back what it sees."""
    num_experts: int
    """E."""
    tokens: TokensByExpert
    outputs_TKD: Tensor
    """Weighted outputs of the experts, each in its own place: they are summed in a fixed order, so
    that results do not depend on the order in which experts arrive."""
    ahead: tuple[int, ...] = ()
    """Experts of a later layer that the rows have chosen here, by a pre-gate, ascending."""
    latents_TL: Tensor | None = None
    """What experts see, where that is not `normed_TD`."""
    asked_TK: Tensor | None = None
    """What tokens had chosen of which experts have no room for some; None where all have."""

    @property
    def inputs_TI(self) -> Tensor:
        """What experts see."""
        return self.normed_TD if self.latents_TL is None else self.latents_TL

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts that at least one token chose, ascending."""
        return tuple(self.tokens)

    def chosen(self, rows: slice) -> Ints:
        """What those rows chose, in main memory, [R, K]; where no expert was chosen, or one was
        left out, the first one of its token is shown. A token without any, which is rare where
        few choices compute nothing, is shown with the last expert of all."""
        chosen_TK = self.experts_TK if self.asked_TK is None else self.asked_TK
        experts_RK: Ints = chosen_TK[rows].cpu().numpy()
        is_one_RK = experts_RK < self.num_experts
        first_R1 = np.take_along_axis(experts_RK, is_one_RK.argmax(axis=1)[:, None], axis=1)
        return np.where(is_one_RK, experts_RK, first_R1.clip(max=self.num_experts - 1))

    def identity_weights(self, rows: slice) -> Tensor:
        """Weights with which each of those rows gets back what it is, [R, 1], float32."""
        weights_RK, experts_RK = self.weights_TK[rows], self.experts_TK[rows]
        return (weights_RK * (experts_RK == self.num_experts)).sum(dim=-1, keepdim=True)

    @classmethod
    def join(cls, routings: Sequence["Routing"], group: Group = group_rows) -> "Routing":
        """One routing for the rows of several, in whatever order, of one layer of one pass.

        Needs nothing from the device: how many tokens each expert has is known.
        """
        first = routings[0]
        if len(routings) == 1:
            return first
        counts: Counter[int] = Counter()
        for routing in routings:
            assert routing.normed_TD.data_ptr() == first.normed_TD.data_ptr(), "of another pass"
            counts.update(routing.tokens.counts)
        rows = _merged(rows for routing in routings for rows in routing.rows)
        return replace(
            first,
            rows=rows,
            tokens=group(first.experts_TK, rows, dict(sorted(counts.items()))),
        )


def choose_experts(
    logits_TE: Tensor,
    router: Router,
    num_chosen: int,
    weights: Weights,
    dtype: torch.dtype,
    known_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K], in descending order for each token, and experts [T, K] of each token.

    They are computed in float32; `dtype` is what weights are rounded to, unless they are exact. By
    the `weights` of the layer choices are corrected, and experts weighed, where the router says so.
    Experts that are known are only weighed.
    """
    if known_TK is not None:
        weights_TK, experts_TK = _by_weight(
            scores_of(logits_TE, router).gather(1, known_TK), known_TK
        )
    elif router.scores == "sparsemixer":
        weights_TK, experts_TK = _one_after_the_other(logits_TE.float(), router.near, num_chosen)
    else:
        correction_E = weights.get("router_correction")
        weights_TK, experts_TK = _best(logits_TE, router, num_chosen, correction_E)
    if router.norm_order is not None:
        norm_T1 = torch.linalg.vector_norm(weights_TK, router.norm_order, dim=-1, keepdim=True)
        if router.least_norm:
            norm_T1.clamp_(min=router.least_norm)
        if router.added_to_norm:
            norm_T1 += router.added_to_norm
        weights_TK = weights_TK / norm_T1
    if router.scale != 1.0:
        weights_TK = weights_TK * router.scale
    if router.weighs_experts:
        by_expert_E = weights["router_expert_weights"]
        weights_TK, experts_TK = _by_weight(weights_TK * by_expert_E[experts_TK], experts_TK)
    return weights_TK if router.has_exact_weights else weights_TK.to(dtype), experts_TK


def _best(
    logits_TE: Tensor, router: Router, num_chosen: int, correction_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores and experts of those that are wanted most."""
    scores_TE = scores_of(logits_TE, router)
    wanted_TE = _wanted(logits_TE, scores_TE, router, correction_E)
    if wanted_TE is scores_TE and router.scores == "sigmoid":
        wanted_TE = logits_TE.float()  # tells those from each other whose scores are 1
    weights_TK, experts_TK = torch.topk(wanted_TE, num_chosen, dim=-1)
    if router.scores != "softmax" or router.has_correction:
        return _by_weight(scores_TE.gather(1, experts_TK), experts_TK)
    return weights_TK, experts_TK


def _one_after_the_other(logits_TE: Tensor, near: float, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Weights and experts by `sparsemixer`."""
    left_TE, chosen = logits_TE, []
    for _ in range(num_chosen):
        best_T1, expert_T1 = left_TE.max(dim=-1, keepdim=True)
        below_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1)
        met_TE = left_TE.masked_fill(below_TE > near, -torch.inf)
        chosen.append((met_TE.softmax(dim=-1).gather(1, expert_T1), expert_T1))
        left_TE = left_TE.scatter(1, expert_T1, -torch.inf)
    weights, experts = zip(*chosen, strict=True)
    return _by_weight(torch.cat(weights, dim=1), torch.cat(experts, dim=1))


def _by_weight(weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Both in descending order of weights."""
    weights_TK, order_TK = weights_TK.sort(dim=-1, descending=True, stable=True)
    return weights_TK, experts_TK.gather(1, order_TK)


def preferences(logits_TE: Tensor, router: Router, correction_E: Tensor | None) -> Tensor:
    """Numbers in float32 whose softmax says how likely tokens choose each expert, in the order in
    which `choose_experts` takes them; -inf for those of other groups that are ruled out."""
    if not router.has_correction and router.groups is None:
        return logits_TE.float()
    wanted_TE = _wanted(logits_TE, scores_of(logits_TE, router), router, correction_E)
    if not router.has_correction:
        return logits_TE.float().masked_fill(wanted_TE.isneginf(), -torch.inf)
    if router.corrects_logits:
        return wanted_TE
    # Around usual logits, scores rise by so much less than these do.
    return wanted_TE * (wanted_TE.shape[1] if router.scores == "softmax" else 4)


def scores_of(logits_TE: Tensor, router: Router) -> Tensor:
    """What experts are chosen and weighed by, float32."""
    if router.logit_cap is not None:
        logits_TE = (logits_TE.float() / router.logit_cap).tanh_().mul_(router.logit_cap)
    if router.scores == "sigmoid":
        return logits_TE.float().sigmoid()
    if router.scores == "sqrtsoftplus":
        return F.softplus(logits_TE.float()).sqrt_()
    return F.softmax(logits_TE, dim=-1, dtype=torch.float32)


def _wanted(
    logits_TE: Tensor, scores_TE: Tensor, router: Router, correction_E: Tensor | None
) -> Tensor:
    """What experts are chosen by: -inf for those of other groups, or zero."""
    wanted_TE = logits_TE.float() if router.corrects_logits else scores_TE
    if router.has_correction:
        assert correction_E is not None, "the layer has one"
        wanted_TE = wanted_TE + correction_E
    groups = router.groups
    if groups is None:
        return wanted_TE
    group_size = wanted_TE.shape[1] // groups.num_groups
    by_group_TGE = wanted_TE.view(len(wanted_TE), groups.num_groups, group_size)
    group_scores_TG = by_group_TGE.topk(groups.num_scored, dim=-1).values.sum(dim=-1)
    kept = group_scores_TG.topk(groups.num_kept, dim=-1, sorted=False).indices
    is_other_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept, False)
    least = 0.0 if groups.others_are_zero else -torch.inf
    return by_group_TGE.masked_fill(is_other_TG[..., None], least).view_as(wanted_TE)


def _merged(parts: Iterable[slice]) -> tuple[slice, ...]:
    """Slices in ascending order, those that adjoin each other in one."""
    merged: list[slice] = []
    for part in sorted(parts, key=lambda part: part.start):
        assert not merged or merged[-1].stop <= part.start, "a row has been routed twice"
        if merged and merged[-1].stop == part.start:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return tuple(merged)
