"""Whether the kernels of a GPU compute what torch does there: asked once, before they are used.

Shape letters: T tokens, K experts per token, D hidden, F expert width, E experts.
"""

import math
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model import layers
from moebatch.model.gpu.attention import SingleAttention
from moebatch.model.gpu.experts import GroupedExpert, GroupedExperts
from moebatch.model.gpu.rows import GpuRows
from moebatch.model.native.attention_work import Cached, SingleQueries
from moebatch.model.native.scoring import Scoring
from moebatch.model.rope import rotate
from moebatch.model.routing.router import ExpertTokens, Routing, group_by_expert
from moebatch.model.scratch import Frame

_TOKENS, _CHOICES, _HIDDEN, _WIDTH, _EXPERTS = 24, 2, 144, 80, 4
_HEAD = 64
_ERRORS = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""By which results of order one may differ, whatever order sums run in."""


def differences(device: torch.device) -> str | None:
    """In words; None where there are none that matter."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        for dtype, most in _ERRORS.items():
            for name, ours, theirs in (
                ("a norm", *_norms(device, dtype)),
                ("a rotation", *_rotations(device, dtype)),
                ("a gate", *_gates(device, dtype)),
                ("sums", *_sums(device, dtype)),
                ("what is placed", *_placed(device, dtype)),
                ("experts", *_experts(device, dtype)),
                ("attention", *_attention(device, dtype)),
            ):
                error = float((ours.float() - theirs.float()).abs().max())
                if not error <= most:
                    return f"Triton computes {name} in {dtype} otherwise than torch, by {error:.2g}"
    return None


def _unwritten(like: Tensor, *size: int) -> Tensor:
    """Room for a result, of another size if one is given. It holds no number: memory as it is
    allocated may hold an earlier result, which would be taken for that of a kernel that did
    nothing."""
    return like.new_full(size or like.shape, math.nan)


def _norms(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(_TOKENS, _HIDDEN).to(device, dtype)
    weight = torch.rand(_HIDDEN).to(device, dtype)
    ours, theirs = _unwritten(x), _unwritten(x)
    GpuRows().rms_norm(x, weight, 1e-6, ours)
    layers.rms_norm(x, weight, 1e-6, torch.empty_like(x, dtype=torch.float32), theirs)
    return ours, theirs


def _rotations(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ours = torch.randn(_TOKENS, 3, _HEAD).to(device, dtype)
    angles_TR = torch.randn(_TOKENS, _HEAD // 2).to(device)
    cos_TR, sin_TR = angles_TR.cos().to(dtype), angles_TR.sin().to(dtype)
    theirs = ours.clone()
    GpuRows().rotate(ours, cos_TR, sin_TR)
    rotate(theirs, cos_TR, sin_TR)
    return ours, theirs


def _gates(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ours, up = (torch.randn(_TOKENS, _WIDTH).to(device, dtype) for _ in "gu")
    theirs = F.silu(ours) * up
    GpuRows().gate(ours, up, None)
    return ours, theirs


def _sums(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ours, shared = (torch.randn(_TOKENS, _HIDDEN).to(device, dtype) for _ in "xs")
    parts = torch.randn(_TOKENS, _CHOICES, _HIDDEN).to(device, dtype)
    theirs = ours.float() + parts.float().sum(1) + shared.float()
    GpuRows().add(ours, 1.0, parts, shared)
    return ours, theirs


def _placed(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    made = torch.randn(_TOKENS, _HIDDEN).to(device, dtype)
    weights_TK = torch.rand(_TOKENS, _CHOICES).to(device)
    rows = torch.arange(_TOKENS, device=device).flip(0)
    tokens = ExpertTokens(rows, rows % _CHOICES)
    ours, theirs = (made.new_zeros(_TOKENS, _CHOICES, _HIDDEN) for _ in "ot")
    GpuRows().place(made, tokens, ours, weights_TK)
    theirs[tokens] = (made * weights_TK[tokens][:, None]).to(dtype)
    return ours, theirs


def _attention(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of two tokens, one of which sees more than a block of rows."""
    counts, num_shared = (5, 90), 2
    q_THC = torch.randn(2, 2 * num_shared, _HEAD).to(device, dtype)
    keys_RGC, values_RGC = (torch.randn(sum(counts), 2, _HEAD).to(device, dtype) for _ in "kv")
    starts = [0, *accumulate(counts)]
    rows_N = torch.arange(sum(counts), device=device).flip(0)
    starts_B = torch.tensor(starts, device=device)
    seen = SingleQueries(torch.arange(2, device=device), starts_B, rows_N)
    ours, theirs = _unwritten(q_THC), _unwritten(q_THC)
    scale = _HEAD**-0.5
    SingleAttention().attend(seen, q_THC, Cached(keys_RGC, values_RGC), ours, Scoring(scale))
    for token, (start, stop) in enumerate(pairwise(starts)):
        rows_S = rows_N[start:stop]
        keys_HSC, values_HSC = (
            each[rows_S].transpose(0, 1).repeat_interleave(num_shared, 0)
            for each in (keys_RGC, values_RGC)
        )
        scores_HS = (keys_HSC @ q_THC[token][..., None])[..., 0].float() * scale
        weights_H1S = scores_HS.softmax(-1)[:, None].to(dtype)
        theirs[token] = (weights_H1S @ values_HSC)[:, 0]
    return ours, theirs


def _experts(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    def numbers(*size: int) -> Tensor:
        return torch.randn(size).div_(size[-1] ** 0.5).to(device, dtype)

    x_TD = numbers(_TOKENS, _HIDDEN) * _HIDDEN**0.5
    experts_TK = torch.rand(_TOKENS, _EXPERTS).topk(_CHOICES).indices.to(device)
    weights_TK = torch.rand(_TOKENS, _CHOICES).to(device)
    sizes = {"gate": (_WIDTH, _HIDDEN), "up": (_WIDTH, _HIDDEN), "down": (_HIDDEN, _WIDTH)}
    matrices = [{role: numbers(*size) for role, size in sizes.items()} for _ in range(_EXPERTS)]
    routing = Routing(
        rows=(slice(0, _TOKENS),),
        normed_TD=x_TD,
        weights_TK=weights_TK,
        experts_TK=experts_TK,
        num_experts=_EXPERTS,
        tokens=group_by_expert(experts_TK, slice(0, _TOKENS), _EXPERTS),
        outputs_TKD=_unwritten(x_TD, _TOKENS, _CHOICES, _HIDDEN),
    )
    group = [GroupedExpert(tokens, matrices[e]) for e, tokens in routing.tokens.items()]
    frame = Frame(_unwritten(x_TD, _TOKENS * _CHOICES * _WIDTH))
    GroupedExperts().run(frame, group, routing, most_rows=_TOKENS)
    theirs = _unwritten(routing.outputs_TKD)
    for (rows, choices), of_expert in group:
        inner = F.silu(x_TD[rows] @ of_expert["gate"].t()) * (x_TD[rows] @ of_expert["up"].t())
        made: Tensor = inner @ of_expert["down"].t()
        theirs[rows, choices] = (made * weights_TK[rows, choices][:, None]).to(dtype)
    return routing.outputs_TKD, theirs
