"""The selective scan for sequences on a GPU: one launch for all of a micro-batch, whose programs
hold some channels of a matrix while they take the tokens of its sequence one by one.

Shape letters: T tokens of the micro-batch, K size of a key, V channels of values, R rows of the
state.
"""

from math import ceil

import torch
from torch import Tensor

from moebatch.model.gpu.rows import block_of, launch
from moebatch.model.native.delta_rule import NOISE_STEPS, StateSpans
from moebatch.model.native.selective_scan import ScanInput

_CHANNELS = 32
"""Of a matrix, that one program holds."""


def take_scan_steps(
    spans: StateSpans, given: ScanInput, matrices_R1KV: Tensor, out_TV: Tensor
) -> None:
    """Changes matrices in float32 or float16 in place by all tokens of each sequence, and writes
    what they put out, in float32. Those in float16 are rounded behind every token."""
    tensors = (*given, matrices_R1KV, out_TV)
    assert all(tensor.is_contiguous() for tensor in tensors)
    key_dim, num_channels = given.decays_KV.shape
    channels = min(_CHANNELS, block_of(num_channels))
    launch(
        "scan_steps",
        (len(spans.rows_B), ceil(num_channels / channels)),
        *(out_TV, *given, matrices_R1KV, *spans, key_dim, num_channels),
        is_half=matrices_R1KV.dtype == torch.float16,
        **{name: step for name, step in NOISE_STEPS.items() if name != "head_step"},
        K=block_of(key_dim),
        V=channels,
    )
