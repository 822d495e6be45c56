"""What tokens attend to that choose (DeepSeek Sparse Attention: DeepSeek-V3.2, section 2.1).

Shape letters: T tokens of the micro-batch, N rows after bucketing, S positions, Q tokens of a
sequence that choose together, K chosen positions, D hidden, R width of compressed queries, H heads
of the indexer, C their size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import LayerKv
from moebatch.model.batch import Chooser, WindowPlan
from moebatch.model.elementwise import Elementwise
from moebatch.model.layers import layer_norm
from moebatch.model.products import Products
from moebatch.model.rope import Angles
from moebatch.model.scratch import Frame, chunks
from moebatch.spec.model.indexer import Indexer


class IndexerBlock:
    """An indexer of a layer's own."""

    def __init__(self, indexer: Indexer, products: Products, elementwise: Elementwise) -> None:
        self._indexer = indexer
        self._products, self._elementwise = products, elementwise

    def choose(
        self,
        frame: Frame,
        normed_ND: Tensor,
        compressed_NR: Tensor,
        angles: Angles,
        plan: WindowPlan,
        weights: Mapping[str, Tensor],
        kv: LayerKv,
        choices_TK: Tensor,
    ) -> None:
        """Writes keys of new tokens into the indexer's cache, `kv`, and positions that tokens have
        chosen into their rows of `choices_TK`; tokens that attend to all have none."""
        num_tokens, num_heads = len(choices_TK), self._indexer.num_heads
        keys_TC = self._products.of_role(frame, normed_ND, weights, "index_k")[:num_tokens]
        norm, bias = weights["index_k_norm"], weights["index_k_norm_bias"]
        room = frame.branch().take_float(*keys_TC.shape)
        layer_norm(keys_TC, norm, bias, self._indexer.eps, room, keys_TC)
        self._rotate(keys_TC[:, None], angles)
        kv.write(plan.new_rows_T, (keys_TC[:, None],))
        if not plan.choosing:
            return
        queries = self._products.of_role(frame, compressed_NR, weights, "index_q")
        q_THC = queries[:num_tokens].view(num_tokens, num_heads, -1)
        self._rotate(q_THC, angles)
        shares_TH = self._products.of_role(frame, normed_ND, weights, "index_weights")
        for chooser in plan.choosing:
            self._choose(frame.branch(), chooser, q_THC, shares_TH, kv, choices_TK)

    def _rotate(self, x_THC: Tensor, angles: Angles) -> None:
        rotating = x_THC[..., self._indexer.head_dim - self._indexer.rotary_dim :]
        self._elementwise.rotate(rotating, angles.cos_TR, angles.sin_TR)

    def _choose(
        self,
        frame: Frame,
        chooser: Chooser,
        q_THC: Tensor,
        shares_TH: Tensor,
        kv: LayerKv,
        choices_TK: Tensor,
    ) -> None:
        """Of one sequence."""
        num_seen = len(chooser.rows_S)
        keys_SC = index_keys(frame, kv.read(chooser.rows_S)[0][:, 0])
        positions_S = torch.arange(num_seen, device=keys_SC.device)
        for block in chunks(self._indexer.queries_at_once(num_seen), chooser.tokens):
            queries = q_THC[block], shares_TH[block]
            scores_QS = index_scores(frame.branch(), self._products, *queries, keys_SC)
            first = chooser.num_before + block.start - chooser.tokens.start
            own_Q1 = positions_S[first : first + len(scores_QS), None]
            scores_QS.masked_fill_(positions_S > own_Q1, -torch.inf)
            chosen_QK = scores_QS.topk(self._indexer.most, sorted=False).indices
            choices_TK[block] = chosen_QK.sort().values


def index_keys(frame: Frame, keys_SC: Tensor) -> Tensor:
    """Keys as they are scored: float16 has no room for products, nor for their sums."""
    if keys_SC.dtype != torch.float16:
        return keys_SC
    return frame.take_float(*keys_SC.shape).copy_(keys_SC)


def index_scores(
    frame: Frame, products: Products, q_QHC: Tensor, shares_QH: Tensor, keys_SC: Tensor
) -> Tensor:
    """What an indexer gives all that has `index_keys` (Eq. 1), [Q, S] in float32; not scaled, since
    their order alone matters. Products of bfloat16 are rounded as all others are; DeepSeek's own
    kernel takes them of FP8."""
    num_queries, num_heads, _ = q_QHC.shape
    by_head_QHS = frame.take_float(num_queries, num_heads, len(keys_SC))
    if keys_SC.dtype == q_QHC.dtype:
        rounded_QHS = frame.take(*by_head_QHS.shape)
        products.linear(q_QHC.flatten(0, 1), keys_SC, None, rounded_QHS.flatten(0, 1))
        by_head_QHS.copy_(rounded_QHS)
    else:
        q_QHC = frame.take_float(*q_QHC.shape).copy_(q_QHC)
        torch.mm(q_QHC.flatten(0, 1), keys_SC.T, out=by_head_QHS.flatten(0, 1))
    shares_Q1H = frame.take_float(num_queries, 1, num_heads).copy_(shares_QH[:, None])
    summed_Q1S = frame.take_float(num_queries, 1, len(keys_SC))
    return torch.bmm(shares_Q1H, by_head_QHS.relu_(), out=summed_Q1S)[:, 0]
