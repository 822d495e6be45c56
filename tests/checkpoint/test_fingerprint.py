"""What distinguishes one checkpoint from another without reading all of it."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

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


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_a_model_of_which_only_one_kind_of_weights_was_trained_is_another_one(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Such as its routers, or what adapters have changed of its attention; in however large a
    file."""
    folder = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    kinds = {re.sub("[0-9]", "", name) for name in tensors}
    samples = set[str]()
    for kind in kinds:
        trained = {
            name: tensor + 1 if re.sub("[0-9]", "", name) == kind else tensor
            for name, tensor in tensors.items()
        }
        save_file(trained, folder / "model.safetensors")
        samples.add(weights_sample(Checkpoint.open(folder)))
    assert len(samples) == len(kinds) > 10


def test_small_and_split_files_have_one(tiny_checkpoint: Callable[..., Path]) -> None:
    split = Checkpoint.open(tiny_checkpoint("mixtral", max_shard_size="50KB"))
    assert len(split.files) > 1
    assert weights_sample(split) == weights_sample(split)
