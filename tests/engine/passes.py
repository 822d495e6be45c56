"""What tests have passes meet: small slices, rows that were begun, memory that is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moebatch.model.decoder import Decoder
from moebatch.spec.request import Begun, Request

SLICE = 8
"""Tokens of a prompt where a test asks for `small_slices`, instead of 512."""


def begun(rows: Sequence[Request], answers: Sequence[tuple[int, ...]]) -> list[Request]:
    """The rows as an earlier run has left them, with one to four tokens of their answers."""
    return [
        replace(row, begun=(Begun(tokens=tokens[: 1 + row.index % 4], logprobs=()),))
        for row, tokens in zip(rows, answers, strict=True)
    ]


def fail_in_the_middle(patch: pytest.MonkeyPatch, layer: int, num_before: int) -> None:
    """Memory is refused once, when that layer has attended, which it did so often before; the last
    layer is -1."""
    real, refusals = Decoder.attend, iter([False] * num_before + [True])

    def refusing(self: Decoder, at: int, *arguments: Any) -> None:
        real(self, at, *arguments)
        if at == layer % self.shape.num_layers and next(refusals, False):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")

    patch.setattr(Decoder, "attend", refusing)
