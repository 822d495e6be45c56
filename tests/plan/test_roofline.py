"""The Hierarchical Roofline Model: MoE-Lightning's worked numbers, and what must always hold."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.formats.plain import BFLOAT16
from moebatch.formats.registry import FORMATS
from moebatch.layout.footprint import Dtypes
from moebatch.layout.routing import distinct_experts
from moebatch.plan.papers.lightning_model import ffn_bytes
from moebatch.plan.roofline import (
    Operation,
    Roofline,
    attention_operation,
    ffn_flops,
    ffn_intensity,
    ffn_operation,
    rooflines,
    tokens_reaching,
)
from moebatch.spec.machine.hardware import Hardware, Level, Link, Processor, RateCurve
from tests.plan.problems import GIVING_BACK, SHAPE, problem
from tests.shapes import stored_bytes

GIB = 2**30
DTYPES = Dtypes(stored=BFLOAT16, compute="bfloat16")


def roofline(*, gpu: float, cpu: float, i: float, j: float, link: float) -> Roofline:
    return Roofline(
        level_i="vram",
        level_j="dram",
        peak_i=gpu,
        peak_j=cpu,
        bandwidth_i=i,
        bandwidth_j=j,
        cross_bandwidth=link,
    )


L4_AS_PLOTTED = roofline(gpu=242e12, cpu=1.3e12, i=300e9, j=100e9, link=16e9)
T4_AS_PLANNED = roofline(gpu=65e12, cpu=0.8e12, i=300 * GIB, j=76 * GIB, link=16 * GIB)
L4_MEASURED = roofline(gpu=121e12, cpu=1.6e12, i=231e9, j=48e9, link=12.35e9)


def paper_intensity(tokens: float) -> float:
    return ffn_flops(SHAPE, tokens) / ffn_bytes(SHAPE, tokens, expert_bytes=stored_bytes(SHAPE))


def pays_to_move(roofs: Roofline, operation: Operation) -> bool:
    """Whether it is faster on level i although its data has to be moved there."""
    i = roofs.attainable_i(operation.intensity_i, operation.intensity_j)
    return i > roofs.local_j(operation.intensity_j)


@pytest.mark.parametrize("intensity", [paper_intensity, ffn_intensity(SHAPE, DTYPES)])
@pytest.mark.parametrize(
    ("roofs", "p1", "p1_tokens", "p2"),
    [
        (L4_AS_PLOTTED, 81.3, 326, 599),
        (T4_AS_PLANNED, 46.6, 187, 599),
        (L4_MEASURED, 129.6, 522, 598),
    ],
)
def test_turning_points_of_the_paper(roofs, p1, p1_tokens, p2, intensity):
    assert roofs.p1 == pytest.approx(p1, abs=0.06)
    assert tokens_reaching(roofs.p1, intensity) == pytest.approx(p1_tokens, rel=0.005)
    assert roofs.p2(intensity(128)) == pytest.approx(p2, rel=0.002)


def test_experts_of_128_tokens_on_the_l4_as_plotted():
    assert paper_intensity(128) == pytest.approx(31.95, abs=0.005)
    assert L4_AS_PLOTTED.local_i(paper_intensity(128)) == pytest.approx(9.58e12, rel=1e-3)
    balance = L4_AS_PLOTTED.p2(paper_intensity(128))
    assert tokens_reaching(balance, paper_intensity) == pytest.approx(2474, rel=1e-3)


def test_attention_counts_both_products():
    long = attention_operation(problem().prices, 1, 1_000_000)

    assert long.intensity_i == pytest.approx(4.0, abs=0.01)
    assert attention_operation(problem().prices, 300, 512).intensity_j == pytest.approx(
        attention_operation(problem().prices, 1, 512).intensity_j
    )
    assert not pays_to_move(L4_AS_PLOTTED, long)


def test_ffn_reads_the_experts_of_its_tokens_once_per_micro_batch():
    operation = ffn_operation(SHAPE, DTYPES, batch=64, micro_batch=1)
    expert_bytes = 2 * SHAPE.expert_params
    hidden = 64 * 2 * 2 * 4096

    assert operation.flops == 64 * 2 * 2 * SHAPE.expert_params
    assert operation.bytes_i == pytest.approx(64 * 2 * expert_bytes + hidden)
    assert operation.bytes_j == pytest.approx(distinct_experts(SHAPE, 64) * expert_bytes + hidden)


def test_choices_that_compute_nothing_are_no_flops():
    whole, half = (
        ffn_operation(shape, DTYPES, batch=64, micro_batch=1) for shape in (SHAPE, GIVING_BACK)
    )
    assert half.flops == whole.flops / 2
    assert 2 * ffn_flops(GIVING_BACK, 5) == ffn_flops(SHAPE, 5)


def test_fewer_tokens_hide_the_link_behind_experts_of_fewer_bits():
    packed_dtypes = Dtypes(stored=FORMATS["packed int4"], compute="bfloat16")
    plain, packed = ffn_intensity(SHAPE, DTYPES), ffn_intensity(SHAPE, packed_dtypes)
    ratio = DTYPES.expert_bytes(SHAPE) / packed_dtypes.expert_bytes(SHAPE)
    assert 3 < ratio < 4
    assert packed(1) / plain(1) == pytest.approx(ratio, rel=0.01)
    assert tokens_reaching(500, plain) / tokens_reaching(500, packed) > 3


def test_micro_batch_sets_one_intensity_and_batch_the_other():
    operation = ffn_operation(SHAPE, DTYPES, batch=4536, micro_batch=324)
    intensity = ffn_intensity(SHAPE, DTYPES)

    assert operation.intensity_i == pytest.approx(intensity(324))
    assert operation.intensity_j == pytest.approx(intensity(4536))
    assert pays_to_move(L4_AS_PLOTTED, operation)


def test_moving_always_pays_over_a_link_as_fast_as_the_memory_behind_it():
    fast = replace(L4_AS_PLOTTED, cross_bandwidth=L4_AS_PLOTTED.bandwidth_j)

    assert fast.p1 == 0
    assert pays_to_move(fast, Operation(name="any", flops=1e12, bytes_i=1e9, bytes_j=1e8))


def test_operation_without_bytes_below_is_bound_by_its_own_level():
    local = Operation(name="attention", flops=4e9, bytes_i=1e9, bytes_j=0)

    assert local.intensity_j == inf
    assert L4_AS_PLOTTED.attainable_i(local.intensity_i, local.intensity_j) == 4 * 300e9
    assert L4_AS_PLOTTED.bound_i(local.intensity_i, local.intensity_j) == "memory"


def test_link_and_memory_are_alike_at_the_balance_point():
    assert L4_AS_PLOTTED.p2(30) == pytest.approx(30 * 300 / 16)


def test_a_batch_never_reaches_what_activations_do_not_allow():
    intensity = ffn_intensity(SHAPE, DTYPES)
    most = 2 * SHAPE.expert_params * 2 / (2 * 2 * 4096)

    assert tokens_reaching(0.99 * most, intensity) < inf
    assert tokens_reaching(1.01 * most, intensity) == inf
    assert tokens_reaching(0.0, intensity) == 1


def test_pairs_of_levels_of_a_machine():
    cpu = Processor(
        gemm={"bfloat16": RateCurve(points=((1, 1e11), (64, 1.6e12)))},
        bandwidth=80e9,
        attention_bandwidth=40e9,
        attention_flops=1e12,
        elementwise_bandwidth=40e9,
    )
    gpu = replace(cpu, gemm={"float16": RateCurve(points=((1, 65e12),))}, bandwidth=320e9)
    levels = {
        "vram": Level(name="vram", capacity_bytes=15 * GIB, processor=gpu),
        "dram": Level(name="dram", capacity_bytes=200 * GIB, processor=cpu),
        "disk": Level(name="disk", capacity_bytes=10**12),
    }
    links = {
        "dram->vram": Link(name="dram->vram", bandwidth=12e9),
        "disk->dram": Link(name="disk->dram", bandwidth=2e9),
    }
    whole = Hardware(name="t4", title="T4", levels=levels, links=links)
    no_gpu = replace(whole, levels={name: levels[name] for name in ("dram", "disk")})

    upper, lower = rooflines(whole, "bfloat16")

    assert (upper.level_i, upper.level_j) == ("vram", "dram")
    assert (upper.peak_i, upper.peak_j, upper.cross_bandwidth) == (65e12, 1.6e12, 12e9)
    assert rooflines(no_gpu, "bfloat16") == (lower,)
    assert (lower.level_i, lower.level_j, lower.p1) == ("dram", "disk", 0)
    # 1.6 TFLOP/s over 2 GB/s: what a CPU can do while an expert comes from the disk.
    assert lower.p2(1e6) == pytest.approx(800)
    assert lower.local_j(100) == 0


figures = st.floats(1e6, 1e16)


@given(
    st.builds(roofline, gpu=figures, cpu=figures, i=figures, j=figures, link=figures),
    st.floats(1e-3, 1e6),
    st.floats(1e-3, 1e6),
)
def test_turning_points_are_where_roofs_meet(roofs, intensity_i, intensity_j):
    attainable = roofs.attainable_i(intensity_i, intensity_j)
    assert attainable <= roofs.local_i(intensity_i)

    p2 = roofs.p2(intensity_i)
    assert roofs.cross_roof(p2) == pytest.approx(roofs.local_i(intensity_i))
    if intensity_j > p2 * (1 + 1e-9):
        assert attainable == roofs.local_i(intensity_i)
        assert roofs.bound_i(intensity_i, intensity_j) != "link"
    if intensity_j < roofs.p1 * (1 - 1e-9):
        assert roofs.local_j(intensity_j) > attainable * (1 - 1e-12)
    if roofs.p1:
        assert roofs.cross_roof(roofs.p1) == pytest.approx(roofs.local_j(roofs.p1))


@given(st.floats(1.0, 1000.0))
def test_balance_makes_link_and_memory_equal(micro_batch):
    intensity = ffn_intensity(SHAPE, DTYPES)
    batch = tokens_reaching(L4_AS_PLOTTED.p2(intensity(micro_batch)), intensity)

    moved = L4_AS_PLOTTED.cross_roof(intensity(batch))
    assert batch >= micro_batch
    assert moved == pytest.approx(L4_AS_PLOTTED.local_i(intensity(micro_batch)))
