"""The gated delta rule for sequences that decode: one launch for all of a micro-batch, which goes
through their matrices once.

Shape letters: T tokens of the micro-batch, H value heads, K size of a key, V size of a value, R
rows of the state.
"""

from math import ceil

import torch
from torch import Tensor

from moebatch.model.gpu.rows import block_of, launch
from moebatch.model.native.delta_rule import NOISE_STEPS, DeltaInput, StateSpans

_COLUMNS = 32
"""Of a matrix, that one program holds."""


def take_delta_steps(
    spans: StateSpans,
    given: DeltaInput,
    matrices_RHKV: Tensor,
    out_THV: Tensor,
    *,
    corrects: bool,
) -> None:
    """Changes matrices in float32 or float16 in place by the next token of each sequence, as
    `MatrixRecurrence.corrects` says, and writes what they put out, in float32."""
    tensors = (*given, matrices_RHKV, out_THV)
    assert all(tensor.is_contiguous() for tensor in tensors)
    num_key_heads, key_dim = given.k_TGK.shape[1:]
    num_heads, value_dim = given.v_THV.shape[1:]
    columns = min(_COLUMNS, block_of(value_dim))
    launch(
        "delta_step",
        (len(spans.rows_B), num_heads, ceil(value_dim / columns)),
        *(out_THV, *given, matrices_RHKV),
        *(spans.rows_B, spans.firsts_B, spans.befores_B),
        *(num_heads, num_heads // num_key_heads, key_dim, value_dim),
        is_half=matrices_RHKV.dtype == torch.float16,
        corrects=corrects,
        by_channel=given.fading_THF.shape[2] > 1,
        **NOISE_STEPS,
        K=block_of(key_dim),
        V=columns,
    )
