"""The file beside the model: round trip, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.errors import CheckpointError, StorageError
from moebatch.predict.learnt_files import TABLE, load_table, save_table
from moebatch.predict.path_table import PathTable
from tests.predict.test_path_table import pencil_table

OWNER = ModelOwner(
    folder=Path("/my models/mixtral"),
    fingerprint="abc",
    moe_layers=(0, 1),
    num_experts=3,
    experts_per_token=2,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_table(tmp_path / "table.safetensors", pencil_table(), OWNER)
    return tmp_path / "table.safetensors"


def change(path: Path, counts: dict[str, Any] | None = None, **description: object) -> None:
    """Writes the file again with other arrays or another description."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    known = json.loads(header["__metadata__"]["moebatch"]) | description
    arrays = load(content) if counts is None else counts
    path.write_bytes(save(arrays, metadata={"moebatch": json.dumps(known)}))


def refused(path: Path, owner: ModelOwner = OWNER) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_table(path, owner)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.endswith("; run `moebatch calibrate '/my models/mixtral' --text FILE`")
    return message


def test_it_is_kept_beside_the_model() -> None:
    assert TABLE.path(Path("/m")) == Path("/m/moebatch/correlation.safetensors")


@pytest.mark.parametrize("path_length", [1, 2])
def test_a_table_comes_back_as_it_was(tmp_path: Path, path_length: int) -> None:
    path, table = tmp_path / "table.safetensors", replace(pencil_table(path_length), num_tokens=4)
    save_table(path, table, OWNER)
    again = load_table(path, OWNER)
    assert (again.path_length, again.num_tokens) == (path_length, 4)
    for one, other in zip(table.counts, again.counts, strict=True):
        assert np.array_equal(one, other)


def test_what_was_read_can_be_counted_into_without_touching_the_file(path: Path) -> None:
    before = path.read_bytes()
    table = load_table(path, OWNER)
    table.add_pass(np.array([[[0, 1]], [[0, 1]]]))
    assert table.counts[0][0, 0].tolist() == [4, 4, 2]
    assert path.read_bytes() == before


def test_the_table_of_another_model_is_refused(path: Path) -> None:
    for other in (
        replace(OWNER, fingerprint="abd"),
        replace(OWNER, moe_layers=(0, 2)),
        replace(OWNER, num_experts=4),
    ):
        assert "was made for another model" in refused(path, other)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.safetensors")


def test_a_cut_file_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])
    assert "truncated" in refused(path)


def test_files_of_another_kind_are_refused(path: Path) -> None:
    path.write_bytes(save({"x": np.zeros(3)}))
    assert "does not say what it holds" in refused(path)
    path.write_bytes(save({"x": np.zeros(3)}, metadata={"moebatch": '{"kind": "x"}'}))
    assert "is no correlation table" in refused(path)


def test_another_version_is_refused(path: Path) -> None:
    change(path, version=2)
    assert "is of version 2, this program reads 1" in refused(path)


def test_counts_that_are_not_as_described_are_refused(path: Path) -> None:
    marginal, pairs = pencil_table().counts
    change(path, {"paths.0": marginal, "paths.1": pairs[:, :2].copy()})
    assert "array 'paths.1' is uint32 [2, 2, 3], must be uint32 [2, 3, 3]" in refused(path)
    change(path, {"paths.0": marginal, "paths.1": pairs.astype(np.float32)})
    assert "array 'paths.1' is float32 [2, 3, 3], must be uint32" in refused(path)
    change(path, {"paths.0": marginal})
    assert "its description is damaged" in refused(path)
    change(path, {"paths.0": marginal, "paths.1": pairs}, num_tokens="many")
    assert "its description is damaged" in refused(path)


def test_a_place_that_cannot_be_written_is_an_error_of_storage(tmp_path: Path) -> None:
    table = PathTable.empty((0, 1), num_experts=3, experts_per_token=2)
    with pytest.raises(StorageError, match="cannot be written"):
        save_table(tmp_path / "no" / "such" / "folder", table, OWNER)
