"""Hidden states in several streams (manifold-constrained hyper-connections: Xie et al. 2026;
DeepSeek-V4, section 2.2).

Shape letters: T tokens, N streams, D hidden, S numbers of a token in all streams, M numbers of a
mix.
"""

import torch
from torch import Tensor

from moebatch.model.layers import by_root_mean_square
from moebatch.model.products import Weights
from moebatch.model.scratch import Frame
from moebatch.spec.model.shape import ModelShape


class StreamMixer:
    """Makes one hidden state of several for a part of a layer, and spreads what that makes."""

    def __init__(self, shape: ModelShape) -> None:
        assert shape.streams is not None, "hidden states have several"
        self._streams, self._eps = shape.streams, shape.rms_eps

    def merged(self, frame: Frame, x_TS: Tensor, weights: Weights, role: str) -> Tensor:
        """What the norm of that role sees, [T, D] float32."""
        num_streams = self._streams.count
        sum_T1D = frame.take_float(len(x_TS), 1, x_TS.shape[1] // num_streams)
        if f"{role}_streams" not in weights:
            x_TND = x_TS.view(len(x_TS), num_streams, -1)
            return torch.mean(x_TND, 1, dtype=torch.float32, out=sum_T1D[:, 0])
        mix_TM = self._mix(frame.branch(), x_TS, weights, role)
        pre_TN = self._scaled(mix_TM, weights, role, 0, slice(num_streams))
        pre_TN.sigmoid_().add_(self._streams.eps)
        x32_TND = (
            frame.branch().take_float(*x_TS.shape).copy_(x_TS).view(len(x_TS), num_streams, -1)
        )
        torch.bmm(pre_TN[:, None], x32_TND, out=sum_T1D)
        return sum_T1D[:, 0]

    def spread(
        self,
        frame: Frame,
        x_TS: Tensor,
        weights: Weights,
        role: str,
        made_TD: Tensor,
    ) -> None:
        """Mixes streams, and adds to each its share of what the part has made, in place. They have
        to be as they were when the part saw them. Those that are not mixed are rounded once."""
        streams = self._streams
        count, x_TND = streams.count, x_TS.view(len(x_TS), streams.count, -1)
        mix_TM = self._mix(frame.branch(), x_TS, weights, role)
        post_TN = self._scaled(mix_TM, weights, role, 1, slice(count, 2 * count))
        post_TN.sigmoid_().mul_(streams.magnitude)
        if streams.num_balancings is None:
            post_TN.add_(streams.least_share)
            sum_TND = frame.branch().take_float(*x_TND.shape).copy_(x_TND)
        else:
            comb_TM = self._scaled(mix_TM, weights, role, 2, slice(2 * count, None))
            comb_TNN = self._balanced(comb_TM.view(-1, count, count), streams.num_balancings)
            sum_TND = frame.branch().take(*x_TND.shape)
            torch.bmm(comb_TNN.to(x_TS.dtype).mT, x_TND, out=sum_TND)
        sum_TND.addcmul_(post_TN.to(sum_TND.dtype)[..., None], made_TD[:, None])
        x_TND.copy_(sum_TND)

    def _balanced(self, comb_TNN: Tensor, num_balancings: int) -> Tensor:
        """How streams are mixed, with rows and columns that sum to one or nearly so."""
        eps = self._streams.eps
        comb_TNN = comb_TNN.softmax(dim=-1).add_(eps)
        comb_TNN /= comb_TNN.sum(dim=-2, keepdim=True) + eps
        for _ in range(num_balancings - 1):
            comb_TNN /= comb_TNN.sum(dim=-1, keepdim=True) + eps
            comb_TNN /= comb_TNN.sum(dim=-2, keepdim=True) + eps
        return comb_TNN

    def _mix(self, frame: Frame, x_TS: Tensor, weights: Weights, role: str) -> Tensor:
        """What the streams of each token say of how they are to be mixed, [T, M], float32."""
        x32_TS = frame.take_float(*x_TS.shape).copy_(x_TS)
        return by_root_mean_square(x32_TS, self._eps) @ weights[f"{role}_streams"].T

    @staticmethod
    def _scaled(mix_TM: Tensor, weights: Weights, role: str, number: int, columns: slice) -> Tensor:
        scale, base_M = weights[f"{role}_streams_scale"], weights[f"{role}_streams_base"]
        return mix_TM[:, columns] * scale[number] + base_M[columns]
