"""Whatever is measured is written so that it can be read, or told to be impossible."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError
from moebatch.formats.registry import FORMATS
from moebatch.measure.disk import DiskRates, PageTimes
from moebatch.measure.gpu import GpuRates
from moebatch.measure.machine import _Disk, _profile
from moebatch.measure.saved import load_saved, save_profile
from moebatch.spec.machine.hardware import Processor, RateCurve
from moebatch.spec.machine.profile import HardwareProfile
from moebatch.spec.machine.values import DURATION, LINK_RATE, MEMORY_RATE, SPEED, Quantity
from tests.few import examples


def numbers(quantity: Quantity) -> st.SearchStrategy[float]:
    """From one end of the range to the other, small ones as often as large ones."""
    low, high = quantity.least, quantity.most
    spread = st.floats(math.log(low), math.log(high)).map(math.exp)
    return spread.map(lambda number: min(max(number, low), high)) | st.sampled_from([low, high])


def curves(quantity: Quantity) -> st.SearchStrategy[RateCurve]:
    tables = st.dictionaries(st.integers(1, 2**20), numbers(quantity), min_size=1, max_size=4)
    return tables.map(lambda points: RateCurve(points=tuple(sorted(points.items()))))


ROOM = st.integers(0, 2**63 - 1)
"""What kernels say, from a full disk to file systems that have no idea."""
BY_DTYPE = st.fixed_dictionaries({"float32": curves(SPEED)}, optional={"bfloat16": curves(SPEED)})
PROCESSORS = st.builds(
    Processor,
    bandwidth=numbers(MEMORY_RATE),
    gemm=BY_DTYPE,
    attention_bandwidth=numbers(MEMORY_RATE),
    coded_attention=st.dictionaries(st.sampled_from(["int8", "fp8"]), numbers(MEMORY_RATE)),
    attention_flops=numbers(SPEED),
    sequence_s=st.floats(0.0, DURATION.least) | numbers(DURATION),
    elementwise_bandwidth=numbers(MEMORY_RATE),
    decoding=st.dictionaries(st.sampled_from(list(FORMATS)), curves(MEMORY_RATE)),
    launch_s=st.floats(0.0, DURATION.least) | numbers(DURATION),
    task_s=st.floats(0.0, DURATION.least) | numbers(DURATION),
    another_expert_s=st.floats(0.0, DURATION.least) | numbers(DURATION),
    pass_s=st.floats(0.0, DURATION.least) | numbers(DURATION),
    row_s=st.floats(0.0, DURATION.least) | numbers(DURATION),
    instruction_set=st.sampled_from(["", "avx2", "portable"]),
)
CHUNKS = st.lists(numbers(LINK_RATE), min_size=1, max_size=3).map(tuple)
DISKS = st.builds(
    _Disk,
    capacity_bytes=ROOM,
    read=st.builds(DiskRates, rates=CHUNKS, is_direct=st.booleans()),
    write=st.none() | numbers(LINK_RATE),
    pages=st.none() | st.builds(PageTimes, read_s=numbers(DURATION), write_s=numbers(DURATION)),
    streamed=BY_DTYPE | st.just({}),
)
GPUS = st.builds(
    GpuRates,
    title=st.just("A GPU"),
    free_bytes=ROOM,
    processor=PROCESSORS,
    upload=numbers(LINK_RATE),
    download=numbers(LINK_RATE),
    staging=numbers(LINK_RATE),
)


def profile_of(**parts: object) -> HardwareProfile:
    return _profile("by hand", parts["dram"], parts["cpu"], parts["disk"], parts["gpu"])  # type: ignore[arg-type]


PROFILES = st.builds(profile_of, dram=ROOM, cpu=PROCESSORS, disk=DISKS, gpu=st.none() | GPUS)


def figures(profile: HardwareProfile) -> dict[str, float]:
    """All single numbers by their places."""
    return {path: number for path, _, number in profile.numbers()}


@examples(50)
@given(profile=PROFILES)
def test_whatever_a_machine_can_measure_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile
) -> None:
    path = tmp_path_factory.getbasetemp() / "measured.yaml"
    profile.require_believable()
    save_profile(profile, path)
    loaded = load_saved(path)
    assert loaded is not None
    assert figures(loaded) == pytest.approx(figures(profile), rel=5.1e-4)
    assert loaded.hardware().dram.processor is not None


def plain() -> HardwareProfile:
    cpu = Processor(
        bandwidth=1e10,
        gemm={"float32": RateCurve(points=((1, 1e9), (24, 2e9)))},
        attention_bandwidth=1e10,
        attention_flops=1e9,
        sequence_s=1e-6,
        elementwise_bandwidth=1e9,
        decoding={"bfloat16": RateCurve(((1, 2e9), (4, 1e9)))},
        launch_s=1e-6,
        task_s=1e-5,
        another_expert_s=1e-6,
        pass_s=1e-5,
        row_s=1e-5,
        instruction_set="avx2",
    )
    disk = _Disk(
        capacity_bytes=10**12,
        read=DiskRates(rates=(1e9,), is_direct=True),
        write=1e9,
        pages=PageTimes(read_s=1e-4, write_s=1e-4),
        streamed=cpu.gemm,
    )
    gpu = GpuRates(
        title="a GPU", free_bytes=10**10, processor=cpu, upload=1e10, download=1e10, staging=1e10
    )
    return profile_of(dram=10**11, cpu=cpu, disk=disk, gpu=gpu)


@pytest.mark.parametrize("impossible", [0.0, -1.0, math.inf, math.nan])
def test_a_measurement_that_is_impossible_is_named_and_not_written(
    tmp_path: Path, impossible: float
) -> None:
    profile = plain()
    (_, upload), dram = profile.links.popitem(), profile.levels["dram"]
    curve = replace(dram.gemm["float32"], achieved=RateCurve(points=((1, 1e9), (24, impossible))))
    damaged = replace(
        profile,
        levels={**profile.levels, "dram": replace(dram, gemm={"float32": curve})},
        links={**profile.links, upload.name: replace(upload, staging=impossible)},
    )
    with pytest.raises(ConfigError) as caught:
        save_profile(damaged, tmp_path / "hardware.yaml")
    assert [fault.where for fault in caught.value.faults] == [
        "levels.dram.gemm.float32.achieved.24",
        f"links.{upload.name}.staging",
    ]
    speed, _ = (fault.message for fault in caught.value.faults)
    assert speed == (
        f"is {impossible:g}, not a speed from 1000FLOP/s to 1000000TFLOP/s; "
        "`moebatch profile` measures again"
    )
    assert not (tmp_path / "hardware.yaml").exists()


def test_what_runs_teach_is_written_only_if_it_can_be_read(tmp_path: Path) -> None:
    """A run corrects by what it has seen, again and again."""
    path, learnt = tmp_path / "hardware.yaml", plain()
    with pytest.raises(ConfigError, match=r"links\.disk->dram\.achieved: is 1, not a rate from"):
        save_profile(learnt.with_measured_link("disk->dram", 1.0, "a run"), path)
    with pytest.raises(ConfigError, match=r"levels\.dram\.gemm\.float32\.achieved\.1: is 953\.7,"):
        for _ in range(30):
            save_profile(learnt, path)
            assert load_saved(path) is not None
            learnt = learnt.with_scaled_level("dram", 0.25, "a run")
