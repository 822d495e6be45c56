"""What distinguishes one checkpoint from another without reading all of it."""

import shutil
from collections.abc import Callable
from pathlib import Path

from moebatch.checkpoint.fingerprint import weights_sample
from moebatch.checkpoint.index import Checkpoint


def test_other_weights_in_the_same_shapes_are_another_model(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = tiny_checkpoint("mixtral"), tiny_checkpoint("mixtral", seed=1)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (first, second)]
    assert sizes[0] == sizes[1]
    samples = {weights_sample(Checkpoint.open(folder)) for folder in (first, second)}
    assert len(samples) == 2
    shutil.copytree(first, tmp_path / "copy")
    assert weights_sample(Checkpoint.open(tmp_path / "copy")) in samples


def test_small_and_split_files_have_one(tiny_checkpoint: Callable[..., Path]) -> None:
    split = Checkpoint.open(tiny_checkpoint("mixtral", max_shard_size="50KB"))
    assert len(split.files) > 1
    assert weights_sample(split) == weights_sample(split)
