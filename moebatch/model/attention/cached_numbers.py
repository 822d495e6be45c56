"""Keys and values in 8 bits: a code for each number, and a scale for each token and head.

So what is stored of a token depends on nothing but the token, neither on how its prompt was cut nor
on its neighbours in a page, and nothing is ever rounded twice. A scale for each channel of a page
(KIVI, section 3.2, for keys in 2 bits) would have both against it.

Shape letters: T tokens, G KV heads, C head size, B bytes of a token at one head: C + 2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.spec.model.cache_layout import SCALE_BYTES, CacheDtype

_CODES: Mapping[CacheDtype, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""What codes are, and the largest of them."""


def encode(x_TGC: Tensor, dtype: CacheDtype) -> Tensor:
    """Codes and then the scale, a bfloat16, as bytes, [T, G, B]. NaN or infinity among the numbers
    of a head makes all of them NaN, by the scale."""
    code_dtype, largest = _CODES[dtype]
    scaled_TGC = x_TGC.float()
    scale_TG1 = (scaled_TGC.abs().amax(-1, keepdim=True) / largest).bfloat16()
    scale_TG1.masked_fill_(scale_TG1.isinf(), torch.nan)
    # Numbers that are all too small for a scale become zeros.
    scaled_TGC = scaled_TGC / scale_TG1.float().masked_fill(scale_TG1 == 0, torch.inf)
    scaled_TGC.clamp_(-largest, largest)
    if code_dtype == torch.int8:
        scaled_TGC.round_()
    parts = scaled_TGC.to(code_dtype), scale_TG1
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def decode(coded_TGB: Tensor, dtype: CacheDtype, room_TGC: Tensor) -> Tensor:
    """The numbers, in a room of any dtype, which is returned."""
    code_dtype, _ = _CODES[dtype]
    head_dim = coded_TGB.shape[-1] - SCALE_BYTES
    codes_TGC = coded_TGB[..., :head_dim].view(code_dtype).float()
    # Behind an odd number of codes a scale lies where no bfloat16 may.
    scale_TG2 = coded_TGB[..., head_dim:].clone(memory_format=torch.contiguous_format)
    scale_TG1 = scale_TG2.view(torch.bfloat16).float()
    return room_TGC.copy_(codes_TGC.mul_(scale_TG1))
