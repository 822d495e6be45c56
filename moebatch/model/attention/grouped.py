"""The projections of attention whose query heads share heads of keys and values.

Shape letters: N rows after bucketing, D hidden, H query heads, C head size, V that of values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import Parts, Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.batch import MicroBatch
from moebatch.model.elementwise import Elementwise
from moebatch.model.products import Products
from moebatch.model.scratch import Frame
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import ModelShape


class GroupedAttentionBlock:
    """With or without biases, norms of queries and keys, and a limit of what is projected."""

    def __init__(
        self, shape: ModelShape, attention: Attention, products: Products, elementwise: Elementwise
    ) -> None:
        assert isinstance(attention, GroupedAttention), "the family's own attention"
        self._attention = attention
        self._eps = shape.rms_eps
        self._products = products
        self._elementwise = elementwise
        plain = {"q", "k"} if attention.qk_norm == "unscaled" else set[str]()
        self._unscaled = plain | ({"v"} if attention.norms_values else set())
        self._ones_C = torch.ones(attention.head_dim, device=products.device)

    def project(
        self,
        frame: Frame,
        normed_ND: Tensor,
        micro_batch: MicroBatch,
        weights: Mapping[str, Tensor],
    ) -> Qkv:
        """Rotated queries and keys, and values; rows beyond the micro-batch hold garbage."""
        num_tokens = micro_batch.num_tokens
        qkv = self._unrotated(frame, normed_ND, num_tokens, weights)
        cos_TR, sin_TR, query_scales_T11 = micro_batch.angles[self._attention]
        for y_NHC in (qkv.q_THC, qkv.parts[0]) if self._attention.rotary_dim else ():
            self._elementwise.rotate(y_NHC[:num_tokens], cos_TR, sin_TR)
        if self._attention.norms_rotated:
            self._norm(frame, qkv, num_tokens, weights)
        if query_scales_T11 is not None:
            qkv.q_THC[:num_tokens].mul_(query_scales_T11)
        return qkv

    def output(
        self, frame: Frame, normed_ND: Tensor, out_NHV: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """What attention adds to the hidden states, [N, D]."""
        gate_output(frame.branch(), self._attention, normed_ND, out_NHV, weights, self._products)
        return self._products.of_role(frame, out_NHV.flatten(1), weights, "o")

    def attend(
        self,
        frame: Frame,
        layer: int,
        normed_ND: Tensor,
        micro_batch: MicroBatch,
        weights: Mapping[str, Tensor],
        core: AttentionCore,
        parts: Parts,
    ) -> Tensor:
        """All of it, where the core and the cache are on the device of the weights."""
        qkv = self.project(frame, normed_ND, micro_batch, weights)
        out_NHV = frame.take(*qkv.q_THC.shape[:2], self._attention.cached_value_dim)
        core.attend(layer, qkv, micro_batch, parts, out_NHV)
        return self.output(frame, normed_ND, out_NHV, weights)

    def _unrotated(
        self, frame: Frame, normed_ND: Tensor, num_tokens: int, weights: Mapping[str, Tensor]
    ) -> Qkv:
        attention = self._attention
        roles = "qk" if attention.values_are_keys else "qkv"
        together = self._products.of_role(frame, normed_ND, weights, roles)
        widths = (attention.query_width, attention.kv_width, attention.value_width)
        sizes = (attention.head_dim, attention.head_dim, attention.cached_value_dim)
        parts = [*torch.split(together, list(widths[: len(roles)]), dim=1)]
        if attention.values_are_keys:
            parts.append(frame.take(*parts[1].shape).copy_(parts[1]))
        q_NHC, *kv = (y.view(len(y), -1, size) for y, size in zip(parts, sizes, strict=True))
        qkv = Qkv(q_NHC, tuple(kv))
        if attention.value_scale != 1:
            kv[1][:num_tokens].mul_(attention.value_scale)
        if not attention.norms_rotated:
            self._norm(frame, qkv, num_tokens, weights)
        if attention.clip_qkv is not None:
            together.clamp_(-attention.clip_qkv, attention.clip_qkv)
        return qkv

    def _norm(self, frame: Frame, qkv: Qkv, num_tokens: int, weights: Mapping[str, Tensor]) -> None:
        """Norms queries and keys, and perhaps values, in place."""
        for role, y_NHC in zip("qkv", qkv.tensors, strict=True):
            norm = self._ones_C if role in self._unscaled else weights.get(f"{role}_norm")
            if norm is not None:
                is_full = self._attention.qk_norm == "full" and role != "v"
                normed = (y_NHC.flatten(1) if is_full else y_NHC)[:num_tokens]
                room = frame.branch().take_float(normed.numel())
                self._elementwise.rms_norm(normed, norm, self._eps, room, normed)


def gate_output(
    frame: Frame,
    attention: Attention,
    normed_ND: Tensor,
    out_NHC: Tensor,
    weights: Mapping[str, Tensor],
    products: Products,
) -> None:
    """Weighs what attention puts out by gates that its input opens, in place, where it has such:
    each number by its own (Qwen3-Next), or all of a head by one (Step-3.5)."""
    if attention.output_gate is None:
        return
    gate_NX = products.of_role(frame, normed_ND, weights, "output_gate")
    if attention.output_gate == "softplus":
        torch.logaddexp(gate_NX, gate_NX.new_zeros(()), out=gate_NX)
    else:
        gate_NX.sigmoid_()
    out_NHC.mul_(gate_NX.view(*out_NHC.shape[:2], -1))
