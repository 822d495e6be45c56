"""Whether the kernels of a GPU compute what torch does there: asked once, before they are used.

Shape letters: T tokens, K experts per token, D hidden, F expert width, E experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, nan

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.formats.coded import BITS, CodedMatrix, Numbers
from moebatch.formats.decoding import decode
from moebatch.layout.fused import Middle
from moebatch.model import layers
from moebatch.model.gpu.attention import attend_single
from moebatch.model.gpu.delta_steps import take_delta_steps
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.gpu.gates import GpuGates, Grouped
from moebatch.model.gpu.rows import GpuRows
from moebatch.model.gpu.scan_steps import take_scan_steps
from moebatch.model.grouped import GroupedExpert
from moebatch.model.native.attention_work import Cached, SingleQueries
from moebatch.model.native.delta_rule import DeltaInput, StateSpans
from moebatch.model.native.scoring import Scoring
from moebatch.model.native.selective_scan import ScanInput
from moebatch.model.rope import rotate
from moebatch.model.routing.router import Routing, choose_experts
from moebatch.model.routing.tokens import ExpertTokens, group_by_expert
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate, ExpertGroups, Router

_TOKENS, _CHOICES, _HIDDEN, _WIDTH, _EXPERTS = 24, 2, 160, 96, 4
_HEAD = 64
_USUAL: Mapping[Numbers, float] = {
    "int4": 5,
    "e2m1": 3,
    "codebook": 0.6,
    "int8": 70,
    "uint8": 70,
    "e4m3": 120,
}
"""Size of what codes stand for."""
UNWRITTEN = -1
"""Stands where a whole number is to be written."""
_ERRORS = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""By which results of order one may differ, whatever order sums run in."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """How a `CodedMatrix` is stored."""

    numbers: Numbers
    scales: torch.dtype
    block: tuple[int, int]
    has_zeros: bool = False
    has_factor: bool = False
    divides: bool = False
    rounds_to: torch.dtype | None = None


_WHOLE = 9999
CODES = (
    Codes(
        numbers="int4",
        scales=torch.bfloat16,
        block=(1, 32),
        has_zeros=True,
        rounds_to=torch.bfloat16,
    ),
    Codes(numbers="e2m1", scales=torch.uint8, block=(1, 32)),
    Codes(numbers="e2m1", scales=torch.float8_e4m3fn, block=(1, 16), has_factor=True),
    Codes(numbers="codebook", scales=torch.float32, block=(1, 32), rounds_to=torch.float16),
    Codes(numbers="int8", scales=torch.bfloat16, block=(1, _WHOLE), rounds_to=torch.bfloat16),
    Codes(numbers="uint8", scales=torch.float16, block=(1, 64), rounds_to=torch.float16),
    Codes(numbers="e4m3", scales=torch.float32, block=(128, 128)),
)
"""All codes, and all types of scales."""
ROUTERS = (
    Router(norm_order=1.0, has_exact_weights=True),
    Router(groups=ExpertGroups(6, 2, 1), scale=2.5),
    Router(has_correction=True, norm_order=2.0, least_norm=0.4),
    Router(scores="sigmoid", norm_order=1.0, added_to_norm=0.3),
    Router(scores="sigmoid", has_correction=True, corrects_logits=True),
    Router(
        scores="sigmoid",
        has_correction=True,
        groups=ExpertGroups(6, 3, 2),
        norm_order=1.0,
        scale=2.5,
    ),
    Router(
        scores="sigmoid",
        has_correction=True,
        groups=ExpertGroups(6, 5, 1, others_are_zero=True),
    ),
    Router(norm_order=1.0, weighs_experts=True, has_exact_weights=True),
    Router(scores="sparsemixer", near=0.4),
)
"""All that a formula may have."""
_GATED = 24
"""Experts of them."""


def differences(device: torch.device) -> str | None:
    """In words; None where there are none that matter."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        for dtype, most in _ERRORS.items():
            for name, ours, theirs in (
                ("a norm", *_norms(device, dtype)),
                ("a gated norm", *_gated_norms(device, dtype)),
                ("a rotation", *_rotations(device, dtype)),
                ("a gate", *_gates(device, dtype)),
                ("sums", *_sums(device, dtype)),
                ("what is placed", *_placed(device, dtype)),
                ("attention", *_attention(device, dtype)),
                ("steps of a recurrence", *_delta_steps(device, dtype)),
                ("steps by channel", *_delta_steps(device, dtype, by_channel=True)),
                ("steps of a state space", *_delta_steps(device, dtype, corrects=False)),
                ("a selective scan", *_scanned(device, dtype)),
                ("tokens by expert", *_grouped(device)),
                *_all_choices(device, dtype),
                *_all_experts(device, dtype),
            ):
                error = float((ours.float() - theirs.float()).abs().max())
                if not error <= most:
                    return f"Triton computes {name} in {dtype} otherwise than torch, by {error:.2g}"
    return None


def _unwritten(like: Tensor, *size: int) -> Tensor:
    """Room for a result, of another size if one is given. It holds no number: memory as it is
    allocated may hold an earlier result, which would be taken for that of a kernel that did
    nothing."""
    nothing = nan if like.is_floating_point() else UNWRITTEN
    return like.new_full(size or like.shape, nothing)


def _all_experts(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    yield "experts", *_experts(device, dtype)
    yield "experts without gates", *_experts(device, dtype, middle="relu2")
    clamped = {
        "e2m1": ClampedGate(limit=1.5, alpha=1.7, added=1.0),
        "e4m3": ClampedGate(limit=0.7, clamps_activated=True),
    }
    for codes in CODES:
        gate = clamped.get(codes.numbers)
        yield f"experts of {codes.numbers}", *_experts(device, dtype, codes, gate)


def _norms(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(_TOKENS, _HIDDEN).to(device, dtype)
    weight = torch.rand(_HIDDEN).to(device, dtype)
    ours, theirs = _unwritten(x), _unwritten(x)
    GpuRows().rms_norm(x, weight, 1e-6, ours)
    layers.rms_norm(x, weight, 1e-6, torch.empty_like(x, dtype=torch.float32), theirs)
    return ours, theirs


def _gated_norms(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x_THV = torch.randn(_TOKENS, 3, _HEAD).to(device)
    z_THV = torch.randn(_TOKENS, 5, _HEAD).to(device, dtype)[:, :3]
    weight_V = torch.rand(_HEAD).to(device, dtype)
    ours, theirs = (_unwritten(weight_V, *x_THV.shape) for _ in range(2))
    GpuRows().norm_gated(x_THV, weight_V, 1e-6, z_THV, ours)
    layers.norm_gated(x_THV, weight_V, 1e-6, z_THV, theirs)
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


def _delta_steps(
    device: torch.device, dtype: torch.dtype, *, corrects: bool = True, by_channel: bool = False
) -> tuple[Tensor, Tensor]:
    """Of two sequences, each with two heads of values to one of keys."""
    heads, keys, values = 4, 24, 40
    kept_in = torch.float16 if dtype == torch.float16 else torch.float32
    matrices_RHKV = torch.randn(3, heads, keys, values).to(device, kept_in)
    q_TGK, k_TGK = (F.normalize(torch.randn(2, heads // 2, keys), dim=-1).to(device) for _ in "qk")
    v_THV, rates_TH = torch.randn(2, heads, values), torch.rand(2, heads)
    fading_THF = -torch.rand(2, heads, keys if by_channel else 1)
    given = DeltaInput(q_TGK, k_TGK, *(x.to(device) for x in (v_THV, rates_TH, fading_THF)))
    spans = StateSpans(*torch.tensor([[2, 0], [0, 1], [1, 1], [7, 900]], device=device))
    x_THKV = matrices_RHKV[spans.rows_B].float() * given.fading_THF.exp()[..., None]
    q_TH1K, k_TH1K = (x.repeat_interleave(2, 1)[:, :, None] for x in given[:2])
    found_TH1V = k_TH1K @ x_THKV * corrects
    changes_TH1V = (given.v_THV[:, :, None] - found_TH1V) * given.rates_TH[..., None, None]
    x_THKV += k_TH1K.mT * changes_TH1V
    ours = _unwritten(given.v_THV)
    take_delta_steps(spans, given, matrices_RHKV, ours, corrects=corrects)
    return _joined(ours, matrices_RHKV[spans.rows_B]), _joined(q_TH1K @ x_THKV, x_THKV)


def _scanned(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of two sequences, one of which has several tokens."""
    tokens, keys, channels = 4, 12, 40
    kept_in = torch.float16 if dtype == torch.float16 else torch.float32
    matrices_R1KV = torch.randn(3, 1, keys, channels).to(device, kept_in)
    q_TK, k_TK = (F.normalize(torch.randn(2, tokens, keys), dim=-1)).to(device)
    v_TV, lengths_TV = (torch.randn(tokens, channels), torch.rand(tokens, channels))
    decays_KV = -torch.rand(keys, channels)
    given = ScanInput(q_TK, k_TK, *(x.to(device) for x in (v_TV, lengths_TV, decays_KV)))
    spans = StateSpans(*torch.tensor([[2, 0], [0, 3], [3, 1], [7, 900]], device=device))
    x_BKV, theirs = matrices_R1KV[spans.rows_B, 0].float(), _unwritten(given.v_TV)
    for token in range(tokens):
        of_one, length_V = x_BKV[token // 3], given.lengths_TV[token]
        of_one *= (given.decays_KV * length_V).exp()
        of_one += given.k_TK[token][:, None] * (given.v_TV[token] * length_V)
        theirs[token] = given.q_TK[token] @ of_one
    ours = _unwritten(given.v_TV)
    take_scan_steps(spans, given, matrices_R1KV, ours)
    return _joined(ours, matrices_R1KV[spans.rows_B]), _joined(theirs, x_BKV)


def _joined(*parts: Tensor) -> Tensor:
    """What a recurrence gives, and its states."""
    return torch.cat([part.float().flatten() for part in parts])


def _attention(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of two tokens, one of which sees more than a block of rows."""
    counts, num_shared = (5, 90), 2
    q_THC = torch.randn(2, 2 * num_shared, _HEAD).to(device, dtype)
    num_rows, value_dim = sum(counts), _HEAD // 2
    keys_RGC = torch.randn(num_rows, 2, _HEAD).to(device, dtype)
    values_RGV = torch.randn(num_rows, 2, value_dim).to(device, dtype)
    starts = [0, *accumulate(counts)]
    rows_N = torch.arange(num_rows, device=device).flip(0)
    starts_B = torch.tensor(starts, device=device)
    seen = SingleQueries(torch.arange(2, device=device), starts_B, rows_N)
    ours, theirs = (_unwritten(q_THC, *q_THC.shape[:2], value_dim) for _ in "ot")
    scale = _HEAD**-0.5
    attend_single(seen, q_THC, Cached(keys_RGC, values_RGV), ours, Scoring(scale))
    for token, (start, stop) in enumerate(pairwise(starts)):
        rows_S = rows_N[start:stop]
        keys_HSC, values_HSV = (
            each[rows_S].transpose(0, 1).repeat_interleave(num_shared, 0)
            for each in (keys_RGC, values_RGV)
        )
        scores_HS = (keys_HSC @ q_THC[token][..., None])[..., 0].float() * scale
        weights_H1S = scores_HS.softmax(-1)[:, None].to(dtype)
        theirs[token] = (weights_H1S @ values_HSV)[:, 0]
    return ours, theirs


def _all_choices(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Weights, and experts as numbers."""
    for router in ROUTERS:
        pairs = zip(*_choices(device, dtype, router), strict=True)
        for name, (ours, theirs) in zip(("weights", "choices"), pairs, strict=True):
            yield f"{name} by {router.scores}", ours, theirs


def _choices(
    device: torch.device, dtype: torch.dtype, router: Router
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Of logits in float32, which are not alike."""
    logits_TE = torch.randn(_TOKENS, _GATED).to(device)
    roles = "router_correction", "router_expert_weights"
    weights = {role: torch.rand(_GATED).to(device) for role in roles}
    weights_TK = _unwritten(logits_TE, _TOKENS, _CHOICES)
    experts_TK = _unwritten(torch.empty_like(weights_TK, dtype=torch.int64))
    room = weights_TK, experts_TK
    GpuGates().choose(logits_TE, router, room, weights, dtype)
    theirs = choose_experts(logits_TE, router, _CHOICES, weights, dtype)
    return room, theirs


def _grouped(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and choices of some tokens, one of whose choices is left out, and how many there are."""
    experts_TK = torch.rand(_TOKENS, _EXPERTS).topk(_CHOICES).indices.to(device)
    rows = slice(3, _TOKENS - 1)
    experts_TK[rows.stop - 1, 1] = _EXPERTS
    room = Grouped.room((rows.stop - rows.start) * _CHOICES, _EXPERTS, device)
    made = *room.tokens, room.counts_E
    for each in made:
        each.fill_(UNWRITTEN)
    GpuGates().fill(experts_TK, rows, room)
    tokens = group_by_expert(experts_TK, rows, _EXPERTS)
    counts_E = room.counts_E.new_tensor([len(tokens[e].rows_M) for e in range(_EXPERTS)])
    theirs = *map(torch.cat, zip(*tokens.values(), strict=True)), counts_E
    return torch.cat([each[: len(right)] for each, right in zip(made, theirs, strict=True)]), (
        torch.cat(theirs)
    )


def _experts(
    device: torch.device,
    dtype: torch.dtype,
    codes: Codes | None = None,
    clamped: ClampedGate | None = None,
    middle: Middle = "gated",
) -> tuple[Tensor, Tensor]:
    """Plain ones, or such of codes; with biases where they are clamped."""

    def numbers(*size: int) -> Tensor:
        return torch.randn(size).div_(size[-1] ** 0.5).to(device, dtype)

    def expert() -> dict[str, Tensor | CodedMatrix]:
        matrices = {
            role: coded(codes, size, device) if codes else numbers(*size)
            for role, size in sizes.items()
        }
        biases = {f"{role}_bias": numbers(size[0]) for role, size in sizes.items() if clamped}
        return matrices | biases

    x_TD = numbers(_TOKENS, _HIDDEN) * _HIDDEN**0.5
    experts_TK = torch.rand(_TOKENS, _EXPERTS).topk(_CHOICES).indices.to(device)
    sizes = {"up": (_WIDTH, _HIDDEN), "down": (_HIDDEN, _WIDTH)}
    if middle == "gated":
        sizes = {"gate": (_WIDTH, _HIDDEN), **sizes}
    routing = Routing(
        rows=(slice(0, _TOKENS),),
        normed_TD=x_TD,
        weights_TK=torch.rand(_TOKENS, _CHOICES).to(device),
        experts_TK=experts_TK,
        num_experts=_EXPERTS,
        tokens=group_by_expert(experts_TK, slice(0, _TOKENS), _EXPERTS),
        outputs_TKD=_unwritten(x_TD, _TOKENS, _CHOICES, _HIDDEN),
    )
    kernels, group = GroupedExperts(middle), []
    theirs = _unwritten(routing.outputs_TKD)
    experts = {number: expert() for number in routing.tokens}
    for number, tokens in routing.tokens.items():
        taken = kernels.taken(experts[number], dtype)
        assert taken is not None, "they are made to suit"
        group.append(GroupedExpert(tokens, taken))
        _compute_by_torch(tokens, experts[number], routing, clamped, theirs)
    frame = Frame(_unwritten(x_TD, _TOKENS * _CHOICES * _WIDTH))
    kernels.run(frame, group, routing, most_rows=_TOKENS, clamped=clamped)
    return routing.outputs_TKD, theirs


def _compute_by_torch(
    tokens: ExpertTokens,
    matrices: Mapping[str, Tensor | CodedMatrix],
    routing: Routing,
    clamped: ClampedGate | None,
    out_TKD: Tensor,
) -> None:
    def product(x_MI: Tensor, role: str) -> Tensor:
        weight_OI, bias_O = matrices[role], matrices.get(f"{role}_bias")
        if isinstance(weight_OI, CodedMatrix):
            decode(weight_OI, room := x_MI.new_empty(weight_OI.shape))
            weight_OI = room
        assert not isinstance(bias_O, CodedMatrix), "biases are plain"
        return F.linear(x_MI, weight_OI, bias_O)

    x_MD = routing.normed_TD[tokens.rows_M]
    up_MF = product(x_MD, "up")
    if "gate" not in matrices:
        inner_MF = F.relu(up_MF).square()
    elif clamped is None:
        inner_MF = F.silu(product(x_MD, "gate")) * up_MF
    else:
        gate_MF = product(x_MD, "gate").clamp(max=clamped.most_gate)
        up_MF = up_MF.clamp(-clamped.limit, clamped.limit) + clamped.added
        gate_MF = gate_MF * (clamped.alpha * gate_MF).sigmoid()
        inner_MF = up_MF * gate_MF.clamp(max=clamped.most_activated)
    weights_M = routing.weights_TK[tokens]
    out_TKD[tokens] = (product(inner_MF, "down") * weights_M[:, None]).to(out_TKD.dtype)


def coded(codes: Codes, shape: tuple[int, int], device: torch.device) -> CodedMatrix:
    """A matrix whose weights are of the size of one by the root of its inputs."""
    (O, I), bits = shape, BITS[codes.numbers]
    size = (ceil(O / codes.block[0]), ceil(I / codes.block[1]))
    steps = (torch.rand(size) + 0.5) * I**-0.5 / _USUAL[codes.numbers]
    if codes.scales == torch.uint8:
        steps = steps.log2().round() + 127
    numbers = torch.randint(256, (O, I * bits // 8), dtype=torch.uint8)
    if codes.numbers == "e4m3":
        numbers.masked_fill_(numbers & 127 == 127, 0)  # which are none
    zeros = torch.randint(2**31, (ceil(O * bits / 32), size[1]), dtype=torch.int32)
    values = torch.linspace(-1, 1, 16).to(device) if codes.numbers == "codebook" else None
    return CodedMatrix(
        numbers=codes.numbers,
        codes=numbers.to(device),
        scales=steps.to(codes.scales).to(device),
        block=codes.block,
        shape=shape,
        zeros=zeros.to(device) if codes.has_zeros else None,
        factor=torch.tensor(0.8).to(device) if codes.has_factor else None,
        divides=codes.divides,
        values=values,
        is_high_first=codes.numbers == "codebook",
        rounds_to=codes.rounds_to,
    )
