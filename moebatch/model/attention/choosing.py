"""What tokens attend to that choose (DeepSeek Sparse Attention: DeepSeek-V3.2, section 2.1), or
which blocks of it (MiniMax-M3).

Shape letters: T tokens of the micro-batch, N rows after bucketing, S positions or what stands for
some of them, Q tokens of a sequence that choose together, K positions or blocks that are chosen, R
width of compressed queries, G heads of keys, H heads of the indexer, C their size, B what has keys:
positions, or pools of P each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.attention.core import AttentionCore
from moebatch.model.batch import Chooser
from moebatch.model.layer_work import LayerWork
from moebatch.model.layers import layer_norm
from moebatch.model.operators import Operators
from moebatch.model.products import Products, Weights
from moebatch.model.rope import Angles
from moebatch.model.scratch import Frame, chunks
from moebatch.spec.model.indexer import BlockIndexer, Indexer

Choose = Callable[[Frame, slice, Tensor, Tensor], Tensor]
"""Of some tokens of the micro-batch, which follow each other in a sequence, its keys [S, C] or
[B, C] and the tokens' positions [Q]: what they choose, [Q, G, K] in any order."""


def learnt_scales(frame: Frame, weights: Weights, role: str, logs_T11: Tensor) -> Tensor:
    """By what a `LearntTemperature` of that role multiplies queries, [T, H, 1], given logarithms of
    their positions."""
    scale_H, bias_H = weights[f"{role}_scale"], weights[f"{role}_scale_bias"]
    scales_TH = frame.take(len(logs_T11), len(scale_H))
    torch.mul(logs_T11[:, 0].to(scale_H.dtype), scale_H, out=scales_TH)
    return scales_TH.add_(bias_H)[:, :, None]


class IndexQueries(NamedTuple):
    """With what tokens choose."""

    q_THC: Tensor
    shares_TH: Tensor
    """By what they weigh heads."""

    def of(self, tokens: slice) -> "IndexQueries":
        """Views of some rows."""
        return IndexQueries(self.q_THC[tokens], self.shares_TH[tokens])


class IndexerBlock:
    """An indexer of a layer's own."""

    def __init__(
        self, indexer: Indexer, products: Products, rotate: Callable[[Tensor, Angles], None]
    ) -> None:
        """`rotate` turns what has positions of heads, [T, heads, C], in place."""
        self.most = indexer.most
        self._indexer, self._products, self._rotate = indexer, products, rotate

    def choose(self, work: LayerWork, compressed_NR: Tensor, core: AttentionCore) -> None:
        """Writes keys of new tokens into the layer's cache, behind its first part, and positions
        that tokens have chosen into the choices of the core; tokens that attend to all have
        none."""
        plan = core.plan_of(work.layer, work.micro_batch)
        kv = core.layer_kv(work.layer, work.parts[1:], first=1)
        kv.write(plan.new_rows_T, (self._keys(work),))
        if not plan.choosing:
            return
        queries = self.queries(work, compressed_NR)
        choices_T1K = core.choices(work.micro_batch)

        def chosen(frame: Frame, block: slice, keys_BC: Tensor, own_Q: Tensor) -> Tensor:
            pool = self._indexer.pool
            last_B = torch.arange(pool - 1, pool * len(keys_BC), pool, device=own_Q.device)
            chosen_QK = self.chosen(frame, queries.of(block), keys_BC, last_B > own_Q[:, None])
            if pool > 1:  # and those that have no pool yet
                chosen_QK = torch.cat([chosen_QK, (own_Q[:, None] + 1) // pool], 1)
            return chosen_QK[:, None]

        for chooser in plan.choosing:
            frame = work.frame.branch()
            cached_SX = kv.read(chooser.rows_S)[0][:, 0]
            keys_BC = self._scored(frame, cached_SX, work.weights)
            at_once = self._indexer.queries_at_once(len(keys_BC))
            _choose(frame, chooser, at_once, keys_BC, chosen, choices_T1K)

    def queries(self, work: LayerWork, compressed_NR: Tensor) -> IndexQueries:
        """Those of all tokens, of what attention has compressed or the layer sees, in room of the
        frame."""
        frame, weights, tokens = work.frame, work.weights, slice(work.num_tokens)
        if "index_seen_norm" in weights:
            seen_NR = frame.take(*compressed_NR.shape)
            self._norm(work, compressed_NR[tokens], "index_seen_norm", seen_NR[tokens])
            compressed_NR = seen_NR
        q_NX = self._products.of_role(frame, compressed_NR, weights, "index_q")
        q_THC = q_NX[tokens].view(work.num_tokens, self._indexer.num_heads, -1)
        if self._indexer.temperature is not None:
            logs_T11 = work.angles.query_scales_T11
            assert logs_T11 is not None, "queries of attention grow as well"
            q_THC.mul_(learnt_scales(frame, weights, "index", logs_T11))
        self._rotate(q_THC, work.angles)
        shares_NH = self._products.of_role(frame, work.normed_ND, weights, "index_weights")
        return IndexQueries(q_THC, shares_NH[tokens])

    def chosen(
        self, frame: Frame, queries: IndexQueries, keys_SC: Tensor, is_hidden_QS: Tensor
    ) -> Tensor:
        """Places of the best keys among those that are not hidden, [Q, K] in any order."""
        scores_QS = self._scores(frame, queries, keys_SC).masked_fill_(is_hidden_QS, -torch.inf)
        return scores_QS.topk(self.most // self._indexer.pool, sorted=False).indices

    def _keys(self, work: LayerWork) -> Tensor:
        """Of new tokens, [T, 1, C], or [T, 1, 2C] with what weighs them."""
        frame, weights = work.frame, work.weights
        keys_NC = self._products.of_role(frame, work.normed_ND, weights, "index_k")
        keys_TC = keys_NC[: work.num_tokens]
        self._norm(work, keys_TC, "index_k_norm", keys_TC)
        self._rotate(keys_TC[:, None], work.angles)
        if self._indexer.pool == 1:
            return keys_TC[:, None]
        weighing_NC = self._products.of_role(frame, work.normed_ND, weights, "index_pool_weight")
        both_T1X = frame.take(work.num_tokens, 1, self._indexer.cached_width)
        torch.cat([keys_TC, weighing_NC[: work.num_tokens]], 1, out=both_T1X[:, 0])
        return both_T1X

    def _scored(self, frame: Frame, cached_SX: Tensor, weights: Weights) -> Tensor:
        """Keys of what is chosen from, [B, C]: of pools that are full, or of positions."""
        pool, size = self._indexer.pool, self._indexer.head_dim
        if pool == 1:
            return cached_SX
        num_pools = len(cached_SX) // pool
        cached_BPX = cached_SX[: num_pools * pool].view(num_pools, pool, -1)
        shares_BPC = frame.take_float(num_pools, pool, size)
        shares_BPC.copy_(cached_BPX[..., size:]).add_(weights["index_pool_bias"])
        shares_BPC.sub_(shares_BPC.amax(1, keepdim=True)).exp_()
        shares_BPC.div_(shares_BPC.sum(1, keepdim=True)).mul_(cached_BPX[..., :size])
        keys_BC = frame.take_float(num_pools, size)
        torch.sum(shares_BPC, 1, out=keys_BC)
        return frame.take(num_pools, size).copy_(keys_BC)

    def _norm(self, work: LayerWork, x_TX: Tensor, role: str, out_TX: Tensor) -> None:
        norm, bias = work.weights[role], work.weights[f"{role}_bias"]
        room = work.frame.branch().take_float(*x_TX.shape)
        layer_norm(x_TX, norm, bias, self._indexer.eps, room, out_TX)

    def _scores(self, frame: Frame, queries: IndexQueries, keys_SC: Tensor) -> Tensor:
        """What each gives all that has keys (Eq. 1), [Q, S] in float32; not scaled, since their
        order alone matters. Products of bfloat16 are rounded as all others are; DeepSeek's own
        kernel takes them of FP8. float16 has no room for products, nor for their sums."""
        q_QHC, shares_QH = queries
        num_queries, num_heads, _ = q_QHC.shape
        by_head_QHS = frame.take_float(num_queries, num_heads, len(keys_SC))
        if q_QHC.dtype == torch.float16:
            q_QHC, keys_SC = (frame.take_float(*x.shape).copy_(x) for x in (q_QHC, keys_SC))
            torch.mm(q_QHC.flatten(0, 1), keys_SC.T, out=by_head_QHS.flatten(0, 1))
        else:
            rounded_QHS = frame.take(*by_head_QHS.shape)
            self._products.linear(q_QHC.flatten(0, 1), keys_SC, None, rounded_QHS.flatten(0, 1))
            by_head_QHS.copy_(rounded_QHS)
        shares_Q1H = frame.take_float(num_queries, 1, num_heads).copy_(shares_QH[:, None])
        summed_Q1S = frame.take_float(num_queries, 1, len(keys_SC))
        return torch.bmm(shares_Q1H, by_head_QHS.relu_(), out=summed_Q1S)[:, 0]


class BlockIndexerBlock:
    """An indexer that chooses blocks of tokens, for each head of keys by itself."""

    def __init__(self, indexer: BlockIndexer, operators: Operators, eps: float) -> None:
        self._indexer, self._eps = indexer, eps
        self._products, self._elementwise = operators

    def choose(self, work: LayerWork, core: AttentionCore) -> None:
        """Writes keys of new tokens into the layer's cache, behind its keys and values, and blocks
        that tokens have chosen into the choices of the core; tokens that attend to all have
        none."""
        plan = core.plan_of(work.layer, work.micro_batch)
        kv = core.layer_kv(work.layer, work.parts[2:], first=2)
        kv.write(plan.new_rows_T, (self._projected(work, "index_k"),))
        if not plan.choosing:
            return
        q_THC = self._projected(work, "index_q")
        choices_TGK = core.choices(work.micro_batch)

        def chosen(frame: Frame, block: slice, keys_SC: Tensor, own_Q: Tensor) -> Tensor:
            return self._chosen(frame, q_THC[block], keys_SC, own_Q)

        for chooser in plan.choosing:
            at_once = self._indexer.queries_at_once(chooser.num_seen)
            keys_SC = kv.read(chooser.rows_S)[0][:, 0]
            _choose(work.frame.branch(), chooser, at_once, keys_SC, chosen, choices_TGK)

    def _projected(self, work: LayerWork, role: str) -> Tensor:
        """Normed and rotated heads of all tokens, [T, heads, C], in room of the frame."""
        y_NX = self._products.of_role(work.frame, work.normed_ND, work.weights, role)
        y_THC = y_NX[: work.num_tokens].view(work.num_tokens, -1, self._indexer.head_dim)
        self._elementwise.norm(work.frame, y_THC, work.weights[f"{role}_norm"], self._eps)
        self._elementwise.rotate(y_THC, work.angles.cos_TR, work.angles.sin_TR)
        return y_THC

    def _chosen(self, frame: Frame, q_QHC: Tensor, keys_SC: Tensor, own_Q: Tensor) -> Tensor:
        """Numbers of the best blocks of each head, [Q, H, K], that of the token itself among
        them."""
        size, num_seen = self._indexer.block_tokens, len(keys_SC)
        num_blocks, (num_queries, num_heads, _) = -(-num_seen // size), q_QHC.shape
        floats = [frame.take_float(*x.shape).copy_(x) for x in (q_QHC, keys_SC)]
        scores_QHS = frame.take_float(num_queries, num_heads, num_blocks * size)
        seen_QHS = scores_QHS[..., :num_seen]
        torch.matmul(floats[0], floats[1].T, out=seen_QHS)
        scores_QHS[..., num_seen:] = -torch.inf
        is_later_QS = torch.arange(num_seen, device=own_Q.device) > own_Q[:, None]
        seen_QHS.masked_fill_(is_later_QS[:, None], -torch.inf)
        best_QHK = frame.take_float(num_queries, num_heads, num_blocks)
        torch.amax(scores_QHS.view(*best_QHK.shape, size), -1, out=best_QHK)
        back_QK = own_Q[:, None] // size - torch.arange(num_blocks, device=own_Q.device)
        is_last_QK = (back_QK >= 0) & (back_QK < self._indexer.num_last)
        best_QHK.masked_fill_(is_last_QK[:, None], torch.inf)
        return best_QHK.topk(self._indexer.num_blocks, sorted=False).indices


def _choose(
    frame: Frame, chooser: Chooser, at_once: int, keys: Tensor, chosen: Choose, choices_TGK: Tensor
) -> None:
    """Of one sequence, so many tokens at once."""
    for block in chunks(at_once, chooser.tokens):
        first = chooser.num_before + block.start - chooser.tokens.start
        own_Q = torch.arange(first, first + block.stop - block.start, device=keys.device)
        choices_TGK[block] = chosen(frame.branch(), block, keys, own_Q).sort().values
