"""What gates say is found again, token by token, by whoever opens the same files."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from moebatch.errors import StorageError
from moebatch.predict.gate_trace import GateRecorder, GateTrace
from moebatch.predict.predictor import PassTokens

LAYERS = (0, 2)


def opened(folder: Path, *, num_tokens: int = 6, hidden_size: int = 4) -> GateTrace:
    return GateTrace(
        folder,
        num_layers=len(LAYERS),
        num_tokens=num_tokens,
        experts_per_token=1,
        hidden_size=hidden_size,
    )


def tokens(places: list[int]) -> PassTokens:
    """Those at the places; they stand for themselves."""
    numbers, nothing = np.array(places), np.zeros(len(places), bool)
    return PassTokens(
        tokens_T=numbers,
        requests_T=numbers,
        choices_T=np.zeros_like(numbers),
        positions_T=numbers,
        is_first_T=nothing,
        is_last_T=nothing,
    )


def told(recorder: GateRecorder, layer: int, expert: int, count: int) -> None:
    recorder.observe(
        layer, slice(0, count), np.full((count, 1), expert), torch.full((count, 4), expert + 0.5)
    )


def test_a_portion_is_whole_when_all_gates_have_chosen_for_it_in_whatever_order(
    tmp_path: Path,
) -> None:
    trace, shares = opened(tmp_path), list[float]()
    recorder = GateRecorder(trace, LAYERS, lambda some: some.positions_T, shares.append)
    recorder.begin(range(2, 5))
    recorder.begin_pass(2, tokens([4, 2]))
    told(recorder, 0, 9, 2)
    recorder.begin_pass(2, tokens([4, 2]))  # the one before was given up
    for layer in LAYERS:
        told(recorder, layer, 1, 2)
    assert not recorder.is_whole
    recorder.begin_pass(3, tokens([0, 1, 3]))  # the first two belong to an earlier portion
    for layer in LAYERS:
        told(recorder, layer, 2, 3)
    assert recorder.is_whole
    assert shares == sorted(shares) and shares[-1] == 5 / 6
    again = opened(tmp_path)
    assert again.experts_LNK[:, :, 0].tolist() == [[0, 0, 1, 2, 1, 0]] * 2
    assert again.hidden_LND[1, :, 3].tolist() == [0, 0, 1.5, 2.5, 1.5, 0]
    sums = trace.checksum(range(2, 4)), trace.checksum(range(2, 5))
    again.hidden_LND[1, 4, 0] = 7
    assert again.checksum(range(2, 4)) == sums[0]
    assert again.checksum(range(2, 5)) != sums[1]


def test_files_of_another_size_are_made_anew(tmp_path: Path) -> None:
    opened(tmp_path).experts_LNK[:] = 3
    assert not opened(tmp_path, num_tokens=7).experts_LNK.any()


def test_who_learns_nothing_keeps_no_hidden_states(tmp_path: Path) -> None:
    assert opened(tmp_path, hidden_size=0).num_hidden == 0
    assert [path.name for path in tmp_path.iterdir()] == ["experts"]


def test_a_disk_without_room_is_told_before_the_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match=r"no room left: .* to write"):
        opened(tmp_path)
    assert not list(tmp_path.iterdir())
