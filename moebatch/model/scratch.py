"""Room for everything that a decoder computes on the way, allocated once.

Shape letters: D hidden, F expert width, R rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.spec.shape import ModelShape

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The largest pieces of work that a decoder is asked to do at once."""

    micro_batch_tokens: int
    """Most tokens of a micro-batch."""
    context_tokens: int
    """Most tokens of a sequence, prompt and answer."""
    gather_rows: int = 16384
    """KV rows that decoding sequences gather at a time, padding counted."""
    expert_rows: int = 1024
    """Tokens that an expert, a dense MLP or a router takes at a time."""

    @property
    def kv_rows(self) -> int:
        """Rows that fit into the room for gathered keys; at least one whole sequence."""
        return max(self.gather_rows, self.context_tokens)


class Scratch:
    """One flat buffer from which each step of the decoder takes its temporaries anew.

    Views of an earlier frame are overwritten by the next, so no result may outlive its step, and
    a decoder can be used by one thread only.
    """

    def __init__(self, num_elements: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.buffer = torch.empty(num_elements, device=device, dtype=dtype)

    def frame(self) -> "Frame":
        """A fresh start for the next step."""
        return Frame(self.buffer)


class Frame:
    """Hands out views of the buffer one after the other."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._used = 0

    def take(self, *size: int) -> Tensor:
        """An uninitialised tensor of that size."""
        num_elements = math.prod(size)
        start, stop = self._used, self._used + num_elements
        assert stop <= len(self._buffer), f"scratch too small for {size}; check the limits"
        self._used = _aligned(stop)
        return self._buffer[start:stop].view(size)


def bucket_rows(num_rows: int) -> int:
    """The next larger row count in use: powers of two to 16, then steps of 16, 64 and 256.

    On a CPU each new row count of a matrix product costs about 8 ms and leaves about a megabyte
    in oneDNN for good, so there must be few of them.
    """
    if num_rows <= 16:
        return 1 << max(0, num_rows - 1).bit_length()
    step = 16 if num_rows <= 128 else 64 if num_rows <= 1024 else 256
    return -(-num_rows // step) * step


def scratch_elements(shape: ModelShape, limits: Limits, *, converts: bool) -> int:
    """Elements of the compute dtype that a `Decoder` keeps for its temporaries.

    `converts` says that experts arrive in another dtype than they are computed in.
    """
    D, rows = shape.hidden_size, bucket_rows(limits.micro_batch_tokens)
    attention = (
        rows * D,  # normed input
        rows * shape.query_width,  # queries
        rows * shape.kv_width,  # keys
        rows * shape.kv_width,  # values
        rows * shape.query_width,  # attention output
        rows * D,  # projected output
        limits.kv_rows * shape.kv_width,  # gathered keys
        limits.kv_rows * shape.kv_width,  # gathered values
    )
    rows = bucket_rows(limits.expert_rows)
    width = max(shape.expert_width, shape.shared_expert_width, shape.dense_width)
    mlp = (
        rows * D,  # gathered input
        rows * width,  # gate
        rows * width,  # up
        rows * D,  # output
        D * shape.expert_width * converts,  # one converted matrix of an expert
    )
    return max(sum(map(_aligned, attention)), sum(map(_aligned, mlp)))


def _aligned(num_elements: int) -> int:
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
