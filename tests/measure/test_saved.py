"""The profile of a machine is kept by its name and read again as it was written."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moebatch.errors import ConfigError, StorageError
from moebatch.measure.saved import (
    load_saved,
    machine_profile,
    machine_profile_path,
    require_writable_file,
    save_profile,
    this_machine_path,
)
from moebatch.spec.machine.profile import HardwareProfile, load_profile


@pytest.fixture
def profile() -> HardwareProfile:
    return load_profile("generic-cpu")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/a"}, "/home/a/.cache/moebatch/hardware-node1.yaml"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}, "/c/moebatch/hardware-node1.yaml"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "relative"}, "/h/.cache/moebatch/hardware-node1.yaml"),
        ({"HOME": "/h", "XDG_CACHE_HOME": ""}, "/h/.cache/moebatch/hardware-node1.yaml"),
    ],
)
def test_it_is_kept_in_the_cache_of_the_user(environ: dict[str, str], expected: str) -> None:
    assert machine_profile_path(environ, "node1") == Path(expected)


def test_a_hostname_cannot_lead_out_of_the_folder() -> None:
    path = machine_profile_path({"HOME": "/h"}, "../../etc/x")
    assert path.parent == Path("/h/.cache/moebatch")


def test_what_is_saved_is_what_is_loaded(tmp_path: Path, profile: HardwareProfile) -> None:
    path = tmp_path / "new" / "hardware.yaml"
    save_profile(profile, path)
    loaded = load_saved(path)
    assert loaded is not None
    assert loaded.hardware() == profile.hardware()
    assert [file.name for file in path.parent.iterdir()] == ["hardware.yaml"]


def test_this_machine_is_looked_up_by_default(
    tmp_path: Path, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_saved() is None
    rough, notes = machine_profile()
    assert rough.name == "generic-cpu"
    assert "`moebatch profile` measures it" in notes[0]

    save_profile(replace(profile, name="node1"), this_machine_path())
    known, notes = machine_profile()
    assert known.name == "node1"
    assert notes == ()


def test_a_damaged_profile_is_told(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text("levels: 3\n")
    with pytest.raises(ConfigError, match=r"hardware\.yaml"):
        load_saved(path)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, profile: HardwareProfile) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        save_profile(profile, tmp_path / "file" / "hardware.yaml")
    with pytest.raises(StorageError, match="is a folder; give the path of a file"):
        require_writable_file(tmp_path)


def test_the_place_is_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "file" / "hardware.yaml")
    with pytest.raises(StorageError, match=r"link\.yaml: cannot be written"):
        require_writable_file(tmp_path / "link.yaml")
    (tmp_path / "link.yaml").unlink()
    (tmp_path / "link.yaml").symlink_to(tmp_path / "new" / "hardware.yaml")
    require_writable_file(tmp_path / "link.yaml")
    assert (tmp_path / "new").is_dir()


def test_a_pipe_needs_no_folder_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of ``/dev/stdout`` cannot."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    require_writable_file(pipe)
    with pytest.raises(StorageError, match="no permission"):
        require_writable_file(tmp_path / "hardware.yaml")


def test_a_read_only_file_system_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose folders may well have permissions for everybody."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(StorageError, match="cannot be written: the file system is read-only;"):
        require_writable_file(tmp_path / "hardware.yaml")
