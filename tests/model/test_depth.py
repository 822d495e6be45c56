"""What Beam has to do with positions and depth, against transformers' own functions."""

from collections.abc import Callable
from pathlib import Path

import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.model.rope import Rope


def test_queries_grow_with_their_positions(tiny_checkpoint: Callable[..., Path]) -> None:
    from transformers.models.beam.modeling_beam import compute_attention_scaling

    files = open_model(tiny_checkpoint("beam"), "float32")
    sliding, whole = Rope.by_layer(files.shape, files.config, torch.device("cpu"))[:2]
    positions_T = torch.tensor([0, 1, 96, 2047, 8191, 500_000])
    angles = whole.angles(positions_T, positions_T + 1, torch.float32)
    expected = compute_attention_scaling(positions_T[None])[0, 0, :, :, None]
    assert angles.query_scales_T11 is not None and angles.cos_TR.shape[1] == 0
    torch.testing.assert_close(angles.query_scales_T11, expected)
    assert sliding.angles(positions_T, positions_T + 1, torch.float32).query_scales_T11 is None
