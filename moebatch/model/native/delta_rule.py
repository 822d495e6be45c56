"""What compiled recurrences are given: tensors, as addresses.

Shape letters: T tokens of the micro-batch, B sequences, G key heads, H value heads, K size of a
key, V size of a value, R rows of the state, F one or K.
"""

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.native.kernels import DTYPES, address_of, fields

NOISE_STEPS: Mapping[str, int] = MappingProxyType(
    {
        "token_step": 0xDB4F0B91,
        "head_step": 0xBBE05633,
        "key_step": 0xA0F2EC75,
        "value_step": 0x89E18285,
    }
)
"""Of the noise with which a matrix is kept in float16: steps through four dimensions that fill them
evenly, modulo 2^32. Its upper 13 bits are added to those that float16 lacks before these are cut
off, so that a number becomes either neighbour as often as it is near. One that hardly changes from
token to token would else be rounded back each time, and never fade."""


class StateSpans(NamedTuple):
    """Sequences with tokens in a micro-batch. All int64, where the state is."""

    rows_B: Tensor
    """Row of the state of each."""
    firsts_B: Tensor
    """Row of its first token in the micro-batch; the others follow."""
    counts_B: Tensor
    """How many there are."""
    befores_B: Tensor
    """How many the sequence had before."""

    @property
    def as_fields(self) -> dict[str, int]:
        """What the structures of rules name them by, as addresses."""
        return {
            "rows": self.rows_B.data_ptr(),
            "firsts": self.firsts_B.data_ptr(),
            "counts": self.counts_B.data_ptr(),
            "befores": self.befores_B.data_ptr(),
            "num_sequences": len(self.rows_B),
        }


class DeltaInput(NamedTuple):
    """What a layer's rule takes of tokens, all float32."""

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    rates_TH: Tensor
    """By what is multiplied what a token adds."""
    fading_THF: Tensor
    """Natural logarithms, at most 0, of what is left of a matrix, or of each channel of keys in
    it."""

    def of_tokens(self, tokens: slice | Tensor) -> "DeltaInput":
        """The same of some of them."""
        return DeltaInput(*(tensor[tokens] for tensor in self))


class DeltaWork(ctypes.Structure):
    """``struct delta_work`` of the C file."""

    _fields_ = (
        *fields(
            ctypes.c_void_p,
            "matrices rows firsts counts befores queries keys values rates left out",
        ),
        *fields(
            ctypes.c_int64,
            "num_sequences num_key_heads num_value_heads key_dim value_dim next_item",
        ),
        *fields(ctypes.c_int32, "dtype corrects by_channel"),
    )


def delta_work(
    spans: StateSpans,
    given: DeltaInput,
    left_THF: Tensor,
    matrices_RHKV: Tensor,
    out_THV: Tensor,
    *,
    corrects: bool,
) -> DeltaWork:
    """Tokens that are taken one by one, with matrices in float32 or float16; `left_THF` is what
    fading leaves. Only pointers: the tensors must live until it has been done."""
    tensors = (*given, left_THF, out_THV)
    everything = (*tensors, matrices_RHKV)
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in everything)
    assert all(tensor.dtype == torch.float32 for tensor in tensors)
    _, num_key_heads, key_dim = given.k_TGK.shape
    _, num_value_heads, value_dim = given.v_THV.shape
    by_channel = left_THF.shape[2] > 1
    assert corrects or not by_channel, "of rules that only add none has channels that fade apart"
    return DeltaWork(
        matrices=matrices_RHKV.data_ptr(),
        **spans.as_fields,
        queries=given.q_TGK.data_ptr(),
        keys=given.k_TGK.data_ptr(),
        values=given.v_THV.data_ptr(),
        rates=given.rates_TH.data_ptr(),
        left=left_THF.data_ptr(),
        out=out_THV.data_ptr(),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=DTYPES[matrices_RHKV.dtype],
        corrects=corrects,
        by_channel=by_channel,
    )


class ConvWork(ctypes.Structure):
    """``struct conv_work`` of the C file."""

    _fields_ = (
        *fields(ctypes.c_void_p, "seen inputs out taps bias rows firsts counts"),
        *fields(ctypes.c_int64, "num_sequences num_taps channels stride next_item"),
        *fields(ctypes.c_int32, "dtype activates"),
    )


def conv_work(
    spans: StateSpans,
    x_TM: Tensor,
    taps_WM: Tensor,
    bias_M: Tensor | None,
    seen_RLM: Tensor,
    out_TM: Tensor,
    *,
    activates: bool,
) -> ConvWork:
    """A convolution over each of M channels, of which the last L = W - 1 tokens are kept. Only
    pointers: the tensors must live until it has been computed."""
    assert all(tensor.is_contiguous() for tensor in (taps_WM, seen_RLM, out_TM))
    assert x_TM.stride(1) == 1 and x_TM.dtype == seen_RLM.dtype
    assert taps_WM.dtype == out_TM.dtype == torch.float32
    num_taps, channels = taps_WM.shape
    return ConvWork(
        seen=seen_RLM.data_ptr(),
        inputs=x_TM.data_ptr(),
        out=out_TM.data_ptr(),
        taps=taps_WM.data_ptr(),
        bias=address_of(bias_M),
        rows=spans.rows_B.data_ptr(),
        firsts=spans.firsts_B.data_ptr(),
        counts=spans.counts_B.data_ptr(),
        num_sequences=len(spans.rows_B),
        num_taps=num_taps,
        channels=channels,
        stride=x_TM.stride(0),
        dtype=DTYPES[x_TM.dtype],
        activates=activates,
    )
