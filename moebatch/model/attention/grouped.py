"""The projections of attention whose query heads share heads of keys and values.

Shape letters: N rows after bucketing, D hidden, H query heads, C head size, V that of values.
"""

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import Qkv
from moebatch.model.attention.choosing import BlockIndexerBlock
from moebatch.model.attention.core import AttentionCore
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.products import Products
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import ModelShape


class GroupedAttentionBlock:
    """With or without biases, norms of queries and keys, and a limit of what is projected."""

    def __init__(
        self, shape: ModelShape, attention: Attention, operators: Operators, core: AttentionCore
    ) -> None:
        assert isinstance(attention, GroupedAttention), "the family's own attention"
        self._attention, self._eps = attention, shape.rms_eps
        self._products, self._elementwise = operators
        self._core = core
        self._indexer = None
        if attention.indexer is not None:
            self._indexer = BlockIndexerBlock(attention.indexer, operators, self._eps)
        plain = {"q", "k"} if attention.qk_norm == "unscaled" else set[str]()
        self._unscaled = plain | ({"v"} if attention.norms_values else set())
        self._ones_C = torch.ones(attention.head_dim, device=operators.device)
        self._ones_V = torch.ones(attention.cached_value_dim, device=operators.device)

    def project(self, work: LayerWork) -> Qkv:
        """Rotated queries and keys, and values; rows beyond the micro-batch hold garbage."""
        qkv, num_tokens = self._unrotated(work), work.num_tokens
        angles = work.angles
        for y_NHC in (qkv.q_THC, qkv.parts[0]) if self._attention.rotary_dim else ():
            self._elementwise.rotate(y_NHC[:num_tokens], angles.cos_TR, angles.sin_TR)
        if self._attention.norms_rotated:
            self._norm(work, qkv)
        if angles.query_scales_T11 is not None:
            qkv.q_THC[:num_tokens].mul_(angles.query_scales_T11)
        return qkv

    def output(self, work: LayerWork, out_NHV: Tensor) -> Tensor:
        """What attention adds to the hidden states, [N, D]."""
        if self._attention.norms_results:
            result_THV = out_NHV[: work.num_tokens]
            self._elementwise.norm(work.frame, result_THV, self._ones_V, self._eps)
        return put_out(work, self._attention, out_NHV, self._products)

    def attend(self, work: LayerWork) -> Tensor:
        """All of it, where the core and the cache are on the device of the weights."""
        qkv = self.project(work)
        if self._indexer is not None:
            self._indexer.choose(work, self._core)
        out_NHV = work.frame.take(*qkv.q_THC.shape[:2], self._attention.cached_value_dim)
        self._core.attend(work.layer, qkv, work.micro_batch, work.parts[:2], out_NHV)
        return self.output(work, out_NHV)

    def _unrotated(self, work: LayerWork) -> Qkv:
        attention, frame, num_tokens = self._attention, work.frame, work.num_tokens
        roles = "qk" if attention.values_are_keys else "qkv"
        together = self._products.of_role(frame, work.normed_ND, work.weights, roles)
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
            self._norm(work, qkv)
        if attention.clip_qkv is not None:
            together.clamp_(-attention.clip_qkv, attention.clip_qkv)
        return qkv

    def _norm(self, work: LayerWork, qkv: Qkv) -> None:
        """Norms queries and keys, and perhaps values, in place."""
        for role, y_NHC in zip("qkv", qkv.tensors, strict=True):
            norm = self._ones_C if role in self._unscaled else work.weights.get(f"{role}_norm")
            if norm is not None:
                is_full = self._attention.qk_norm == "full" and role != "v"
                normed = (y_NHC.flatten(1) if is_full else y_NHC)[: work.num_tokens]
                self._elementwise.norm(work.frame, normed, norm, self._eps)


def put_out(
    work: LayerWork,
    attention: Attention,
    out_NHV: Tensor,
    products: Products,
    gate_NX: Tensor | None = None,
) -> Tensor:
    """What attention adds to the hidden states, [N, D], of what it has made, which becomes
    anything: weighed by gates where it has such, each number by its own (Qwen3-Next) or all of a
    head by one (Step-3.5), and projected. Its input opens them, unless what does is given, which
    becomes anything as well."""
    if attention.output_gate is not None:
        if gate_NX is None:
            frame = work.frame.branch()
            gate_NX = products.of_role(frame, work.normed_ND, work.weights, "output_gate")
        if attention.has_gate_biases:
            bias_H1 = work.weights["head_gate_bias"][:, None]
            gate_NX.view(len(gate_NX), len(bias_H1), -1).add_(bias_H1)
        if attention.output_gate == "softplus":
            torch.logaddexp(gate_NX, gate_NX.new_zeros(()), out=gate_NX)
        else:
            gate_NX.sigmoid_()
        out_NHV.mul_(gate_NX.view(*out_NHV.shape[:2], -1))
    return products.of_role(work.frame, out_NHV.flatten(1), work.weights, "o")
