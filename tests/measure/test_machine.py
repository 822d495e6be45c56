"""The whole way from this machine to a profile, in tiny sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from moebatch.errors import ConfigError, StorageError
from moebatch.formats.ggml import decoded_types
from moebatch.formats.registry import FORMATS, measured_formats
from moebatch.layout.scratch import needs_matrix
from moebatch.measure import machine, processor
from moebatch.measure.between import BetweenPasses
from moebatch.measure.disk import PageTimes
from moebatch.measure.machine import _cpu_model, _disturbance, measure_machine
from moebatch.measure.saved import load_saved, save_profile
from moebatch.measure.sizes import Sizes, quick_sizes
from moebatch.model.native import loader
from moebatch.spec.machine.profile import HardwareProfile
from tests.measure.sizes import TINY, TINY_DISK

ONLY_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU adds a level and links")


def measure(
    folder: Path, read: Path | None = None, sizes: Sizes = TINY
) -> tuple[HardwareProfile, list[str]]:
    lines: list[str] = []
    with threads_given_back():
        profile = measure_machine(folder, read=read, num_threads=1, log=lines.append, sizes=sizes)
    return profile, lines


@contextmanager
def threads_given_back() -> Iterator[None]:
    """Sees to it that torch gets the threads that it shall measure with, and then its own."""
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as watching:
        watching.setattr(torch, "set_num_threads", asked.append)
        yield
    assert asked == [1, torch.get_num_threads()]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * TINY_DISK.extent_bytes))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@ONLY_CPU
def test_a_machine_is_measured_saved_and_planned_with(folder: Path, tmp_path: Path) -> None:
    profile, lines = measure(folder)
    assert set(profile.levels) == {"dram", "disk"}
    assert set(profile.links) == {"disk->dram", "dram->disk"}
    assert set(profile.levels["dram"].gemm) == set(TINY.dtypes)
    assert "1 thread on" in profile.method
    assert "mean of" in profile.links["disk->dram"].bandwidth.source
    assert all(link.operation_time for link in profile.links.values())
    assert any(line.startswith("GEMM bfloat16: ") and "at 24 rows" in line for line in lines)
    assert list(folder.iterdir()) == [], "the written file is removed"
    assert profile.hardware().dram.capacity_bytes > 0

    save_profile(profile, tmp_path / "hardware.yaml")
    loaded = load_saved(tmp_path / "hardware.yaml")
    assert loaded is not None
    assert yaml.safe_load(loaded.to_yaml()) == yaml.safe_load(profile.to_yaml())


def test_what_is_given_is_read_and_writing_is_measured_beside_it(
    folder: Path, weights: Path
) -> None:
    profile, _ = measure(folder, read=weights.parent)
    assert {"disk->dram", "dram->disk"} <= set(profile.links)
    assert weights.exists()


def test_a_folder_that_cannot_be_written_costs_the_rate_of_writing_only(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    profile, lines = measure(tmp_path, read=weights)
    assert "dram->disk" not in profile.links
    assert any("not measured" in line and "Read-only" in line for line in lines)
    with pytest.raises(StorageError, match="Read-only"):
        measure(tmp_path)


def test_a_failure_leaves_no_file_and_no_threads_changed(folder: Path) -> None:
    too_large = replace(TINY, disk=replace(TINY_DISK, extent_bytes=2**28))
    with threads_given_back(), pytest.raises(ConfigError, match="too short"):
        measure_machine(folder, num_threads=1, log=print, sizes=too_large)
    assert list(folder.iterdir()) == []


@ONLY_CPU
def test_without_writing_and_reading_the_disk_has_room_and_no_rates(folder: Path) -> None:
    profile, _ = measure(folder, sizes=replace(TINY, is_written=False, dtypes=("float32",)))
    assert profile.links == {}
    assert "disk" in profile.levels
    assert set(profile.levels["dram"].gemm) == {"float32"}


@ONLY_CPU
def test_what_takes_no_time_is_planned_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without figures a plan would count a millisecond for a pass, and more for the rest."""
    monkeypatch.setattr(processor, "between_passes", lambda *_: BetweenPasses(0.0, 0.0))
    monkeypatch.setattr(processor, "another_expert_s", lambda *_: 0.0)
    profile, _ = measure(folder, sizes=replace(TINY, dtypes=("float32",), formats=()))
    save_profile(profile.with_scaled_level("dram", 2.0, "a run"), tmp_path / "hardware.yaml")
    for measured in (profile, load_saved(tmp_path / "hardware.yaml")):
        cpu = measured.hardware().dram.processor if measured else None
        assert cpu is not None
        assert max(cpu.pass_s, cpu.row_s, cpu.another_expert_s) <= 1e-9


@ONLY_CPU
def test_reading_a_page_and_writing_one_belong_to_their_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = PageTimes(read_s=0.001, write_s=0.002)
    monkeypatch.setattr(machine, "page_times", lambda folder: times)
    profile, _ = measure(folder, sizes=replace(TINY, dtypes=("float32",)))
    found = [profile.links[link].operation_time for link in ("disk->dram", "dram->disk")]
    assert found == [0.001, 0.002]


@ONLY_CPU
def test_what_the_disk_gives_beside_arithmetic_counts_as_well(
    folder: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def beside(paths: object, sizes: object, rates: list[float]) -> Iterator[None]:
        yield
        rates.append(1e5)  # a chunk that came slower than any disk is

    monkeypatch.setattr(machine, "reading_beside", beside)
    sizes = replace(TINY, is_written=False, dtypes=("float32",))
    profile, _ = measure(folder, read=weights, sizes=sizes)
    found = profile.links["disk->dram"].bandwidth
    assert found is not None and "chunks from 100 kB/s to" in found.source


@ONLY_CPU
def test_decoding_is_measured_of_every_format(folder: Path) -> None:
    sizes = replace(TINY, is_written=False, dtypes=("bfloat16", "float32"))
    profile, lines = measure(folder, sizes=sizes)
    known = (*measured_formats(), *decoded_types())
    measured = {stored.measured_as for stored in known} - {"float32"}
    assert {"gguf q4_k", "gguf iq4_xs", "gptq int4", "gptq int4, ordered"} <= measured
    assert {"bitsandbytes nf4", "bitsandbytes nf4, scales in 8 bits"} <= measured
    wanted = measured if loader.kernels() else set()
    assert set(profile.levels["dram"].decoding) == wanted
    assert any("weights decoded: bfloat16 " in line for line in lines) == bool(wanted)
    dram = profile.levels["dram"]
    for stored in known:
        if stored.measured_as in dram.decoding:
            # Where a matrix is decoded before it is multiplied, one rate is enough.
            is_whole = needs_matrix(stored, "bfloat16", dram.instruction_set)
            points = dram.decoding[stored.measured_as].on("achieved").points
            assert [rows for rows, _ in points] == ([1] if is_whole else [1, 5]), stored


def test_quick_writes_nothing_and_measures_one_dtype_at_few_points() -> None:
    quick, full = quick_sizes(("float16",), (FORMATS["fp8"],)), Sizes()
    assert not quick.is_written
    assert quick.dtypes == ("float16",)
    assert quick.attention_dtype == "float16"
    assert quick.formats == (FORMATS["fp8"],)
    assert set(quick.formats) < set(full.formats)
    assert len(quick.gemm_rows) <= 4
    assert set(quick.gemm_rows) <= set(full.gemm_rows)
    assert len(quick.decode_sequences) * len(quick.decode_contexts) <= 2
    assert quick.disk.read_s < full.disk.read_s


def test_the_model_of_the_cpu_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast  CPU @ 3.00GHz\n")
    assert _cpu_model(tmp_path) == "Fast CPU @ 3.00GHz"
    cpuinfo.write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    assert _cpu_model(tmp_path)


def test_a_disturbed_measurement_says_so() -> None:
    assert _disturbance(0.01) == ""
    assert "for 31% of the time" in _disturbance(0.31)
