"""Klotski's n is the smallest that hides all transfers or the largest that fits, and what its rules
place where fits."""

import re
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moebatch.errors import DoesNotFit
from moebatch.formats.plain import BFLOAT16
from moebatch.layout.footprint import Dtypes
from moebatch.layout.load import PassLoad
from moebatch.plan.papers.klotski import (
    BATCH_SIZES,
    KlotskiPlan,
    LayerTimes,
    inequalities,
    klotski_policy,
)
from moebatch.plan.papers.klotski_places import RESERVED_BYTES
from moebatch.plan.prediction import predict
from moebatch.plan.problem import Problem
from moebatch.plan.runnable import not_runnable
from moebatch.spec.machine.hardware import Hardware, Link
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.policy import PAGE_TOKENS, Placement
from moebatch.spec.workload import Workload
from tests.few import examples
from tests.plan.problems import GB, GIB, SMALL, cpu_machine, gpu_machine, problem

MANY = examples(8)
MS = 1e-3
TIMES = st.builds(
    LayerTimes,
    attention_s=st.floats(1e-4, 1e-2),
    gate_s=st.floats(0, 1e-3),
    load_expert_s=st.floats(1e-3, 0.1),
    hot_s=st.floats(0, 1e-2),
    cold_s=st.floats(0, 1e-2),
    num_hot=st.integers(1, 8),
    num_cold=st.floats(1, 8),
)
WORKLOADS = st.builds(
    lambda sequences, prompt, new: Workload.uniform(
        prompt_tokens=prompt, new_tokens=new, num_sequences=sequences
    ),
    st.one_of(st.none(), st.integers(1, 2000)),
    st.integers(1, 2000),
    st.integers(1, 500),
)
MACHINES = st.one_of(
    st.builds(cpu_machine, st.floats(5, 200), disk=st.floats(0.3e9, 8e9)),
    st.builds(gpu_machine, st.floats(6, 120), st.floats(8, 300), link=st.floats(1e9, 60e9)),
)
ENV1_WORKLOAD = Workload.uniform(prompt_tokens=512, new_tokens=32)


def env1(model: str = "mixtral-8x7b") -> Problem:
    """RTX 3090, 256 GB and an SSD of 1 GB/s: the paper's first machine. Its inequalities know
    nothing of launches."""
    profile = load_profile("rtx3090").with_change("vram.launch_time=1ns")
    return Problem(
        shape=load_model(model).shape,
        dtypes=Dtypes(stored=BFLOAT16, compute="bfloat16"),
        hardware=profile.with_change("vram.task_time=1ns").hardware(),
        workload=ENV1_WORKLOAD,
    )


def as_slow_as_measured(asked: Problem) -> Problem:
    """Attention takes the 2.6 ms of a batch of 16 that the paper measures on its first machine."""
    processor = asked.hardware.levels["vram"].processor
    assert processor is not None
    level = replace(asked.hardware.levels["vram"], processor=replace(processor, sequence_s=155e-6))
    levels = {**asked.hardware.levels, "vram": level}
    return replace(asked, hardware=replace(asked.hardware, levels=levels))


def with_cache_on_gpu(asked: Problem) -> Problem:
    """Main memory has room for experts only, and there is nothing below."""
    machine = asked.hardware
    levels = {name: level for name, level in machine.levels.items() if name != "disk"}
    links = {name: link for name, link in machine.links.items() if "disk" not in name}
    without_disk = replace(asked, hardware=replace(machine, levels=levels, links=links))
    return without_disk.with_capacity("dram", int(86.5 * GIB))


def slow_gpu(link: float = 16) -> Problem:
    """Attention is so slow that some ten batches hide a link of so many GB/s; a small model that
    does not fit onto the GPU all the same."""
    machine = gpu_machine(6, 64)
    vram, processor = machine.levels["vram"], machine.levels["vram"].processor
    assert processor is not None
    slow = replace(vram, processor=replace(processor, sequence_s=300e-6))
    up = Link(name="dram->vram", bandwidth=link * GB)
    machine = replace(
        machine,
        levels={**machine.levels, "vram": slow},
        links={**machine.links, "dram->vram": up},
    )
    return problem(machine, shape=SMALL, workload=ENV1_WORKLOAD)


def assert_fits(asked: Problem, plan: KlotskiPlan) -> None:
    for level, footprint in asked.footprints(plan.policy).items():
        assert footprint.total_bytes <= asked.capacity_bytes(level), level


def holds(times: LayerTimes, num_batches: int) -> list[bool]:
    return [inequality.holds for inequality in inequalities(times, num_batches)]


# --- inequalities -------------------------------------------------------------------------------


def test_the_papers_figures_ask_for_sixteen_batches_before_hot_experts_arrive_in_time() -> None:
    times = LayerTimes(
        attention_s=2.6 * MS,
        gate_s=0.05 * MS,
        load_expert_s=21 * MS,
        hot_s=0,
        cold_s=0,
        num_hot=2,
        num_cold=6,
    )
    assert [n for n in range(1, 17) if holds(times, n)[1]] == [16]


@given(TIMES)
def test_the_smallest_n_is_the_closed_form_where_expert_times_do_not_change(
    t: LayerTimes,
) -> None:
    beside, expert = t.attention_s + t.gate_s, t.load_expert_s
    hot = t.num_hot * expert
    whole = hot + t.num_cold * expert
    real = max(
        hot / beside,
        (hot + expert - t.hot_s) / beside,
        (whole - t.hot_s - t.cold_s) / beside,
    )
    assume(abs(real - round(real)) > 1e-6)  # there, rounding decides
    n = max(1, ceil(real))
    assert all(holds(t, n))
    assert n == 1 or not all(holds(t, n - 1))


def test_a_cache_that_is_loaded_faster_than_it_is_attended_to_only_adds_batches() -> None:
    resident = LayerTimes(
        attention_s=2 * MS, gate_s=0, load_expert_s=MS, hot_s=0, cold_s=0, num_hot=2, num_cold=6
    )
    offloaded = replace(resident, load_cache_s=MS)
    assert all(holds(resident, 4)) and not all(holds(offloaded, 4))
    assert all(holds(offloaded, 8))
    assert not any(all(holds(replace(offloaded, load_cache_s=3 * MS), n)) for n in range(1, 999))


def test_without_cold_experts_only_hot_ones_are_waited_for() -> None:
    times = LayerTimes(
        attention_s=MS, gate_s=0, load_expert_s=MS, hot_s=0, cold_s=0, num_hot=2, num_cold=0
    )
    assert all(holds(times, 2))


# --- the paper's first machine ------------------------------------------------------------------


def test_with_the_cache_on_the_gpu_memory_ends_near_the_papers_fifteen_batches() -> None:
    asked = with_cache_on_gpu(as_slow_as_measured(env1()))
    plan = klotski_policy(asked, batch_size=16)
    assert plan.times.attention_s == pytest.approx(2.6 * MS, rel=0.02)
    assert plan.times.load_expert_s == pytest.approx(21 * MS, rel=0.01)
    assert 10 <= plan.num_batches <= 17
    assert plan.policy.kv_cache == Placement(vram=1.0)
    assert not plan.bubble_free
    assert plan.limit == f"{16 * (plan.num_batches + 1)} sequences do not fit"
    assert_fits(asked, plan)


def test_main_memory_holds_more_batches_whose_cache_makes_bubbles_of_its_own() -> None:
    asked = env1()
    plan = klotski_policy(asked, batch_size=16)
    assert plan.num_batches > 100
    assert plan.policy.weights.disk == 0
    assert plan.policy.weights.vram <= 1 / 32  # where no other layer of the cache fits
    assert plan.policy.kv_cache.disk == 0
    read = 16 * (512 + 16) * 4096 * plan.policy.kv_cache.dram  # h_kv, not h1
    assert plan.times.load_cache_s == pytest.approx(read / 16.8e9)
    assert plan.times.load_cache_s > plan.times.attention_s
    assert plan.limit is not None and not plan.bubble_free
    assert re.fullmatch(r"keys and values of \d+ sequences do not fit into memory", plan.limit)


@pytest.mark.exhaustive
def test_of_the_papers_batch_sizes_the_one_that_finishes_first() -> None:
    asked = env1("mixtral-8x22b")
    best = predict(asked, klotski_policy(asked).policy).tokens_per_s
    for size in BATCH_SIZES:
        own = predict(asked, klotski_policy(asked, batch_size=size).policy).tokens_per_s
        assert best >= own * 0.99


def test_a_model_larger_than_main_memory_is_bound_by_the_disk_and_says_so() -> None:
    asked = env1("mixtral-8x22b")
    plan = klotski_policy(asked, batch_size=16)
    assert_fits(asked, plan)
    assert 3 <= plan.num_batches <= 20  # the paper runs 10
    weights = plan.policy.weights
    assert 0 < weights.disk < 0.2 and weights.vram == 0
    assert weights.disk * 56 == pytest.approx(round(weights.disk * 56))  # whole layers
    disk = plan.inequalities[-1]
    assert disk.name == "disk" and not disk.holds
    of_layer = 8 * 3 * 6144 * 16384 * 2
    assert disk.right_s == pytest.approx(weights.disk * of_layer / GB, rel=1e-3)
    assert not plan.bubble_free


def test_the_gpu_keeps_the_papers_reserve() -> None:
    asked = env1()
    policy = klotski_policy(asked, batch_size=16).policy
    assert policy.num_slots == 8
    footprint = asked.footprints(policy)["vram"]
    rest = sum(footprint.terms[term] for term in ("program and libraries", "activations"))
    free = asked.capacity_bytes("vram") - footprint.total_bytes
    assert rest + free >= RESERVED_BYTES


def test_the_sides_of_the_last_inequality_are_the_cost_models_gpu_and_link() -> None:
    asked = env1()
    plan = klotski_policy(asked, batch_size=16)
    batch = plan.policy.batch_size
    decoding = PassLoad(decode_sequences=batch, decode_positions=batch * (512 + 16))
    lanes = asked.cost_of(decoding, plan.policy).lanes
    last = plan.inequalities[3]
    assert last.left_s == pytest.approx(lanes["gpu"] / 32, rel=0.01)
    loaded = 1 - plan.policy.weights.vram  # of all layers; the inequality is of one of them
    experts_s = asked.prices.link_s("dram->vram", 8 * asked.dtypes.expert_bytes(asked.shape))
    beside_s = lanes["dram->vram"] / 32 - loaded * experts_s
    assert last.right_s == pytest.approx(experts_s + beside_s, rel=0.01)


# --- n ------------------------------------------------------------------------------------------


def test_bubbles_are_gone_at_n_and_not_with_one_batch_less() -> None:
    asked = slow_gpu()
    plan = klotski_policy(asked, batch_size=8)
    assert plan.bubble_free and plan.limit is None
    assert plan.num_batches > 5
    assert all(inequality.holds for inequality in plan.inequalities)
    assert plan.policy.batch_size == 8 * plan.num_batches
    assert plan.policy.micro_batch_size == 8
    fewer = replace(ENV1_WORKLOAD, num_sequences=8 * (plan.num_batches - 1))
    less = klotski_policy(replace(asked, workload=fewer), batch_size=8)
    assert less.num_batches == plan.num_batches - 1
    assert not less.bubble_free
    assert less.limit == f"the job has only {fewer.num_sequences} sequences"


def test_activated_cold_experts_grow_with_the_batch() -> None:
    asked = replace(slow_gpu(), workload=replace(ENV1_WORKLOAD, num_sequences=4))
    few = klotski_policy(asked, batch_size=4)
    assert few.times.num_cold == pytest.approx(8 * (1 - 0.75**4) - 2)
    many = klotski_policy(replace(asked, workload=ENV1_WORKLOAD), batch_size=64)
    assert many.times.num_cold == pytest.approx(6)
    assert many.times.num_hot == 2


def test_with_all_experts_on_the_gpu_nothing_is_waited_for() -> None:
    asked = problem(gpu_machine(120, 64), workload=ENV1_WORKLOAD)
    plan = klotski_policy(asked)
    assert (plan.num_batches, plan.bubble_free) == (1, True)
    assert plan.policy.num_slots == 0
    assert plan.policy.weights == Placement(vram=1.0)


def test_without_a_gpu_main_memory_computes_and_the_disk_loads() -> None:
    asked = problem(cpu_machine(16, disk=2 * GB), workload=ENV1_WORKLOAD)
    plan = klotski_policy(asked, batch_size=16)
    policy = plan.policy
    assert not policy.attention_on_gpu and not policy.ffn_on_gpu
    assert plan.times.load_expert_s == pytest.approx(3 * 4096 * 14336 * 2 / (2 * GB))
    assert policy.kv_cache == Placement(dram=1.0)
    assert policy.weights.disk > 0 and policy.weights.vram == 0
    assert [row.name for row in plan.inequalities] == ["(4)", "(5)", "(6)", "(7)"]
    assert_fits(asked, plan)


@MANY
@given(st.floats(4, 30), st.floats(1, 4), st.sampled_from([4, 16, 32]))
def test_a_faster_link_never_needs_more_batches(link: float, faster: float, size: int) -> None:
    def planned(rate: float) -> KlotskiPlan:
        return klotski_policy(slow_gpu(rate), batch_size=size)

    before, after = planned(link), planned(link * faster)
    if before.bubble_free:
        assert after.bubble_free
        assert after.num_batches <= before.num_batches


# --- places -------------------------------------------------------------------------------------


@MANY
@given(MACHINES, WORKLOADS, st.sampled_from([4, 64]), st.booleans())
def test_a_policy_fits_every_level_and_holds_the_longest_sequence(
    machine: Hardware, workload: Workload, size: int, kv_on_disk: bool
) -> None:
    asked = problem(machine, workload=workload, kv_on_disk=kv_on_disk)
    try:
        plan = klotski_policy(asked, batch_size=size)
    except DoesNotFit as refused:
        assert "needs" in str(refused)
        return
    policy = plan.policy
    assert_fits(asked, plan)
    for shares in (policy.weights, policy.kv_cache):
        assert shares.vram + shares.dram + shares.disk == pytest.approx(1, abs=1e-9)
    assert policy.num_kv_pages * PAGE_TOKENS >= workload.max_total_tokens
    assert policy.batch_size == plan.num_batches * plan.batch_size
    assert kv_on_disk or policy.kv_cache.disk == 0
    resident = max(policy.weights.vram, policy.weights.dram if not asked.with_vram else 0)
    assert (policy.num_slots == 0) == (resident == 1)
    assert plan.bubble_free == (plan.limit is None)


@pytest.mark.parametrize("machine", [cpu_machine(), gpu_machine(15, 16)], ids=lambda one: one.name)
@pytest.mark.parametrize("model", ["switch-base-8", "switch-large-128"])
def test_passes_have_room_for_prompts_that_are_not_cut(model: str, machine: Hardware) -> None:
    asked = encoding(model, machine)
    assert [*not_runnable(asked, klotski_policy(asked, batch_size=4).policy)] == []


def test_whole_layers_that_keep_anything_have_their_keys_and_values_on_a_level() -> None:
    asked = encoding("switch-large-128", gpu_machine(15, 180))
    plan = klotski_policy(asked)
    assert_fits(asked, plan)
    share = plan.policy.kv_cache.vram
    num_layers = share * asked.shape.num_keeping_layers
    assert 0 < share < 1 and num_layers == pytest.approx(round(num_layers))


def encoding(model: str, machine: Hardware) -> Problem:
    shape = load_model(model).shape
    workload = shape.cached(Workload.uniform(prompt_tokens=400, new_tokens=100))
    return problem(machine, shape=shape, workload=workload)


def test_what_cannot_fit_is_refused_with_figures() -> None:
    with pytest.raises(DoesNotFit, match=r"dram: needs .* at the least, has 2.00 GiB"):
        klotski_policy(problem(cpu_machine(2)))


def test_a_gpu_that_is_too_small_is_refused_with_figures() -> None:
    # Room for attention's weights and one small batch, but for no experts on their way.
    with pytest.raises(DoesNotFit, match=r"vram: needs .* at the least, has 4.20 GiB"):
        klotski_policy(problem(gpu_machine(4.2, 200), workload=ENV1_WORKLOAD))
