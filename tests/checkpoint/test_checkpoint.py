"""Model folders as they come, and as an attacker would make them."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moebatch.checkpoint.index import INDEX_NAME, SINGLE_NAME, Checkpoint, file_inside
from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError, StorageError
from moebatch.formats.plain import FLOAT32
from moebatch.formats.weight_format import StoredPart
from tests.reliability.faulty_os import FaultyOs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two shards with an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(2, 3)}, folder / "one.safetensors")
    save_file({"b": torch.ones(4, 2, 2)}, folder / "two.safetensors")
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def required(**shapes: tuple[int, ...]) -> list[StoredPart]:
    return [part for name, shape in shapes.items() for part in FLOAT32.parts(name, shape)]


def test_reads_shards_through_the_index(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.extent("a").path.name == "one.safetensors"
    checkpoint.require(required(a=(2, 3), b=(4, 2, 2)))


def test_a_single_file_counts_more_than_an_index_as_in_transformers(folder: Path) -> None:
    save_file({"a": torch.ones(5)}, folder / SINGLE_NAME)
    (folder / "two.safetensors").unlink()  # the index is of an earlier version
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.extent("a").path.name == SINGLE_NAME
    checkpoint.require(required(a=(5,)))


def test_a_slice_is_its_part_of_the_tensor(folder: Path) -> None:
    save_file({"b": torch.arange(16.0).view(4, 2, 2)}, folder / "two.safetensors")
    extent = Checkpoint.open(folder).extent("b", 2)
    content = extent.path.read_bytes()[extent.offset : extent.offset + extent.num_bytes]
    assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == [8, 9, 10, 11]
    assert extent.shape == (2, 2)


@pytest.mark.parametrize(
    "name",
    ["../one.safetensors", "/etc/passwd.safetensors", "x/../one.safetensors", "a\\b.safetensors"],
)
def test_the_index_cannot_reach_outside_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "one.safetensors").write_bytes((folder / "one.safetensors").read_bytes())
    write_index(folder, {"a": name})
    with pytest.raises(CheckpointError, match="must not contain a path"):
        Checkpoint.open(folder)


def test_a_link_cannot_reach_outside_the_folder(folder: Path) -> None:
    outside = folder.parent / "secret.safetensors"
    (folder / "one.safetensors").rename(outside)
    (folder / "one.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads outside the model folder"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("place", ["abc", "abc/Q4_K_M"])
def test_links_of_the_hugging_face_cache_work(folder: Path, tmp_path: Path, place: str) -> None:
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots" / place
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(folder.iterdir()):
        file.rename(blobs / f"{i:064x}")
        (snapshot / file.name).symlink_to(Path(os.path.relpath(blobs, snapshot), f"{i:064x}"))
    assert set(Checkpoint.open(snapshot).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ({}, "empty"),
        ([], "empty"),
        ({"a": 3}, "not a file name"),
        ({"a": "model.bin"}, "not a safetensors file"),
        ({"a": "gone.safetensors"}, "'gone.safetensors' is missing"),
        ({"c": "one.safetensors"}, "places 'c' in 'one.safetensors', it is not there"),
    ],
)
def test_refuses_a_broken_index(folder: Path, weight_map: object, message: str) -> None:
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_refuses_an_index_that_is_not_json(folder: Path) -> None:
    (folder / INDEX_NAME).write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Checkpoint.open(folder)


def test_refuses_pickles_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickles only \(pytorch_model.bin\)"):
        Checkpoint.open(tmp_path)


def test_an_empty_folder_and_a_missing_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is this a model folder"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such model folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_shards_without_their_index_are_told_from_no_model(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"index.json' is missing.*00001-of-00002"):
        Checkpoint.open(tmp_path)


def test_what_is_no_model_folder_is_told_from_one(tmp_path: Path) -> None:
    file = tmp_path / SINGLE_NAME
    file.touch()
    with pytest.raises(CheckpointError, match=f"{SINGLE_NAME}: is a file; name its folder"):
        open_model(file, "auto")
    with pytest.raises(CheckpointError, match="nowhere: no such model folder"):
        open_model(tmp_path / "nowhere", "auto")
    with pytest.raises(CheckpointError, match=r"file 'nothing\.gguf' is missing"):
        open_model(tmp_path / "nothing.gguf", "auto")
    revision = tmp_path / "models--a--b" / "snapshots" / "5f0c"
    revision.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=re.escape(f"one of its snapshots ({revision})")):
        open_model(tmp_path / "models--a--b", "auto")


def test_a_folder_that_may_not_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(CheckpointError, match="model: cannot be read: Permission denied"):
        open_model(folder, "auto")


def test_tensors_that_do_not_match_the_configuration_are_listed_together(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "i": torch.zeros(2).int()}, tmp_path / SINGLE_NAME)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path).require(required(a=(3, 3), b=(1,), i=(2,)))
    message = str(caught.value)
    assert "tensor a has shape [2, 3], expected [3, 3]" in message
    assert "tensor b is missing" in message
    assert "tensor i is I32, expected F32; numbers without scales may be F32, BF16, F16" in message


def test_a_truncated_shard_is_found_before_anything_runs(folder: Path) -> None:
    content = (folder / "two.safetensors").read_bytes()
    (folder / "two.safetensors").write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match=r"two.safetensors: .*truncated"):
        Checkpoint.open(folder)


def test_a_disk_that_fails_is_no_fault_of_the_folder(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint("mixtral", num_hidden_layers=1)
    counting = FaultyOs([folder], -1, "fails")
    with counting.in_force():
        open_model(folder, "auto")
    for number in range(1, counting.num_operations + 1):
        with (
            pytest.raises(StorageError, match="Input/output error"),
            FaultyOs([folder], number, "fails").in_force(),
        ):
            open_model(folder, "auto")


@pytest.mark.parametrize("name", ["m" * 5000, "loop.safetensors"])
def test_names_that_the_system_refuses_are_a_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    with pytest.raises(CheckpointError):
        file_inside(tmp_path, name)


@pytest.mark.parametrize("text", ['{"weight_map": {"\\ud800": "one.safetensors"}}', "[" * 10**5])
def test_an_index_of_no_text_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: is not JSON: ") as caught:
        Checkpoint.open(folder)
    str(caught.value).encode()


def test_an_index_of_a_hundred_megabytes_is_not_read(folder: Path) -> None:
    with (folder / INDEX_NAME).open("wb") as file:
        file.truncate(10**8 + 1)
    with pytest.raises(CheckpointError, match=r"is longer than 95\.4 MiB, the most that is read"):
        Checkpoint.open(folder)


def test_what_an_index_names_commands_no_terminal(folder: Path) -> None:
    write_index(folder, {"a\x1b[2J": "one.safetensors", "b": "\x1b[2J.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "\x1b" not in str(caught.value)
