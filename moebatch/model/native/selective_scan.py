"""What the compiled selective scan is given: tensors, as addresses.

Shape letters: T tokens of the micro-batch, K size of a key, V channels of values, R rows of the
state.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.native.delta_rule import StateSpans
from moebatch.model.native.kernels import DTYPES, fields


class ScanInput(NamedTuple):
    """What a layer's rule takes of tokens, all float32."""

    q_TK: Tensor
    k_TK: Tensor
    v_TV: Tensor
    lengths_TV: Tensor
    """Of time steps, at least 0: by what is multiplied what a token adds, and how fast numbers
    fade."""
    decays_KV: Tensor
    """How fast they do in a step of length 1, at most 0: the same for all tokens."""

    def of_tokens(self, tokens: slice | Tensor) -> "ScanInput":
        """The same of some of them."""
        q_TK, k_TK, v_TV, lengths_TV, decays_KV = self
        return ScanInput(q_TK[tokens], k_TK[tokens], v_TV[tokens], lengths_TV[tokens], decays_KV)


class ScanWork(ctypes.Structure):
    """``struct scan_work`` of the C file."""

    _fields_ = (
        *fields(
            ctypes.c_void_p,
            "matrices rows firsts counts befores queries keys values lengths decays out",
        ),
        *fields(ctypes.c_int64, "num_sequences key_dim channels next_item"),
        ("dtype", ctypes.c_int32),
    )


def scan_work(
    spans: StateSpans, given: ScanInput, matrices_R1KV: Tensor, out_TV: Tensor
) -> ScanWork:
    """Tokens that are taken one by one, with matrices in float32 or float16. Only pointers: the
    tensors must live until it has been done."""
    tensors = (*given, out_TV)
    everything = (*tensors, matrices_R1KV)
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in everything)
    assert all(tensor.dtype == torch.float32 for tensor in tensors)
    key_dim, channels = given.decays_KV.shape
    return ScanWork(
        matrices=matrices_R1KV.data_ptr(),
        **spans.as_fields,
        queries=given.q_TK.data_ptr(),
        keys=given.k_TK.data_ptr(),
        values=given.v_TV.data_ptr(),
        lengths=given.lengths_TV.data_ptr(),
        decays=given.decays_KV.data_ptr(),
        out=out_TV.data_ptr(),
        key_dim=key_dim,
        channels=channels,
        dtype=DTYPES[matrices_R1KV.dtype],
    )
