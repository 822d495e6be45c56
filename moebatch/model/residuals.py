"""What parts of layers see of hidden states, and how what they make is added to these.

A part is attention or recurrence, the first one of a layer, or experts or an MLP, the last one.

Shape letters: T tokens of the pass, N rows after bucketing, M rows, K experts per token, D hidden,
R rank of gates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model import layers
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.products import Weights
from moebatch.model.scratch import Frame
from moebatch.model.streams import StreamMixer
from moebatch.spec.model.blocks import Mixing, Residual
from moebatch.spec.model.shape import ModelShape


class _Part(NamedTuple):
    """Of a layer."""

    norm: str
    """Role of the norm before it."""
    out_norm: str
    """Role of that of what it makes, which few models have."""
    residual: Residual
    share: str
    """Role of what says by how much it changes them, which few have."""


class Residuals:
    """Hidden states are changed in place. What is added late is kept by row meanwhile."""

    def __init__(
        self, shape: ModelShape, weights: DenseWeights, operators: Operators, *, pass_tokens: int
    ) -> None:
        """For passes of at most so many tokens."""
        self._shape, self._layers, self._globals = shape, weights.layers, weights.globals
        self._products, self._elementwise = operators
        self._streams = StreamMixer(shape) if shape.streams else None
        self._last = _Part(shape.norm_of_mlps, "mlp_out_norm", shape.mlp_residual, "mlp_share")
        self._ones_D = torch.ones(
            max(shape.hidden_size, shape.expert_size), device=operators.device
        )
        room, size = weights.globals["embedding"].new_empty, (pass_tokens, shape.hidden_size)
        self._late_TD = room(size if shape.adds_experts_late else 0)
        """What experts have made that is added at the end of the next layer."""
        self._attended_TD = room(size if shape.adds_attention_late else 0)
        """What attention has made that is added at the end of its own one."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return self._late_TD.nbytes + self._attended_TD.nbytes

    def normed(self, frame: Frame, x_MD: Tensor, layer: int | None, role: str) -> Tensor:
        """The norm of x with rows up to the next bucket, by the weights of a layer or, if that is
        None, by what no layer owns; rows beyond x hold garbage. Without that norm a part takes x as
        it is."""
        normed_ND = frame.take(self._products.rows(len(x_MD)), self._shape.hidden_size)
        self.norm(frame, x_MD, layer, role, normed_ND[: len(x_MD)])
        return normed_ND

    def norm(
        self, frame: Frame, x_MD: Tensor, layer: int | None, role: str, out_MD: Tensor
    ) -> None:
        """The same into `out_MD`."""
        weights = self._globals if layer is None else self._layers[layer]
        if self._streams is not None:
            merged_MD = self._streams.merged(frame, x_MD, weights, role)
            x_MD = frame.take(*merged_MD.shape).copy_(merged_MD)
        if role not in weights:
            out_MD.copy_(x_MD)
            return
        eps, weight_D = self._shape.norm_eps(role, layer), weights[role]
        if self._shape.norm.kind == "layer":
            room = frame.branch().take_float(*x_MD.shape)
            layers.layer_norm(x_MD, weight_D, weights.get(f"{role}_bias"), eps, room, out_MD)
        else:
            self._elementwise.norm(frame, x_MD, weight_D, eps, out_MD)
        if f"{role}_gate_down" in weights:
            self._weigh(frame.branch(), weights, role, out_MD)

    def _weigh(self, frame: Frame, weights: Weights, role: str, normed_MD: Tensor) -> None:
        """What a norm has made, by gates that it opens, in place; not rounded before."""
        normed_ND = self._products.bucketed(frame, normed_MD)
        low_NR = self._products.of_role(frame, normed_ND, weights, f"{role}_gate_down")
        layers.silu_in_place(low_NR)
        gate_ND = self._products.of_role(frame, low_NR, weights, f"{role}_gate_up")
        opened_MD = frame.take_float(*normed_MD.shape).copy_(gate_ND[: len(normed_MD)])
        normed_MD.mul_(opened_MD.sigmoid_())

    def made(self, frame: Frame, weights: Weights, norm: str, *parts: Tensor) -> tuple[Tensor, ...]:
        """What has been made, [M, D] or [M, K, D] each; or its sum through the norm of that role,
        where the layer has it."""
        if norm not in weights and not self._shape.is_unweighed(norm):
            return parts
        y_MD = self._sum(frame, *parts)
        self.norm_made(frame, y_MD, weights.get(norm))
        return (y_MD,)

    def norm_made(self, frame: Frame, y: Tensor, weight: Tensor | None) -> None:
        """The norm of what has been made, of whatever width, in place."""
        if self._shape.out_norms is not None:
            if weight is not None:
                y.mul_(weight)
            weight = self._ones_D[: y.shape[-1]]
        assert weight is not None, "norms of others have some"
        self._elementwise.norm(frame, y, weight, self._shape.out_eps)

    def embedded(self, frame: Frame, x_MD: Tensor) -> None:
        """Norms embeddings in place."""
        self._elementwise.norm(frame, x_MD, self._ones_D[: x_MD.shape[1]], self._shape.rms_eps)

    def add_mixed(self, work: LayerWork, x_TD: Tensor, out_ND: Tensor) -> None:
        """Adds what attention or recurrence has made of rows as it saw them; or keeps it for the
        end of the layer."""
        rows, layer, made_MD = work.micro_batch.rows, work.layer, out_ND[: work.num_tokens]
        if self._shape.adds_attention_late:
            self._attended_TD[rows] = made_MD
            return
        normed_MD = work.normed_ND[: work.num_tokens]
        self._add(work.frame, layer, self._first(layer), x_TD[rows], normed_MD, made_MD)

    def kept(self, frame: Frame, rows: slice, *parts: Tensor) -> tuple[Tensor, ...]:
        """What experts have made of rows; nothing where it is kept for the end of the next
        layer."""
        if not self._shape.adds_experts_late:
            return parts
        self._elementwise.add(frame, self._late_TD[rows].zero_(), *parts)
        return ()

    def end(
        self,
        frame: Frame,
        layer: int,
        x_TD: Tensor,
        rows: slice,
        normed_MD: Tensor,
        *parts: Tensor,
    ) -> None:
        """Ends a layer of rows: adds what its experts or its MLP have made of them, and what has
        been kept."""
        x_MD, weights = x_TD[rows], self._layers[layer]
        if self._shape.adds_attention_late:
            attended_MD = self._attended_TD[rows]
            self._add(frame, layer, self._first(layer), x_MD, normed_MD, attended_MD)
        if self._shape.adds_experts_late and not self._shape.is_moe(layer):
            parts = (*parts, self._late_TD[rows])
        if parts:
            self._add(frame, layer, self._last, x_MD, normed_MD, *parts)
        if "layer_scale" in weights:
            x_MD.mul_(weights["layer_scale"])

    def _first(self, layer: int) -> _Part:
        residual = self._shape.mixer_residual(layer)
        return _Part("input_norm", "attention_out_norm", residual, "mixer_share")

    def _add(
        self,
        frame: Frame,
        layer: int,
        part: _Part,
        x_MD: Tensor,
        normed_MD: Tensor,
        *parts: Tensor,
    ) -> None:
        """Adds what a part has made of hidden states to them, or to what the norm before it has
        made of them."""
        weights, residual = self._layers[layer], part.residual
        made = self.made(frame, weights, part.out_norm, *parts)
        if self._streams is not None:
            made_MD = self._sum(frame, *made)
            self._streams.spread(frame, x_MD, weights, part.norm, made_MD)
            return
        if residual.mixing is not None:
            made_MD = self._sum(frame, *made)
            mix(frame, x_MD, made_MD, weights[part.share], residual.mixing)
            return
        if residual.keeps_normed:
            x_MD.copy_(normed_MD)
        if residual.kept != 1:
            x_MD.mul_(residual.kept)
        self._elementwise.add(frame, x_MD, *made, scale=residual.added)

    def _sum(self, frame: Frame, *parts: Tensor) -> Tensor:
        """That of parts [M, D] or [M, K, D], which may be the only one."""
        is_sum = len(parts) == 1 and parts[0].dim() == 2
        return parts[0] if is_sum else self._elementwise.sum(frame, *parts)


def mix(frame: Frame, x_MD: Tensor, made_MD: Tensor, share_D: Tensor, mixing: Mixing) -> None:
    """Hidden states with what has been made, whose shares are known, in place; rounded once."""
    mixed_MD = frame.branch().take_float(*x_MD.shape).copy_(x_MD)
    kept_D = torch.rsub(share_D.square(), 1).clamp_(min=mixing.least).sqrt_()
    mixed_MD.mul_(kept_D)
    x_MD.copy_(mixed_MD.addcmul_(made_MD, share_D))
