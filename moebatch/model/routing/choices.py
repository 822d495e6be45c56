"""What tokens of a pass choose, by the gates of its layers.

Shape letters: T tokens of the pass, R rows, N rows after bucketing, D hidden, E experts, K experts
per token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moebatch.layout.fused import chooses_at_once
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.families.family import Router, described_router
from moebatch.model.gpu import loader as gpu
from moebatch.model.gpu.gates import GpuGates
from moebatch.model.products import Products
from moebatch.model.routing.gating import AdaptiveGating, GatingCount
from moebatch.model.routing.pregates import ChoicesAhead
from moebatch.model.routing.router import Routing, choose_experts
from moebatch.model.routing.tokens import (
    TokensByExpert,
    group_by_expert,
    group_rows,
    rank_among_alike,
)
from moebatch.model.scratch import Frame
from moebatch.spec.model.shape import ModelShape

_Chosen = tuple[Tensor, Tensor]
"""Weights and experts, [R, K]."""


class Choices:
    """Asks gates, and keeps by row what they chose, what experts see and what they make, until the
    row is routed again."""

    def __init__(
        self,
        shape: ModelShape,
        weights: DenseWeights,
        products: Products,
        router: Router,
        *,
        pass_tokens: int,
        gating: AdaptiveGating | None,
        activation_level: int,
    ) -> None:
        """`router` is the family's; `gating` and `activation_level` as a `Decoder` has them."""
        embedding = weights.globals["embedding"]
        self._dtype, device = embedding.dtype, embedding.device
        self._shape, self._layers, self._router = shape, weights.layers, router
        self._is_wide = shape.router.has_exact_logits and self._dtype != torch.float32
        self._products = Products(device, torch.float32) if self._is_wide else products
        self._kernels = GpuGates() if chooses_at_once(shape) and gpu.are_for(device) else None
        self._chooser = self._kernels if router is described_router else None
        self._gating = gating
        self.gating_count = GatingCount() if gating else None
        room, latent = embedding.new_empty, shape.latent_width
        self.normed_TD = room(pass_tokens, shape.hidden_size)
        """Inputs of a layer's experts; and what these see, where that is something else."""
        self.latents_TL = None if latent is None else room(pass_tokens, latent)
        self._outputs_TKI = room(pass_tokens, shape.experts_per_token, shape.expert_size)
        size = (pass_tokens, shape.experts_per_token)
        self._weights_TK = torch.empty(size, device=device, dtype=torch.float32)
        self._experts_TK = torch.empty(size, device=device, dtype=torch.int64)
        self._asked_TK = self._experts_TK.new_empty(0 if shape.router.capacity is None else size)
        self._tokens_T = self._experts_TK.new_empty(0)
        self._prompts_T = self._experts_TK.new_empty(0)
        """The prompt of every row of the pass, by number; -1 for tokens of answers."""
        self._ahead = ChoicesAhead(
            shape.moe_layers, activation_level, self._weights_TK, self._experts_TK
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated up front."""
        chosen = self._weights_TK, self._experts_TK, self._asked_TK
        kept = *chosen, self.normed_TD, self.latents_TL, self._outputs_TKI
        return self._ahead.num_bytes + sum(each.nbytes for each in kept if each is not None)

    def begin(self, tokens_T: Tensor, prompts: Sequence[slice]) -> None:
        """A pass of these tokens, in which `prompts` are rows of whole ones."""
        self._tokens_T = tokens_T.to(self._experts_TK.device)
        num_tokens = len(tokens_T)
        if self._shape.router.capacity is None:
            return
        prompts_T = torch.full((num_tokens,), -1)
        for number, rows in enumerate(prompts):
            prompts_T[rows] = number
        self._prompts_T = prompts_T.to(self._asked_TK.device)

    def choose(self, layer: int, rows: slice, frame: Frame, input_ND: Tensor) -> None:
        """Choices of rows for the layer, by its gate now or kept since an earlier layer; and for
        the later one whose gate reads this layer's input, if there is one."""
        take = frame.take_float if self._is_wide else frame.take
        if self._is_wide:
            input_ND = take(*input_ND.shape).copy_(input_ND)
        num_experts = self._shape.num_experts
        room_NE = take(len(input_ND), self._shape.num_choices)
        weights_RK, experts_RK = here = self._weights_TK[rows], self._experts_TK[rows]
        if self._ahead.is_chosen_earlier(layer):
            _copy(self._ahead.kept(layer, rows), here)
        else:
            self._ask(layer, rows, input_ND, room_NE, here)
        later = self._ahead.later(layer)
        if later is not None:
            self._ask(later, rows, input_ND, room_NE, self._ahead.kept(later, rows))
        if self._gating is not None and self.gating_count is not None:
            self._gating.drop(layer, weights_RK, experts_RK, num_experts)
            self.gating_count.add(experts_RK == num_experts)

    def _ask(
        self, layer: int, rows: slice, input_ND: Tensor, room_NE: Tensor, into: _Chosen
    ) -> None:
        """What the gate of a layer chooses for the first rows."""
        weights, router = self._layers[layer], self._shape.router
        bias_E = weights.get("router_bias")
        logits_NE = self._products.linear(input_ND, weights["router"], bias_E, room_NE)
        logits_RE = logits_NE[: len(into[0])]
        if "router_table" in weights:
            known_RK = weights["router_table"][self._tokens_T[rows]].long()
            given = router, self._shape.experts_per_token, weights, self._dtype
            _copy(choose_experts(logits_RE, *given, known_RK), into)
        elif self._chooser is None:
            _copy(self._router(logits_RE, self._shape, weights, self._dtype), into)
        else:
            self._chooser.choose(logits_RE, router, into, weights, self._dtype)
        if router.num_identities:
            into[1].clamp_(max=self._shape.num_experts)

    def routing(self, layer: int, rows: slice, num_tokens: int) -> Routing:
        """Of rows that have chosen, in a pass of so many. Choices that are left out, or that
        compute nothing, count as done, and have made nothing."""
        num_experts, outputs_TKI = self._shape.num_experts, self._outputs_TKI[:num_tokens]
        experts_TK = self._experts_TK[:num_tokens]
        asked_TK = self._turn_away(layer, rows)
        identities = self._shape.router.num_identities
        if self._gating is not None or asked_TK is not None or identities:
            is_left_out_RK = experts_TK[rows] == num_experts
            outputs_TKI[rows].masked_fill_(is_left_out_RK[..., None], 0.0)
        return Routing(
            rows=(rows,),
            normed_TD=self.normed_TD[:num_tokens],
            latents_TL=None if self.latents_TL is None else self.latents_TL[:num_tokens],
            weights_TK=self._weights_TK[:num_tokens],
            experts_TK=experts_TK,
            num_experts=num_experts,
            tokens=self._group(experts_TK, (rows,)),
            outputs_TKD=outputs_TKI,
            ahead=self._ahead.experts(layer, rows, num_experts),
            asked_TK=asked_TK,
        )

    def join(self, routings: Sequence[Routing]) -> Routing:
        return Routing.join(routings, self._group)

    def _group(
        self,
        experts_TK: Tensor,
        rows: Sequence[slice],
        counts: Mapping[int, int] | None = None,
    ) -> TokensByExpert:
        """Tokens by expert; waits for a GPU to know counts that are not given."""
        num_experts = self._shape.num_experts
        if self._kernels is not None and len(rows) == 1:
            return self._kernels.group(experts_TK, rows[0], num_experts, counts)
        if counts is None:
            return group_by_expert(experts_TK, rows[0], num_experts)
        return group_rows(experts_TK, rows, counts)

    def _turn_away(self, layer: int, rows: slice) -> Tensor | None:
        """Leaves out tokens of a prompt for which the expert that they have chosen has no room;
        returns what all have chosen, if there may be such."""
        capacity, num_experts = self._shape.router.capacity, self._shape.num_experts
        if capacity is None or not self._shape.encodes(layer) or rows.start == rows.stop:
            return None
        assert self._shape.experts_per_token == 1, "only first choices have a place in a row"
        self._asked_TK[rows] = self._experts_TK[rows]
        experts_R = self._experts_TK[rows].view(-1)
        rank_R = rank_among_alike(self._prompts_T[rows] * num_experts + experts_R)
        experts_R.masked_fill_(rank_R >= capacity, num_experts)
        return self._asked_TK


def _copy(chosen: _Chosen, into: _Chosen) -> None:
    for source, target in zip(chosen, into, strict=True):
        target.copy_(source)
