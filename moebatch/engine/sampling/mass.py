"""Integer probability masses: which of them survive min_p, top_k and top_p, and a draw from them.

There is no generator: every draw has its own number, computed from what it is for.

A token's mass is its probability relative to the likeliest token, in steps of 2**-44. Sums of
integers do not depend on their order, so neither the other rows of a block nor the way in which a
kernel splits its work can change a draw. Masses below one step, 6e-14 of the likeliest, are zero.

Tokens of equal mass share their fate: a filter keeps all of them or none. So the cut needs no
order among equals, but top_k may keep more than k, as it does in transformers and vLLM.

Shapes: R rows, V vocabulary, K likeliest tokens.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moebatch.spec.request import Request

NOISE_BITS = 53
ONE = 2**44
"""Mass of the likeliest token."""
MAX_VOCAB = 2**63 // ONE - 1
"""Above this a sum of masses could overflow."""
_HEAD = 256
"""top_p first looks among that many likeliest tokens; rows that need more are sorted."""


def to_mass(logits_RV: Tensor, peak_R: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Integer masses of float32 logits at one temperature per row, given their largest logits."""
    temperature_R = logits_RV.new_tensor(temperatures)
    relative_RV = (logits_RV - peak_R[:, None]).div_(temperature_R[:, None]).exp_()
    return relative_RV.mul_(ONE).to(torch.int64)


def keep(
    mass_RV: Tensor,
    *,
    min_ps: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
) -> None:
    """Zero the masses that min_p, then top_k, then top_p drop; one value of each per row.

    top_p is the share of what the other two left. 0 turns min_p and top_k off, 1 turns top_p off.
    """
    if any(min_ps) or any(top_ks):
        floor_R = torch.maximum(_min_p_floor(mass_RV, min_ps), _top_k_floor(mass_RV, top_ks))
        _drop_below(mass_RV, floor_R)
    if min(top_ps) < 1.0:
        _drop_below(mass_RV, _top_p_floor(mass_RV, top_ps))


def draw(mass_RV: Tensor, noises: Sequence[int]) -> list[int]:
    """One token per row by inverting the cumulative distribution in the order of token ids."""
    cumulative_RV = mass_RV.cumsum(-1)
    totals = cumulative_RV[:, -1].tolist()
    # The middle of the noise's step: uniform in the open interval (0, 1), exactly.
    targets = [
        (2 * u + 1) * total >> NOISE_BITS + 1 for u, total in zip(noises, totals, strict=True)
    ]
    target_R1 = mass_RV.new_tensor(targets)[:, None]
    tokens: list[int] = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0].tolist()
    return tokens


def _drop_below(mass_RV: Tensor, floor_R: Tensor) -> None:
    mass_RV.mul_(mass_RV >= floor_R[:, None])


def _min_p_floor(mass_RV: Tensor, min_ps: Sequence[float]) -> Tensor:
    return mass_RV.new_tensor([math.floor(min_p * ONE) for min_p in min_ps])


def _top_k_floor(mass_RV: Tensor, top_ks: Sequence[int]) -> Tensor:
    """The k-th largest mass of every row, 0 where top_k is off."""
    vocab_size = mass_RV.shape[1]
    limited = [row for row, k in enumerate(top_ks) if 0 < k < vocab_size]
    floor_R = mass_RV.new_zeros(len(top_ks))
    if not limited:
        return floor_R
    ks = [top_ks[row] for row in limited]
    largest_RK = _rows(mass_RV, limited).topk(max(ks), -1).values
    last_R1 = largest_RK.new_tensor(ks)[:, None] - 1
    floor_R[limited] = largest_RK.gather(1, last_R1)[:, 0]
    return floor_R


def _top_p_floor(mass_RV: Tensor, top_ps: Sequence[float]) -> Tensor:
    """Smallest mass in the shortest head of the row that reaches top_p, 0 where it is off."""
    limited = [row for row, top_p in enumerate(top_ps) if top_p < 1.0]
    limited_RV = _rows(mass_RV, limited)
    totals = limited_RV.sum(-1).tolist()
    needs = [
        max(1, min(total, math.ceil(top_ps[row] * total)))
        for row, total in zip(limited, totals, strict=True)
    ]
    need_R = mass_RV.new_tensor(needs)
    head_RK = limited_RV.topk(min(_HEAD, mass_RV.shape[1]), -1).values
    found_R, short_R = _floor_in_head(head_RK, need_R)
    if short_R.any():
        found_R[short_R], _ = _floor_in_head(_descending(limited_RV[short_R]), need_R[short_R])
    floor_R = mass_RV.new_zeros(len(top_ps))
    floor_R[limited] = found_R
    return floor_R


def _floor_in_head(head_RK: Tensor, need_R: Tensor) -> tuple[Tensor, Tensor]:
    """The mass with which the falling masses reach the need, and which rows are too short."""
    cumulative_RK = head_RK.cumsum(-1)
    short_R = cumulative_RK[:, -1] < need_R
    last_R1 = torch.searchsorted(cumulative_RK, need_R[:, None]).clamp_(max=head_RK.shape[1] - 1)
    return head_RK.gather(1, last_R1)[:, 0], short_R


def _descending(mass_RV: Tensor) -> Tensor:
    if mass_RV.device.type != "cpu":
        return mass_RV.sort(-1, descending=True).values
    # torch also sorts the indices, which are of no use here, and takes five times as long.
    rising_RV = mass_RV.numpy().copy()
    rising_RV.sort(-1)
    return torch.from_numpy(rising_RV).flip(-1)


def _rows(mass_RV: Tensor, rows: Sequence[int]) -> Tensor:
    return mass_RV if len(rows) == mass_RV.shape[0] else mass_RV[list(rows)]


def noise(request: Request, *, choice: int, position: int, job_seed: int) -> int:
    """Uniform integer in [0, 2**NOISE_BITS) for one token of one sequence.

    It depends on (row seed, choice, position) where the row has a seed, so that equal rows with
    equal seeds agree, and else on (job seed, custom_id, choice, position). It never depends on
    batching, order, sharding or resuming.
    """
    seed = request.sampling.seed
    # The free text comes last and the two kinds differ in their first word, so keys never collide.
    if seed is not None:
        key = f"row:{seed}:{choice}:{position}"
    else:
        key = f"job:{job_seed}:{choice}:{position}:{request.custom_id}"
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - NOISE_BITS)
