"""Projections of one input become one matrix, without taking memory twice."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import StorageError
from moebatch.model.dense_weights import DenseWeights


def joined(*parts: torch.Tensor) -> torch.Tensor:
    roles = dict(zip("qkv", parts, strict=True))
    (layer,) = DenseWeights.of({}, [roles]).layers
    assert layer.keys() == {"qkv"}
    assert torch.equal(layer["qkv"], torch.cat(parts))
    return layer["qkv"]


def test_what_was_loaded_one_after_the_other_is_not_copied() -> None:
    arena = torch.arange(90.0)
    parts = [arena[10:40].view(6, 5), arena[40:55].view(3, 5), arena[55:70].view(3, 5)]
    together = joined(*parts)
    assert together.data_ptr() == parts[0].data_ptr()
    parts[2][2, 4] = -1
    assert together[11, 4] == -1


def test_with_a_gap_or_in_another_order_it_is_a_copy() -> None:
    arena = torch.arange(90.0)
    first, second, third = arena[:30].view(6, 5), arena[31:46].view(3, 5), arena[46:61].view(3, 5)
    joined(first, second, third)
    joined(third, second, first)
    joined(torch.ones(6, 5), torch.zeros(3, 5), torch.ones(3, 5))


def test_biases_are_joined_like_their_matrices_and_others_stay() -> None:
    roles = {name: torch.ones(2, 2) for name in ("q", "k", "v", "o")}
    roles |= {f"{name}_bias": torch.full((2,), float(i)) for i, name in enumerate("qkv")}
    (layer,) = DenseWeights.of({}, [roles]).layers
    assert layer.keys() == {"qkv", "qkv_bias", "o"}
    assert layer["qkv_bias"].tolist() == [0, 0, 1, 1, 2, 2]


def test_files_are_given_back_where_reading_fails(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    files = open_model(tiny_checkpoint("mixtral"), "float32")
    before = {*Path("/proc/self/fd").iterdir()}
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(StorageError):
        DenseWeights.load(files)
    assert {*Path("/proc/self/fd").iterdir()} == before
