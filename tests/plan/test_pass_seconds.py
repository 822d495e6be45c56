"""How long a pass takes under each schedule, and that lanes are affine in the shares."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.layout.lanes import bottleneck, pass_seconds
from moebatch.layout.load import PassLoad
from moebatch.plan.pricing.cost import CACHE_WAITS
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.policy.policy import PAGE_TOKENS, Batching, Placement, Policy
from tests.few import examples
from tests.plan.problems import cpu_machine, gpu_machine, problem, processor

COST_OF = problem(gpu_machine()).cost_of
DECODE = PassLoad(decode_sequences=320, decode_positions=160_000, logits_rows=320)
PREFILL = PassLoad(prompt_tokens=128_000, prompt_pairs=25e6, prompt_slices=320, logits_rows=320)
LOADS = st.builds(
    PassLoad,
    decode_sequences=st.floats(0, 4000),
    decode_positions=st.floats(0, 1e6),
    prompt_tokens=st.floats(0, 1e5),
    prompt_pairs=st.floats(0, 1e8),
    prompt_context=st.floats(0, 1e5),
    logits_rows=st.floats(0, 4000),
    prompt_slices=st.floats(0, 4000),
    resumed_slices=st.floats(0, 4000),
)
SHARES = st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(
    lambda parts: Placement(
        vram=parts[0] / sum(parts), dram=parts[1] / sum(parts), disk=parts[2] / sum(parts)
    )
)


def policy(
    schedule: str = "klotski",
    *,
    batch_size: int = 320,
    micro_batch_size: int = 32,
    weights: Placement | None = None,
    kv_cache: Placement | None = None,
    batching: Batching = "static",
    staging: bool = False,
) -> Policy:
    """Attention on the CPU where the schedule says so."""
    return Policy(
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        tokens_per_pass=batch_size,
        num_slots=16,
        num_kv_pages=batch_size,
        weights=weights or Placement(dram=1),
        kv_cache=kv_cache or Placement(dram=1),
        attention_on_gpu=schedule not in ("cgopipe", "flexgen_c"),
        ffn_on_gpu=True,
        schedule=schedule,
        staging=staging,
        batching=batching,
    )


@pytest.mark.parametrize("schedule", ["klotski", "cgopipe"])
def test_lanes_run_side_by_side(schedule: str) -> None:
    assert pass_seconds({"gpu": 3, "cpu": 2, "staging": 5}, policy(schedule)) == 5


def test_a_disk_that_reads_and_writes_takes_as_long_as_for_one_after_the_other() -> None:
    lanes = {"cpu": 5.0, "disk->dram": 4.0, "dram->disk": 3.0}
    assert pass_seconds(lanes, policy("klotski")) == 7
    assert bottleneck(lanes) == "disk->dram"
    assert pass_seconds({**lanes, "cpu": 8.0}, policy("klotski")) == 8
    assert bottleneck({**lanes, "cpu": 8.0}) == "cpu"


def test_weights_of_flexgen_run_beside_the_first_micro_batch_only() -> None:
    lanes = {"gpu": 20.0, "dram->vram": 10.0, "weight block": 7.0}
    assert pass_seconds(lanes, policy("flexgen")) == 7 + 18
    assert pass_seconds({**lanes, "weight block": 1.0}, policy("flexgen")) == 20
    assert pass_seconds(lanes, policy("flexgen", micro_batch_size=320)) == 20
    assert pass_seconds({"weight block": 7.0}, policy("flexgen")) == 7
    assert pass_seconds({}, policy("flexgen")) == 0


def test_caches_of_flexgen_run_beside_the_arithmetic() -> None:
    lanes = {"gpu": 20.0, "dram->vram": 30.0, "vram->dram": 1.0}
    assert pass_seconds(lanes, policy("flexgen")) == 30


def test_with_attention_on_the_cpu_flexgen_does_one_thing_after_the_other() -> None:
    lanes = {"gpu": 20.0, "cpu": 10.0, "dram->vram": 3.0, "vram->dram": 2.0, "weight block": 8.0}
    assert pass_seconds(lanes, policy("flexgen_c")) == pytest.approx(8 + 0.9 * 35)
    assert pass_seconds({**lanes, "disk->dram": 50.0}, policy("flexgen_c")) == pytest.approx(53)


@pytest.mark.parametrize("schedule", ["flexgen", "flexgen_c"])
def test_a_block_of_weights_takes_as_long_as_the_slower_of_copy_and_link(
    schedule: str,
) -> None:
    block = COST_OF(DECODE, policy(schedule, staging=True)).lanes
    paged = COST_OF(DECODE, policy("cgopipe", staging=True)).lanes
    assert block["weight block"] == pytest.approx(paged["staging"])
    assert "staging" not in block
    direct = COST_OF(DECODE, policy(schedule)).lanes
    assert direct["weight block"] < block["weight block"], "the link alone is faster"
    assert "weight block" not in paged


def test_cgopipe_is_never_slower_than_flexgen_with_its_attention_on_the_cpu() -> None:
    for load in (DECODE, PREFILL):
        cgopipe, flexgen = policy("cgopipe"), policy("flexgen_c")
        faster = pass_seconds(COST_OF(load, cgopipe).lanes, cgopipe)
        assert faster < pass_seconds(COST_OF(load, flexgen).lanes, flexgen)


def test_hidden_states_of_a_static_prefill_leave_the_gpu_in_every_layer() -> None:
    static, mixed = (
        COST_OF(PREFILL, policy("cgopipe", batching=batching)).lanes
        for batching in ("static", "mixed")
    )
    moved_s = 128_000 * 32 * 4096 * 2 / 12e9
    for link in ("dram->vram", "vram->dram"):
        assert static[link] - mixed.get(link, 0) == pytest.approx(moved_s)
    assert (
        COST_OF(DECODE, policy("cgopipe")).lanes
        == COST_OF(DECODE, policy("cgopipe", batching="mixed")).lanes
    )


def test_each_sequence_on_disk_is_read_and_written_by_itself() -> None:
    def lanes(operation_s: float) -> Mapping[str, float]:
        machine = gpu_machine()
        links = {n: replace(x, operation_s=operation_s) for n, x in machine.links.items()}
        asked = problem(replace(machine, links=links))
        return asked.cost_of(DECODE, policy(kv_cache=Placement(disk=1))).lanes

    at_once, slow = lanes(0.0), lanes(1e-3)
    for link in ("disk->dram", "dram->disk"):
        assert slow[link] - at_once[link] == pytest.approx(320 * 32 * 1e-3)


def test_new_tokens_go_to_a_disk_in_whole_pages() -> None:
    lanes = COST_OF(DECODE, policy(kv_cache=Placement(disk=1))).lanes
    page_bytes = PAGE_TOKENS * 2 * 8 * 128 * 2
    written_s = 320 * 32 * page_bytes / gpu_machine().links["dram->disk"].bandwidth
    assert lanes["dram->disk"] == pytest.approx(written_s)


def test_computing_waits_for_no_cache_that_is_where_it_computes() -> None:
    """And says so, lest waits seem to be in proportion to all of computing."""
    limits = COST_OF(DECODE, policy(kv_cache=Placement(vram=1))).limits
    assert limits[CACHE_WAITS] == limits["gpu"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@examples(40)
@given(load=LOADS, one=SHARES, other=SHARES, share=st.floats(0, 1))
def test_lanes_are_affine_in_the_shares(
    schedule: str, load: PassLoad, one: Placement, other: Placement, share: float
) -> None:
    between = Placement(
        **{
            level: share * one.on(level) + (1 - share) * other.on(level)
            for level in ("vram", "dram", "disk")
        }
    )
    for name in ("weights", "kv_cache"):
        first, second, middle = (
            COST_OF(load, policy(schedule, **{name: placed})).limits
            for placed in (one, other, between)
        )
        for lane in {*first, *second, *middle}:
            mixed = share * first.get(lane, 0) + (1 - share) * second.get(lane, 0)
            assert middle.get(lane, 0) == pytest.approx(mixed, rel=1e-6, abs=1e-9)
            assert middle.get(lane, 0) >= 0


def test_a_pass_that_computes_nothing_takes_no_time() -> None:
    beside = replace(policy("klotski"), attention_on_gpu=False, ffn_on_gpu=True)
    for known in (beside, policy("flexgen"), policy("klotski"), policy("pregated")):
        assert pass_seconds({}, known) == 0
    alone = replace(beside, schedule="simple")
    assert pass_seconds({"gpu": 3.0, "cpu": 2.0, "dram->vram": 4.0}, alone) == 5


def test_a_price_is_the_same_whatever_was_asked_before() -> None:
    """With few slots a CPU takes fewer experts in one task."""
    machine = cpu_machine()
    cpu = replace(processor(1e12, 30e9), task_s=1e-3)
    levels = {**machine.levels, "dram": replace(machine.levels["dram"], processor=cpu)}
    of = problem(replace(machine, levels=levels))
    half = Placement(dram=0.5, disk=0.5)
    few, many = (
        replace(policy(weights=half), num_slots=number, ffn_on_gpu=False, attention_on_gpu=False)
        for number in (4, 32)
    )
    after_few = (of.cost_of(DECODE, few).lanes, of.cost_of(DECODE, many).lanes)[1]
    assert after_few == replace(of).cost_of(DECODE, many).lanes
    assert after_few["cpu"] < of.cost_of(DECODE, few).lanes["cpu"]
