"""Attention of an encoder and of the layers behind it.

Shape letters: T tokens of the micro-batch, N rows after bucketing, D hidden, W all heads side by
side, H heads, C head size, S positions, B decoding sequences, Q queries of a block, X distances.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.layout.scratch import bucket_positions
from moebatch.model.attention.by_torch import LayerKv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.gathering import Gathered
from moebatch.model.attention.stack_plan import AnswerSlice, StackPlan
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.products import Weights
from moebatch.model.scratch import Frame
from moebatch.spec.model.grouped_attention import BIASED_PAIRS, RelativeAttention
from moebatch.spec.model.shape import ModelShape


class StackedAttention:
    """Tokens of a prompt attend to all of it in layers that encode, and leave keys and values of
    what they are encoded as in the others; there tokens of answers attend to each other, and then
    to these. A layer of the other kind leaves a micro-batch as it is."""

    def __init__(
        self, shape: ModelShape, of_all: Weights, operators: Operators, core: AttentionCore
    ) -> None:
        """`of_all` are the weights that no layer owns. Keys and values are read through `core`."""
        assert isinstance(shape.attention, RelativeAttention), "that of encoders"
        self._shape, self._attention = shape, shape.attention
        self._encoder_norm_D = of_all["encoder_norm"]
        self._products, self._elementwise = operators
        self._core = core
        self._prompt_bias_HX = _by_distance(shape.attention, of_all["encoder_bias"], ahead=True)
        self._answer_bias_HX = _by_distance(shape.attention, of_all["decoder_bias"], ahead=False)

    def attend(self, work: LayerWork) -> None:
        """Adds attention to the input of the layer, which is not normed, in place, and writes what
        is new into its cache."""
        plan = work.micro_batch.stacks
        assert plan is not None, "that of a model with an encoder"
        if self._shape.encodes(work.layer):
            if plan.encodes:
                self._encode(work, plan)
            return
        kv = self._core.layer_kv(work.layer, work.parts)
        if plan.encodes:
            self._keep(work, plan, kv)
            return
        self._attend_own(work, plan, kv)
        self._attend_encoded(work, plan, kv)

    # --- prompts --------------------------------------------------------------------------------

    def _encode(self, work: LayerWork, plan: StackPlan) -> None:
        frame = work.frame.branch()
        q_NHC, k_NHC, v_NHC = self._projected(frame, work, work.weights["input_norm"], "qkv")
        out_NHC = frame.take(*q_NHC.shape)
        for rows in plan.prompts:
            length = rows.stop - rows.start
            positions_S = torch.arange(bucket_positions(length), device=q_NHC.device)
            for block in _blocks(length):
                back_QS = positions_S[block, None] - positions_S
                bias_HQS = self._bias(frame.branch(), self._prompt_bias_HX, back_QS)
                queries = slice(rows.start + block.start, rows.start + block.stop)
                out_NHC[queries] = _attended(
                    q_NHC[queries], k_NHC[rows], v_NHC[rows], bias_HQS[..., :length]
                )
        self._add_projected(frame, work, out_NHC, "o")

    def _keep(self, work: LayerWork, plan: StackPlan, kv: LayerKv) -> None:
        """Keys and values of what tokens are encoded as."""
        frame, tokens = work.frame.branch(), slice(work.num_tokens)
        k_NHC, v_NHC = self._projected(frame, work, self._encoder_norm_D, "cross_kv")
        kv.write(plan.new_rows_T, (k_NHC[tokens], v_NHC[tokens]))

    # --- answers --------------------------------------------------------------------------------

    def _attend_own(self, work: LayerWork, plan: StackPlan, kv: LayerKv) -> None:
        frame, tokens = work.frame.branch(), slice(work.num_tokens)
        q_NHC, k_NHC, v_NHC = self._projected(frame, work, work.weights["input_norm"], "qkv")
        kv.write(plan.new_rows_T, (k_NHC[tokens], v_NHC[tokens]))
        out_NHC = frame.take(*q_NHC.shape)
        for group in plan.own:
            bias_HBS = self._bias(frame.branch(), self._answer_bias_HX, group.back_BS)
            _attend_gathered(q_NHC, group, kv, bias_HBS.transpose(0, 1)[:, :, None], out_NHC)
        for one in plan.slices:
            self._attend_slice(frame, q_NHC[one.tokens], one, kv, out_NHC[one.tokens])
        self._add_projected(frame, work, out_NHC, "o")

    def _attend_slice(
        self, frame: Frame, q_QHC: Tensor, one: AnswerSlice, kv: LayerKv, out_QHC: Tensor
    ) -> None:
        keys, values = kv.read(one.own_S)
        num_seen, num_queries = len(one.own_S), len(q_QHC)
        positions_S = torch.arange(bucket_positions(num_seen), device=q_QHC.device)
        for block in _blocks(num_queries, num_seen):
            at = slice(num_seen - num_queries + block.start, num_seen - num_queries + block.stop)
            back_QS = (positions_S[at, None] - positions_S).clamp_(min=-1)
            bias_HQS = self._bias(frame.branch(), self._answer_bias_HX, back_QS)
            out_QHC[block] = _attended(q_QHC[block], keys, values, bias_HQS[..., :num_seen])

    def _attend_encoded(self, work: LayerWork, plan: StackPlan, kv: LayerKv) -> None:
        frame = work.frame.branch()
        (q_NHC,) = self._projected(frame, work, work.weights["cross_norm"], "cross_q")
        out_NHC = frame.take(*q_NHC.shape)
        for group in plan.encoded:
            _attend_gathered(q_NHC, group, kv, group.mask_B11S(q_NHC.dtype), out_NHC)
        for one in plan.slices:
            keys, values = kv.read(one.prompt_S)
            out_NHC[one.tokens] = _attended(q_NHC[one.tokens], keys, values, None)
        self._add_projected(frame, work, out_NHC, "cross_o")

    # --- what they have in common ---------------------------------------------------------------

    def _projected(
        self, frame: Frame, work: LayerWork, norm_D: Tensor, role: str
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of the layer's input through that norm, or some of them,
        [N, H, C] each; rows beyond the micro-batch hold garbage."""
        x_TD, eps = work.normed_ND, self._shape.rms_eps
        normed_ND = frame.take(self._products.rows(len(x_TD)), x_TD.shape[1])
        self._elementwise.norm(frame, x_TD, norm_D, eps, normed_ND[: len(x_TD)])
        together = self._products.of_role(frame, normed_ND, work.weights, role)
        heads_NXC = together.view(len(normed_ND), -1, self._attention.head_dim)
        return heads_NXC.tensor_split(heads_NXC.shape[1] // self._attention.num_heads, dim=1)

    def _bias(self, frame: Frame, bias_HX: Tensor, back: Tensor) -> Tensor:
        """What is added to scores, [H, …], for keys that are so far back."""
        most = self._attention.max_distance
        least = most + 1 - bias_HX.shape[1]
        places = back.clamp(least, most).sub_(least).flatten()
        room = frame.take(len(bias_HX), len(places))
        return torch.index_select(bias_HX, 1, places, out=room).view(len(bias_HX), *back.shape)

    def _add_projected(self, frame: Frame, work: LayerWork, out_NHC: Tensor, role: str) -> None:
        added_ND = self._products.of_role(frame, out_NHC.flatten(1), work.weights, role)
        self._elementwise.add(frame, work.normed_ND, added_ND[: work.num_tokens])


def _by_distance(attention: RelativeAttention, table_BH: Tensor, *, ahead: bool) -> Tensor:
    """What is added to scores of each head, [H, X]: for keys up to the largest distance `ahead` of
    a query, in order, to as far back; or from -1, which is not seen, on back."""
    most, num_buckets = attention.max_distance, attention.num_buckets
    back_X = torch.arange(-most if ahead else -1, most + 1)
    if not ahead:
        buckets_X = _buckets(back_X.clamp(min=0), num_buckets, most)
    else:
        half = num_buckets // 2
        buckets_X = _buckets(back_X.abs(), half, most) + half * (back_X < 0)
    bias_HX = table_BH[buckets_X.to(table_BH.device)].T.contiguous()
    if not ahead:
        bias_HX[:, 0] = -torch.inf
    return bias_HX


def _buckets(distance_X: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Half of the buckets are for one distance each, from 0 on; the others for ranges that grow
    with their logarithm, up to the largest distance (Raffel et al. 2020, section 2.1). Rounded as
    transformers does."""
    exact = num_buckets // 2
    ratio_X = torch.log(distance_X.float() / exact) / math.log(max_distance / exact)
    far_X = exact + (ratio_X * (num_buckets - exact)).clamp(min=0).long()
    return torch.where(distance_X < exact, distance_X, far_X.clamp(max=num_buckets - 1))


def _blocks(num_queries: int, num_seen: int | None = None) -> list[slice]:
    """Queries whose scores are biased at a time."""
    step = max(1, BIASED_PAIRS // bucket_positions(num_seen or num_queries))
    starts = range(0, num_queries, step)
    return [slice(start, min(start + step, num_queries)) for start in starts]


def _attended(q_QHC: Tensor, k_SHC: Tensor, v_SHC: Tensor, bias_HQS: Tensor | None) -> Tensor:
    q_HQC, k_HSC, v_HSC = (x.transpose(0, 1)[None] for x in (q_QHC, k_SHC, v_SHC))
    mask = None if bias_HQS is None else bias_HQS[None]
    out = F.scaled_dot_product_attention(q_HQC, k_HSC, v_HSC, attn_mask=mask, scale=1.0)
    return out[0].transpose(0, 1)


def _attend_gathered(
    q_NHC: Tensor, group: Gathered, kv: LayerKv, mask: Tensor, out_NHC: Tensor
) -> None:
    """One query of each sequence; `mask` is added to scores, [B, H or 1, 1, S]."""
    k_BHSC, v_BHSC = kv.gather(group.rows_BS)
    q_BH1C = q_NHC.index_select(0, group.tokens_B)[:, :, None]
    out = F.scaled_dot_product_attention(q_BH1C, k_BHSC, v_BHSC, attn_mask=mask, scale=1.0)
    out_NHC.index_copy_(0, group.tokens_B, out[:, :, 0])
