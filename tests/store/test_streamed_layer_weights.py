"""Weights of layers in a few places, and what is below them."""

from pathlib import Path

import pytest
import torch

from moebatch.schedule.setup import NUM_LAYER_PLACES
from moebatch.spec.machine.levels import LevelName
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.streamed_layers import StreamedLayers

SIZES = {layer: 4096 * (1 + layer % 2) for layer in (0, 2, 3, 5, 6)}


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("level", ["dram", "vram"])
def test_a_layer_is_as_it_was_stored_whenever_it_is_brought(
    level: LevelName, tmp_path: Path
) -> None:
    memory = DeviceMemory(torch.device("cpu"), 2**20, level=level)
    layers = StreamedLayers(SIZES, memory, folder=tmp_path)
    assert memory.used_bytes == NUM_LAYER_PLACES * max(SIZES.values())
    given = {
        layer: {"up": torch.randn(5, 7) + layer, "down": torch.full((num_bytes // 16,), layer)}
        for layer, num_bytes in SIZES.items()
        if num_bytes > 4096
    }
    given |= {layer: {"up": torch.randn(8)} for layer in SIZES.keys() - given.keys()}
    laid = {layer: layers.store(layer, weights) for layer, weights in given.items()}
    for layer in (*SIZES, *reversed(SIZES)):
        layers.bring(layer)
        for role, weight in given[layer].items():
            assert laid[layer][role].equal(weight)
    layers.close()


def test_a_scratch_file_is_closed_and_none_is_made_below_a_gpu(tmp_path: Path) -> None:
    before = open_files()
    for level, more in (("dram", 1), ("vram", 0)):
        memory = DeviceMemory(torch.device("cpu"), 2**20, level=level)
        layers = StreamedLayers(SIZES, memory, folder=tmp_path)
        assert open_files() == before + more
        layers.close()
        assert open_files() == before
    assert not [*tmp_path.iterdir()]
