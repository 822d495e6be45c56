"""Hardware profiles: what their figures mean, and every sentence a file may be refused with."""

import math
import re
import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError, Fault
from moebatch.formats.registry import FORMATS
from moebatch.spec.files.library import names
from moebatch.spec.machine.hardware import Basis, Hardware, Processor, RateCurve
from moebatch.spec.machine.levels import LevelFigures, LinkFigures, beside_rate
from moebatch.spec.machine.profile import HardwareProfile, load_profile
from moebatch.spec.machine.values import (
    DISK_SIZE,
    DRAM_SIZE,
    DURATION,
    LINK_RATE,
    MEMORY_RATE,
    SPEED,
    VRAM_SIZE,
    CurveFigure,
    Figure,
    Quantity,
)

GIB = 2.0**30
PLAIN = """
name: mine
source: measured
levels:
  vram:
    devices: 2
    capacity: {peak: 16GB, achieved: 15GiB}
    bandwidth: {peak: 320GB/s, achieved: 250GB/s, paper: 300GiB/s}
    gemm:
      float16: {peak: 65TFLOP/s, achieved: {16: 1TFLOP/s, 64: 20TFLOP/s}}
  dram:
    capacity: {achieved: 100GiB}
    bandwidth: {peak: 100GB/s}
    gemm: {float32: {achieved: 1TFLOP/s}, bfloat16: {peak: 4TFLOP/s, paper: 3TFLOP/s}}
    attention_bandwidth: {achieved: 43GB/s}
    attention_flops: {achieved: 0.1TFLOP/s}
    elementwise_bandwidth: {achieved: 4GB/s}
    sequence_time: {achieved: 50us}
  disk:
    capacity: {peak: 1000000000000}
links:
  disk->dram: {achieved: 2GB/s}
  dram->vram: {peak: 15.75GB/s, achieved: 12GB/s, staging: 7.2GB/s}
  vram->dram: {peak: 15.75GB/s}
"""


def load(tmp_path: Path, text: str) -> HardwareProfile:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_profile(path)


def faults(tmp_path: Path, text: str) -> list[Fault]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert all(fault.file == str(tmp_path / "mine.yaml") for fault in caught.value.faults)
    return list(caught.value.faults)


def processor(hardware: Hardware, level: str) -> Processor:
    found = hardware.levels[level].processor  # type: ignore[index]
    assert found is not None
    return found


class TestMeaning:
    def test_achieved_falls_back_to_the_data_sheet(self, tmp_path: Path) -> None:
        hardware = load(tmp_path, PLAIN).hardware()
        vram, dram = processor(hardware, "vram"), processor(hardware, "dram")
        assert hardware.vram is not None
        assert (hardware.vram.capacity_bytes, hardware.vram.num_devices) == (15 * 2**30, 2)
        assert (vram.bandwidth, dram.bandwidth) == (250e9, 100e9)
        assert vram.gemm["float16"].points == ((16, 1e12), (64, 20e12))
        assert (dram.gemm["float32"].at(7), dram.gemm["bfloat16"].at(7)) == (1e12, 4e12)
        assert hardware.links["vram->dram"].bandwidth == 15.75e9
        assert hardware.disk is not None
        assert (hardware.disk.capacity_bytes, hardware.disk.processor) == (10**12, None)
        assert "dram->disk" not in hardware.links

    def test_peak_falls_back_to_what_was_measured(self, tmp_path: Path) -> None:
        hardware = load(tmp_path, PLAIN).hardware("peak")
        assert processor(hardware, "vram").bandwidth == 320e9
        assert processor(hardware, "vram").gemm["float16"] == RateCurve(points=((1, 65e12),))
        assert processor(hardware, "dram").gemm["float32"].peak == 1e12
        assert hardware.dram.capacity_bytes == 100 * 2**30

    def test_paper_falls_back_to_peak_and_then_to_achieved(self, tmp_path: Path) -> None:
        hardware = load(tmp_path, PLAIN).hardware("paper")
        assert processor(hardware, "vram").bandwidth == 300 * GIB
        assert processor(hardware, "dram").gemm["bfloat16"].peak == 3e12
        assert hardware.links["dram->vram"].bandwidth == 15.75e9
        assert hardware.links["disk->dram"].bandwidth == 2e9

    def test_staging_is_something_measured(self, tmp_path: Path) -> None:
        profile = load(tmp_path, PLAIN)
        assert profile.hardware().links["dram->vram"].staging_bandwidth == 7.2e9
        assert profile.hardware("peak").links["dram->vram"].staging_bandwidth is None
        assert profile.hardware("paper").links["dram->vram"].staging_bandwidth is None

    def test_what_a_processor_does_not_say_follows_from_the_rest(self, tmp_path: Path) -> None:
        hardware = load(tmp_path, PLAIN).hardware()
        vram, dram = processor(hardware, "vram"), processor(hardware, "dram")
        assert (vram.attention_bandwidth, vram.elementwise_bandwidth) == (250e9, 250e9)
        assert (vram.attention_flops, vram.sequence_s) == (20e12, 0.0)
        assert (dram.attention_bandwidth, dram.elementwise_bandwidth) == (43e9, 4e9)
        assert (dram.attention_flops, dram.sequence_s) == (0.1e12, 50e-6)

    def test_it_admits_what_is_assumed(self, tmp_path: Path) -> None:
        profile = load(tmp_path, PLAIN)
        assert profile.assumed("achieved") == (
            "levels.dram.gemm.bfloat16",
            "levels.dram.bandwidth",
            "levels.disk.capacity",
            "links.vram->dram",
        )
        assert "levels.dram.attention_bandwidth" in profile.assumed("peak")
        assert "levels.vram.bandwidth" not in profile.assumed("paper")

    def test_sources_come_from_the_figure_or_from_the_top(self, tmp_path: Path) -> None:
        own = PLAIN.replace("{achieved: 2GB/s}", "{achieved: 2GB/s, source: a  guess}")
        profile = load(tmp_path, own)
        assert profile.links["disk->dram"].bandwidth.source == "a guess"
        assert profile.links["dram->vram"].bandwidth.source == "measured"
        by_method = load(tmp_path, PLAIN.replace("source: measured", "method: by hand"))
        assert by_method.links["dram->vram"].bandwidth.source == "by hand"

    def test_names_have_defaults(self, tmp_path: Path) -> None:
        profile = load(tmp_path, PLAIN.replace("name: mine", "date: 2026-11-21"))
        assert (profile.name, profile.title, profile.date) == ("mine", "mine", "2026-11-21")
        assert profile.path == str(tmp_path / "mine.yaml")


class TestLibrary:
    @pytest.mark.parametrize("name", names("hardware"))
    def test_every_profile_is_sound_and_says_where_figures_come_from(self, name: str) -> None:
        profile = load_profile(name)
        assert profile.name == name
        assert all(figure.source for *_, figure in profile.figures())
        assert profile.hardware().disk is not None
        assert "disk->dram" in profile.links
        for dtype in ("float32", "bfloat16", "float16"):
            for level in profile.hardware().levels.values():
                assert level.processor is None or level.processor.gemm_for(dtype).peak > 0

    @pytest.mark.parametrize("name", names("hardware"))
    def test_links_are_slower_than_the_memory_they_lead_to(self, name: str) -> None:
        hardware = load_profile(name).hardware()
        for link in hardware.links.values():
            assert link.bandwidth < processor(hardware, "dram").bandwidth

    @pytest.mark.parametrize(
        ("name", "m_g", "m_c", "b_g", "b_c", "b_cg", "p_g", "p_c"),
        [
            ("t4-moe-lightning", 15, 197880360960, 300, 76, 16, 65e12, 0.8e12),
            ("l4", 24, 197880360960, 285, 76, 16, 104e12, 1.6e12),
            ("2xt4", 30, 416 * 2**30, 600, 100, 16, 130e12, 0.8e12),
            ("4xt4", 60, 416 * 2**30, 1200, 100, 16, 260e12, 0.8e12),
        ],
    )
    def test_constants_of_moe_lightning(
        self,
        name: str,
        m_g: int,
        m_c: int,
        b_g: int,
        b_c: int,
        b_cg: int,
        p_g: float,
        p_c: float,
    ) -> None:
        hardware = load_profile(name).hardware("paper")
        gpu, cpu = processor(hardware, "vram"), processor(hardware, "dram")
        assert hardware.vram is not None
        assert (hardware.vram.capacity_bytes, hardware.dram.capacity_bytes) == (m_g * 2**30, m_c)
        assert (gpu.bandwidth, gpu.attention_bandwidth) == (b_g * GIB, b_g * GIB)
        assert (cpu.bandwidth, cpu.attention_bandwidth) == (b_c * GIB, b_c * GIB)
        assert hardware.links["dram->vram"].bandwidth == b_cg * GIB
        assert hardware.links["vram->dram"].bandwidth == b_cg * GIB
        for dtype in ("float16", "bfloat16"):
            assert gpu.gemm_for(dtype).at(1000) == p_g
            assert cpu.gemm_for(dtype).at(1000) == p_c
        assert (gpu.attention_flops, cpu.attention_flops) == (p_g, p_c)

    def test_several_devices_are_totals_of_one(self) -> None:
        one, four = load_profile("t4").hardware("peak"), load_profile("4xt4").hardware("peak")
        assert one.vram is not None and four.vram is not None
        assert (one.vram.num_devices, four.vram.num_devices) == (1, 4)
        assert four.vram.capacity_bytes == 4 * one.vram.capacity_bytes
        assert processor(four, "vram").bandwidth == 4 * processor(one, "vram").bandwidth
        assert four.links["dram->vram"].bandwidth == 4 * one.links["dram->vram"].bandwidth

    def test_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match=r"did you mean t4\? 'list' in its place shows all"):
            load_profile("t44")

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such file; give the path of a hardware profile"):
            load_profile(tmp_path / "mine.yaml")


RATES = "(units: B/s, KiB/s, MiB/s, MB/s, GiB/s, GB/s, TiB/s, TB/s)"
MEMORY = f"must be a rate such as 12.9GB/s, from 1000B/s to 100000TB/s {RATES}, got "
LINK = f"must be a rate such as 12.9GB/s, from 1000B/s to 100TB/s {RATES}, got "
SIZES = "(units: B, KiB, MiB, MB, GiB, GB, TiB, TB)"
VRAM = f"must be a size such as 15GiB, from 1MiB to 100TB {SIZES}, got "
SPEEDS = (
    "must be a speed such as 65TFLOP/s, from 1000FLOP/s to 1000000TFLOP/s "
    "(units: FLOP/s, MFLOP/s, GFLOP/s, TFLOP/s), got "
)
TIMES = "must be a duration such as 45us, from 1ns to 60s (units: ns, us, ms, s), got "
EXAMPLE = "must be a mapping such as {achieved: 12.9GB/s, source: measured}, got "
ASCENDING = "a table needs whole numbers of rows that ascend: {16: 65TFLOP/s, …}"
WRONG = [
    ("disk->dram: {achieved: 2GB/s}", "disk->dram: {achieved: 2}", ".achieved", LINK + "2"),
    ("{achieved: 2GB/s}", "{achieved: 2GB}", ".achieved", LINK + "'2GB'"),
    ("{achieved: 2GB/s}", "{achieved: 1B/s}", ".achieved", LINK + "'1B/s'"),
    ("{achieved: 2GB/s}", "{achieved: .nan}", ".achieved", LINK + "nan"),
    ("{achieved: 2GB/s}", "{achieved: true}", ".achieved", LINK + "true"),
    ("{achieved: 2GB/s}", "{achieved: }", ".achieved", LINK + "null"),
    ("{achieved: 2GB/s}", "{achieved: [2GB/s]}", ".achieved", LINK + "['2GB/s']"),
    ("{achieved: 2GB/s}", "2GB/s", "", EXAMPLE + "'2GB/s'"),
    ("{achieved: 2GB/s}", "", "", EXAMPLE + "null"),
    ("{achieved: 2GB/s}", "{}", "", "has no figure; give peak, achieved, paper or some of them"),
    ("{achieved: 2GB/s}", "{achieved: 2GB/s, source: 7}", ".source", "must be a text, got 7"),
    ("{achieved: 2GB/s}", '{achieved: 2GB/s, source: "\\e"}', ".source", "must be a text, got "),
    (
        "{achieved: 2GB/s}",
        "{acheived: 2GB/s, peak: 2GB/s}",
        ".acheived",
        "unknown key; did you mean links.disk->dram.achieved?",
    ),
    (
        "{achieved: 2GB/s}",
        "{peak: 2GB/s, speed: 2GB/s}",
        ".speed",
        "unknown key; allowed are peak, achieved, paper, operation_time, source",
    ),
    (
        "{achieved: 2GB/s}",
        "{achieved: 2GB/s, peak: 1.3GB/s}",
        ".achieved",
        "is 2GB/s, more than 1.5 times the peak of 1.3GB/s; one must be wrong",
    ),
    ("staging: 7.2GB/s", "staging: 7.2", "links.dram->vram.staging", LINK + "7.2"),
    ("320GB/s", "0GB/s", "levels.vram.bandwidth.peak", MEMORY + "'0GB/s'"),
    ("320GB/s", "-1GB/s", "levels.vram.bandwidth.peak", MEMORY + "'-1GB/s'"),
    ("320GB/s", "65TFLOP/s", "levels.vram.bandwidth.peak", MEMORY + "'65TFLOP/s'"),
    ("320GB/s", "1000000TB/s", "levels.vram.bandwidth.peak", MEMORY + "'1000000TB/s'"),
    ("peak: 16GB,", "peak: 1000000TB,", "levels.vram.capacity.peak", VRAM + "'1000000TB'"),
    ("peak: 16GB,", "peak: 16.0,", "levels.vram.capacity.peak", VRAM + "16.0"),
    ("peak: 16GB,", "peak: 24,", "levels.vram.capacity.peak", VRAM + "24"),
    (
        "achieved: 15GiB",
        "achieved: 24GiB",
        "levels.vram.capacity.achieved",
        "is 24GiB, more than 1.1 times the peak of 16GB; one must be wrong",
    ),
    ("65TFLOP/s", "65GB/s", "levels.vram.gemm.float16.peak", SPEEDS + "'65GB/s'"),
    ("20TFLOP/s}", "20}", "levels.vram.gemm.float16.achieved.64", SPEEDS + "20"),
    ("{16: 1T", "{64: 1T", "levels.vram.gemm.float16.achieved.64", "given twice, first in line 10"),
    ("{16: 1T", "{65: 1T", "levels.vram.gemm.float16.achieved", ASCENDING),
    ("{16: 1T", "{0: 1T", "levels.vram.gemm.float16.achieved", ASCENDING),
    ("{16: 1T", "{1.5: 1T", "levels.vram.gemm.float16.achieved", ASCENDING),
    ("{16: 1T", "{few: 1T", "levels.vram.gemm.float16.achieved", ASCENDING),
    ("{16: 1TFLOP/s, 64: 20TFLOP/s}", "{}", "levels.vram.gemm.float16.achieved", ASCENDING),
    (
        "64: 20TFLOP/s}",
        "64: 100TFLOP/s}",
        "levels.vram.gemm.float16.achieved",
        "is 100TFLOP/s, more than 1.5 times the peak of 65TFLOP/s; one must be wrong",
    ),
    ("50us", "50", "levels.dram.sequence_time.achieved", TIMES + "50"),
    ("50us", "90s", "levels.dram.sequence_time.achieved", TIMES + "'90s'"),
    (
        "devices: 2",
        "devices: 0",
        "levels.vram.devices",
        "must be a whole number from 1 to 1024, got 0",
    ),
    (
        "    bandwidth: {peak: 100GB/s}\n",
        "",
        "levels.dram.bandwidth",
        "is missing; write it like {",
    ),
    (
        "    capacity: {achieved: 100GiB}\n",
        "",
        "levels.dram.capacity",
        "is missing; write it like {",
    ),
    (
        "{float32: {achieved: 1TFLOP/s}, bfloat16: {peak: 4TFLOP/s, paper: 3TFLOP/s}}",
        "{}",
        "levels.dram.gemm",
        "needs at least one of float32, bfloat16, float16",
    ),
    (
        "{float32: {",
        "{float64: {peak: 1TFLOP/s}, float32: {",
        "levels.dram.gemm.float64",
        "unknown key; did you mean levels.dram.gemm.float",
    ),
    (
        "    capacity: {peak: 1000000000000}",
        "    capacity: {peak: 1000000000000}\n    bandwidth: {peak: 1GB/s}",
        "levels.disk.bandwidth",
        "unknown key; how fast a disk is stands under links.disk->dram",
    ),
    ("  disk->dram: {achieved: 2GB/s}\n", "", "links.disk->dram", "is missing; levels.disk cannot"),
    ("  vram->dram: {peak: 15.75GB/s}\n", "", "links.vram->dram", "is missing; levels.vram cannot"),
    (
        "  disk:\n    capacity: {peak: 1000000000000}\n",
        "",
        "links.disk->dram",
        "leads nowhere, since levels.disk is missing; add it or drop this",
    ),
    (
        "links:",
        "links:\n  vram->disk: {peak: 1GB/s}",
        "links.vram->disk",
        "unknown key; did you mean links.",
    ),
    ("name: mine", "nam: mine", "nam", "unknown key; did you mean name?"),
    ("name: mine", "name: 4090", "name", "must be a text, got 4090"),
    ("name: mine", 'title: "\\e[31mred"', "title", "must be a text, got '\\x1b[31mred'"),
    ("source: measured", "source: ''", "source", "must be a text, got ''"),
]


class TestRefusal:
    @pytest.mark.parametrize(("old", "new", "where", "message"), WRONG)
    def test_one_fault(self, tmp_path: Path, old: str, new: str, where: str, message: str) -> None:
        assert PLAIN.count(old) == 1, "the case must change one place"
        text = PLAIN.replace(old, new)
        found = faults(tmp_path, text)
        assert len(found) == 1, found
        expected = f"links.disk->dram{where}" if where[:1] in ("", ".") else where
        assert found[0].where == expected
        assert found[0].message.startswith(message)
        assert found[0].line is not None
        key = expected.split(".")[-1]
        is_missing = key not in text or "is missing" in found[0].message
        assert is_missing or key in text.splitlines()[found[0].line - 1]

    def test_all_faults_at_once_in_order(self, tmp_path: Path) -> None:
        text = "titel: x\nlevels:\n  vram: {capacity: 3}\n  disk: null\nlinks: [1]\n"
        found = [(f.line, f.where) for f in faults(tmp_path, text)]
        assert found == [
            (1, "titel"),
            (2, "levels"),
            (3, "levels.vram.capacity"),
            (3, "levels.vram.gemm"),
            (3, "levels.vram.bandwidth"),
            (4, "levels.disk"),
            (5, "links"),
        ]

    def test_every_figure_needs_a_source(self, tmp_path: Path) -> None:
        found = faults(tmp_path, PLAIN.replace("source: measured", "date: today"))
        assert len(found) == len(list(load(tmp_path, PLAIN).figures()))
        message = "is missing; say where the figure comes from, here or at the top"
        assert {fault.message for fault in found} == {message}

    def test_dram_is_always_there(self, tmp_path: Path) -> None:
        messages = [f.message for f in faults(tmp_path, "name: x\n")]
        assert messages == ["is missing; add it with vram, dram, disk"]
        found = faults(tmp_path, "name: x\nlevels: {}\n")
        expected = "needs dram, the main memory, where everything passes through"
        assert [(f.line, f.where, f.message) for f in found] == [(2, "levels", expected)]

    @given(
        text=st.text(string.printable + "é\u2028\x85", max_size=40),
        line=st.integers(0, len(PLAIN.splitlines()) - 1),
    )
    def test_any_damage_is_a_fault_or_a_profile(
        self, tmp_path_factory: pytest.TempPathFactory, text: str, line: int
    ) -> None:
        lines = PLAIN.splitlines()
        lines[line] = lines[line].partition(":")[0] + ": " + text
        path = tmp_path_factory.getbasetemp() / "damaged.yaml"
        path.write_text("\n".join(lines), encoding="utf-8")
        try:
            load_profile(path).hardware()
        except ConfigError as error:
            assert error.faults


class TestChange:
    def profile(self, tmp_path: Path) -> HardwareProfile:
        return load(tmp_path, PLAIN)

    @pytest.mark.parametrize("basis", ["achieved", "peak", "paper"])
    def test_figures_change_on_every_basis(self, tmp_path: Path, basis: str) -> None:
        changed = self.profile(tmp_path)
        for text in ("dram=416GiB", "dram->vram = 25GB/s", "vram.bandwidth=600GB/s"):
            changed = changed.with_change(text)
        hardware = changed.with_change("dram.gemm=3TFLOP/s").hardware(basis)  # type: ignore[arg-type]
        assert hardware.dram.capacity_bytes == 416 * 2**30
        assert hardware.links["dram->vram"].bandwidth == 25e9
        assert processor(hardware, "vram").bandwidth == 600e9
        assert {c.at(100) for c in processor(hardware, "dram").gemm.values()} == {3e12}

    def test_a_curve_keeps_its_form(self, tmp_path: Path) -> None:
        changed = self.profile(tmp_path).with_change("vram.gemm=40TFLOP/s")
        assert processor(changed.hardware(), "vram").gemm["float16"].points == (
            (16, 2e12),
            (64, 40e12),
        )
        assert processor(changed.hardware("peak"), "vram").gemm["float16"].at(16) == 40e12

    def test_nothing_else_changes(self, tmp_path: Path) -> None:
        profile = self.profile(tmp_path)
        changed = profile.with_change("dram.capacity=1TiB")
        assert changed.levels["dram"].capacity.source == "--what-if"
        restored = replace(changed.levels["dram"], capacity=profile.levels["dram"].capacity)
        assert replace(changed, levels={**changed.levels, "dram": restored}) == profile

    def test_a_missing_figure_is_added(self, tmp_path: Path) -> None:
        changed = self.profile(tmp_path).with_change("vram.attention_bandwidth=100GB/s")
        changed = changed.with_change("vram.sequence_time=10us").with_change("dram->disk=1GB/s")
        vram = processor(changed.hardware(), "vram")
        assert (vram.attention_bandwidth, vram.sequence_s) == (100e9, 10e-6)
        assert changed.hardware("peak").links["dram->disk"].bandwidth == 1e9

    def test_staging_is_a_figure_of_its_own(self, tmp_path: Path) -> None:
        faster = self.profile(tmp_path).with_change("dram->vram=25GB/s")
        assert faster.hardware().links["dram->vram"].staging_bandwidth == 7.2e9
        both = faster.with_change("dram->vram.staging=20GB/s")
        assert both.hardware().links["dram->vram"].staging_bandwidth == 20e9
        assert both.hardware().links["dram->vram"].bandwidth == 25e9

    def test_operations_of_a_disk_take_a_usual_time_where_a_profile_does_not_say(self) -> None:
        links = load_profile("h100-pcie").hardware().links
        assert links["disk->dram"].operation_s == 1e-4
        assert links["dram->vram"].operation_s == 0.0
        measured = load_profile("h100-pcie").with_change("disk->dram.operation_time=50us")
        assert measured.hardware().links["disk->dram"].operation_s == 50e-6

    def test_one_expert_more_takes_a_quarter_of_a_task_where_a_profile_does_not_say(self) -> None:
        def another_expert_s(*changes: str) -> float:
            profile = load_profile("t4")
            for change in changes:
                profile = profile.with_change(change)
            vram = profile.hardware().vram
            assert vram is not None and vram.processor is not None
            return vram.processor.another_expert_s

        assert another_expert_s() == pytest.approx(10e-6)
        assert another_expert_s("vram.task_time=20us") == pytest.approx(5e-6)
        assert another_expert_s("vram.expert_time=7us", "vram.task_time=20us") == pytest.approx(
            7e-6
        )

    @pytest.mark.parametrize("basis", ["peak", "paper"])
    def test_what_stands_beside_a_rate_is_supposed_on_every_basis(self, basis: Basis) -> None:
        before = load_profile("h100-pcie")
        after = before.with_change("dram->vram.staging=1GB/s")
        after = after.with_change("disk->dram.operation_time=50us")
        told = [
            (links["dram->vram"].staging_bandwidth, links["disk->dram"].operation_s)
            for links in (before.hardware(basis).links, after.hardware(basis).links)
        ]
        assert told == [(None, 0.0), (1e9, 50e-6)]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("drum=1GiB", "--what-if: mine has no figure 'drum'; write NAME=VALUE"),
            (
                "dram",
                "--what-if: cannot read 'dram'; write NAME=VALUE such as dram=64GiB, or weights",
            ),
            (
                "weigths=int4",
                "--what-if: mine has no figure 'weigths'; write NAME",
            ),
            ("", "--what-if: cannot read ''; write NAME=VALUE"),
            ("=3", "--what-if: cannot read '=3'; write NAME=VALUE"),
            ("disk.bandwidth=1GB/s", "--what-if: mine has no figure 'disk.bandwidth'; "),
            ("dram->dram=1GB/s", "--what-if: mine has no figure 'dram->dram'; write"),
            ("dram=416", "--what-if: dram: must be a size such as 180GiB, from 1MiB to 1000TB"),
            ("dram=", "--what-if: dram: must be a size such as 180GiB"),
            (
                "dram->vram=25GiB",
                "--what-if: dram->vram: must be a rate such as 12.9GB/s, from 1000B/s",
            ),
            ("dram.gemm=nan", "--what-if: dram.gemm: must be a speed such as 65TFLOP/s"),
        ],
    )
    def test_refusals(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            self.profile(tmp_path).with_change(text)
        assert str(caught.value).startswith(message)

    def test_refusal_names_what_exists_here(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            load_profile("generic-cpu").with_change("list")
        assert " ".join(str(caught.value).split()).endswith(
            "there are dram, dram.gemm, dram.bandwidth, dram.attention_bandwidth, "
            "dram.attention_bandwidth_int8, dram.attention_bandwidth_fp8, "
            "dram.attention_flops, dram.elementwise_bandwidth, "
            "dram.sequence_time, dram.launch_time, dram.task_time, dram.expert_time, "
            "dram.pass_time, dram.row_time, "
            "disk, disk->dram, dram->disk, "
            "disk->dram.operation_time, dram->disk.operation_time, weights"
        )


def numbers(quantity: Quantity) -> st.SearchStrategy[float]:
    """Figures that four digits can tell, small ones as often as large ones."""
    spread = st.floats(math.log(quantity.least), math.log(quantity.most)).map(math.exp)
    kept = spread.map(lambda number: min(max(number, quantity.least), quantity.most))
    ends = st.sampled_from([quantity.least, quantity.most])
    return (kept | ends).map(lambda number: quantity.read(quantity.write(number)))


def figures(quantity: Quantity) -> st.SearchStrategy[Figure]:
    def build(number: float, bases: set[str], source: str) -> Figure:
        return Figure(**dict.fromkeys(bases, number), source=source)

    bases = st.sets(st.sampled_from(["peak", "achieved", "paper"]), min_size=1)
    return st.builds(build, numbers(quantity), bases, TEXTS)


def curve(rates: dict[int, float]) -> CurveFigure:
    points = tuple(sorted(rates.items()))
    return CurveFigure(achieved=RateCurve(points=points), source="measured")


TEXTS = st.sampled_from(["1e5", "null", "yes", "7", "2026-11-21"]) | st.text(
    string.ascii_letters + string.digits + "#:{}'\"-,é…", min_size=1, max_size=20
)
CURVES, RATE_CURVES = (
    st.dictionaries(st.integers(1, 4096), numbers(quantity), min_size=1, max_size=4).map(curve)
    for quantity in (SPEED, MEMORY_RATE)
)
DRAM = st.builds(
    LevelFigures,
    name=st.just("dram"),
    capacity=figures(DRAM_SIZE),
    bandwidth=figures(MEMORY_RATE),
    gemm=st.fixed_dictionaries({"float32": CURVES}, optional={"bfloat16": CURVES}),
    decoding=st.dictionaries(st.sampled_from(list(FORMATS)), RATE_CURVES),
    attention_bandwidth=st.none() | figures(MEMORY_RATE),
    attention_flops=st.none() | figures(SPEED),
    elementwise_bandwidth=st.none() | figures(MEMORY_RATE),
    sequence_time=st.none() | figures(DURATION),
)
VRAM_LEVEL = st.builds(
    LevelFigures,
    name=st.just("vram"),
    devices=st.integers(1, 8),
    capacity=figures(VRAM_SIZE),
    bandwidth=figures(MEMORY_RATE),
    gemm=st.fixed_dictionaries({"float16": CURVES}),
)
DISK = st.builds(LevelFigures, name=st.just("disk"), capacity=figures(DISK_SIZE))


def link(name: str) -> st.SearchStrategy[LinkFigures]:
    key, quantity = beside_rate(name)
    beside = {key: st.none() | numbers(quantity)}
    return st.builds(LinkFigures, name=st.just(name), bandwidth=figures(LINK_RATE), **beside)


LINKS = ("disk->dram", "dram->vram", "vram->dram")
PROFILES = st.builds(
    HardwareProfile,
    name=TEXTS,
    title=TEXTS,
    date=st.just("2026-11-21") | TEXTS,
    method=TEXTS,
    source=st.just("") | TEXTS,
    levels=st.fixed_dictionaries({"vram": VRAM_LEVEL, "dram": DRAM, "disk": DISK}),
    links=st.fixed_dictionaries({name: link(name) for name in LINKS}),
)


class TestText:
    @given(profile=PROFILES)
    def test_what_is_written_is_read_again(
        self, tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "written.yaml"
        path.write_text(profile.to_yaml(), encoding="utf-8")
        assert replace(load_profile(path), path="") == profile

    @pytest.mark.parametrize("name", names("hardware"))
    def test_library_profiles_keep_four_digits(self, tmp_path: Path, name: str) -> None:
        profile = load_profile(name)
        again = load(tmp_path, profile.to_yaml())
        for (path, _, old), (new_path, _, new) in zip(
            profile.figures(), again.figures(), strict=True
        ):
            assert (path, old.source) == (new_path, new.source)
            old_value, new_value = old.on("paper"), new.on("paper")
            if isinstance(old_value, float):
                assert new_value == pytest.approx(old_value, rel=5e-4)
            else:
                assert new_value == old_value

    def test_figures_are_written_as_people_write_them(self) -> None:
        assert [VRAM_SIZE.write(n) for n in (16e9, 15 * GIB, 0.5 * GIB, 197880360960)] == [
            "16GB",
            "15GiB",
            "512MiB",
            "197.9GB",
        ]
        assert [LINK_RATE.write(n) for n in (15.75e9, 16 * GIB, 12.3456e9, 1e12)] == [
            "15.75GB/s",
            "16GiB/s",
            "12.35GB/s",
            "1TB/s",
        ]
        assert [SPEED.write(n) for n in (65e12, 0.8e12, 1e15)] == [
            "65TFLOP/s",
            "800GFLOP/s",
            "1000TFLOP/s",
        ]
        assert [DURATION.write(n) for n in (45e-6, 1.2e-3, 1.0)] == ["45us", "1.2ms", "1s"]

    def test_a_readable_file(self, tmp_path: Path) -> None:
        text = load(tmp_path, PLAIN).to_yaml()
        for line in (
            "name: mine",
            "    devices: 2",
            "    capacity: {peak: 16GB, achieved: 15GiB}",
            "        achieved: {16: 1TFLOP/s, 64: 20TFLOP/s}",
            "    sequence_time: {achieved: 50us}",
            "  dram->vram: {peak: 15.75GB/s, achieved: 12GB/s, staging: 7.2GB/s}",
        ):
            assert line in text.splitlines()


class TestProfileLikeAnother:
    def test_it_has_what_it_leaves_out_from_the_other(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(
            "like: t4\nlevels: {dram: {capacity: {achieved: 64GiB, source: mine}}}\n"
        )
        mine, other = load_profile(tmp_path / "mine.yaml"), load_profile("t4")
        assert mine.name == "mine"
        assert mine.levels["dram"].capacity != other.levels["dram"].capacity
        assert mine.hardware().dram.capacity_bytes == 64 * 2**30
        assert mine.hardware().vram == other.hardware().vram
        assert mine.hardware().links == other.hardware().links

    def test_a_figure_replaces_another_whole(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(
            "like: t4\nlevels: {vram: {bandwidth: {achieved: 200GB/s, source: mine}}}\n"
        )
        bandwidth = load_profile(tmp_path / "mine.yaml").levels["vram"].bandwidth
        assert bandwidth is not None
        assert (bandwidth.peak, bandwidth.source) == (None, "mine")

    def test_a_path_is_meant_from_the_folder_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text("like: t4\ntitle: base\n")
        (tmp_path / "mine.yaml").write_text("like: base.yaml\n")
        assert load_profile(tmp_path / "mine.yaml").title == "base"

    @pytest.mark.parametrize(
        ("like", "message"),
        [
            ("mine.yaml", ":1: like: 'mine.yaml' is like this profile itself"),
            ("../here/mine.yaml", ":1: like: '../here/mine.yaml' is like this profile itself"),
            ("'~/mine.yaml'", ":1: like: '~/mine.yaml' is like this profile itself"),
            (r'"a/\0.yaml"', "cannot be read: embedded null byte"),
            ("[t4]", ":1: like: must be the name or the path of a hardware profile"),
            ("t44", ":1: like: 't44' is no hardware profile of that name; did you mean t4"),
            ("absent.yaml", "no such file"),
        ],
    )
    def test_what_cannot_be_followed(
        self, like: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.setenv("HOME", str(folder))
        (folder / "mine.yaml").write_text(f"like: {like}\n")
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_profile(folder / "mine.yaml")
