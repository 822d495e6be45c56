"""Policies stay within budgets, use them, get better with more of anything, and are refused with
figures when nothing fits."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError, DoesNotFit, ExitCode
from moebatch.plan.options import PlanOptions
from moebatch.plan.problem import Problem
from moebatch.plan.question import stated_question
from moebatch.plan.search.milp import violations
from moebatch.plan.search.planner import best_policy
from moebatch.spec.machine.hardware import Hardware, Processor
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import PAGE_TOKENS, Policy
from moebatch.spec.workload import Workload
from tests.few import examples
from tests.plan.problems import GIB, SHAPE, SMALL, WORKLOAD, cpu_machine, gpu_machine, problem

MANY = examples(12)
WORKLOADS = st.builds(
    lambda sequences, prompt, new: Workload.uniform(
        prompt_tokens=prompt, new_tokens=new, num_sequences=sequences
    ),
    st.one_of(st.none(), st.integers(1, 10**5)),
    st.integers(1, 2000),
    st.integers(1, 500),
)
CPU_MACHINES = st.builds(
    cpu_machine, st.floats(5, 200), disk=st.floats(0.3e9, 8e9), flops=st.floats(5e10, 5e12)
)
GPU_MACHINES = st.builds(
    gpu_machine, st.floats(8, 90), st.floats(8, 600), link=st.floats(3e9, 60e9)
)
MACHINES = st.one_of(CPU_MACHINES, GPU_MACHINES)


def policy_of(asked: Problem) -> Policy:
    return best_policy(asked).policy


@MANY
@given(MACHINES, WORKLOADS)
def test_a_policy_fits_every_level_and_holds_the_longest_sequence(
    machine: Hardware, workload: Workload
) -> None:
    asked = problem(machine, workload=workload)
    try:
        planned = best_policy(asked)
    except DoesNotFit:
        return
    policy = planned.policy
    assert not planned.solution.solver.startswith("by hand"), planned.solution.solver
    assert violations(asked, planned.solution) == []
    for level, footprint in asked.footprints(policy).items():
        assert footprint.total_bytes <= asked.capacity_bytes(level) + 1, level
    assert policy.num_kv_pages * PAGE_TOKENS >= workload.max_total_tokens
    assert policy.batch_size <= min(workload.num_sequences or 10**9, policy.tokens_per_pass)
    assert policy.attention_on_gpu or policy.kv_cache.vram == 0
    assert policy.num_slots or max(policy.weights.vram, policy.weights.dram) == 1


@pytest.mark.exhaustive
@MANY
@given(MACHINES, WORKLOADS, st.data())
def test_more_of_any_resource_never_lowers_the_predicted_optimum(
    machine: Hardware, workload: Workload, data: st.DataObject
) -> None:
    try:
        before = best_policy(problem(machine, workload=workload))
    except DoesNotFit:
        return
    more = data.draw(st.sampled_from(resources(machine)))
    better = scaled(machine, more, data.draw(st.floats(1, 4)))
    after = best_policy(problem(better, workload=workload))
    # Whether layers outside experts stay or come in each pass is decided by replays.
    if after.policy.streamed_layers != before.policy.streamed_layers:
        assert after.token_s <= before.token_s * 1.03
        return
    # The tie between batches is worth at most one part in 10,000.
    assert after.solution.seconds_per_sequence <= before.solution.seconds_per_sequence * (1 + 3e-4)


def resources(machine: Hardware) -> list[str]:
    computing = [f"{name} processor" for name, level in machine.levels.items() if level.processor]
    return [*machine.levels, *machine.links, *computing]


def scaled(machine: Hardware, name: str, factor: float) -> Hardware:
    if name in machine.links:
        link = machine.links[name]  # type: ignore[index]
        staging = link.staging_bandwidth and link.staging_bandwidth * factor
        faster = replace(link, bandwidth=link.bandwidth * factor, staging_bandwidth=staging)
        return replace(machine, links={**machine.links, name: faster})
    level_name = name.removesuffix(" processor")
    level = machine.levels[level_name]  # type: ignore[index]
    if name == level_name:
        changed = replace(level, capacity_bytes=int(level.capacity_bytes * factor))
    else:
        assert level.processor is not None
        changed = replace(level, processor=faster_processor(level.processor, factor))
    return replace(machine, levels={**machine.levels, level_name: changed})


def faster_processor(processor: Processor, factor: float) -> Processor:
    gemm = {dtype: curve.scaled(factor) for dtype, curve in processor.gemm.items()}
    rates = ("bandwidth", "attention_bandwidth", "attention_flops", "elementwise_bandwidth")
    return replace(
        processor, gemm=gemm, **{name: getattr(processor, name) * factor for name in rates}
    )


def test_with_room_for_all_nothing_is_streamed() -> None:
    policy = policy_of(problem(cpu_machine(120)))
    assert (policy.weights.dram, policy.num_slots) == (1, 0)


def test_few_rows_leave_the_memory_to_experts() -> None:
    few = policy_of(problem(workload=replace(WORKLOAD, num_sequences=4)))
    many = policy_of(problem())
    assert few.batch_size == 4
    assert few.weights.dram > many.weights.dram


@pytest.mark.parametrize("machine", [cpu_machine(120), cpu_machine(16), gpu_machine()])
def test_a_pass_has_no_more_room_than_the_whole_job_fills(machine: Hardware) -> None:
    few = Workload.uniform(prompt_tokens=30, new_tokens=100, num_sequences=8)
    assert policy_of(problem(machine, workload=few)).tokens_per_pass <= 8 * (30 + 1)


def test_long_prompts_get_passes_in_which_arithmetic_covers_the_reading() -> None:
    short = Workload.uniform(prompt_tokens=4, new_tokens=256, num_sequences=64)
    long = Workload.uniform(prompt_tokens=1500, new_tokens=32, num_sequences=256)
    machine = cpu_machine(4)
    passes = [
        policy_of(problem(machine, shape=SMALL, workload=workload)).tokens_per_pass
        for workload in (short, long)
    ]
    assert passes[1] >= 2 * passes[0]


def test_a_tie_goes_to_the_smaller_batch() -> None:
    # So little memory traffic and so slow a processor that a larger batch brings nothing.
    machine = cpu_machine(200, flops=1e10)
    policy = policy_of(problem(machine, workload=Workload.uniform(prompt_tokens=64, new_tokens=64)))
    assert policy.batch_size <= 256


def test_whole_experts_are_placed() -> None:
    policy = policy_of(problem(gpu_machine()))
    for share in (policy.weights.vram, policy.weights.dram, policy.weights.disk):
        assert share * 256 == pytest.approx(round(share * 256))


def test_refusal_names_level_need_have_largest_term_and_a_way_out() -> None:
    asked = problem(cpu_machine(2))
    with pytest.raises(DoesNotFit) as caught:
        best_policy(asked)
    message = str(caught.value)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert re.search(r"dram: needs .* GiB at the least, has 2.00 GiB", message)
    assert "Largest term: weights outside experts" in message
    smallest = re.search(r"resources.dram: (\d+)MiB", message)
    assert smallest is not None
    best_policy(asked.with_capacity("dram", int(smallest[1]) * 2**20))
    with pytest.raises(DoesNotFit):
        best_policy(asked.with_capacity("dram", (int(smallest[1]) - 1) * 2**20))


def test_refusal_names_the_gpu_where_it_is_too_small() -> None:
    with pytest.raises(DoesNotFit, match=r"vram: needs .* has 2.00 GiB"):
        best_policy(problem(gpu_machine(2)))


@pytest.mark.parametrize("dram_gib", [2, 64])
def test_a_refusal_names_the_way_without_the_gpu_where_there_is_one(dram_gib: int) -> None:
    asked = problem(gpu_machine(2, dram_gib))
    with pytest.raises(DoesNotFit) as caught:
        best_policy(asked)
    alone = replace(asked, hardware=asked.hardware.without("vram"), stages=False)
    assert ("Without the GPU it fits: resources.device: cpu" in str(caught.value)) == _fits(alone)
    assert _fits(alone) == (dram_gib == 64)


def _fits(asked: Problem) -> bool:
    try:
        best_policy(asked)
    except DoesNotFit:
        return False
    return True


def test_a_refusal_because_of_long_rows_says_what_would_shorten_them() -> None:
    long = replace(WORKLOAD, max_total_tokens=10**6)
    with pytest.raises(DoesNotFit, match=r"keys and values, .*; lower max_tokens"):
        best_policy(problem(cpu_machine(20), workload=long, kv_on_disk=False))


def test_a_gpu_machine_without_a_disk_needs_room_for_all_weights() -> None:
    machine = gpu_machine(dram_gib=60)
    links = {name: link for name, link in machine.links.items() if "disk" not in name}
    levels = {name: level for name, level in machine.levels.items() if name != "disk"}
    with pytest.raises(DoesNotFit, match="dram: needs"):
        best_policy(problem(replace(machine, levels=levels, links=links)))


def test_capacity_is_a_budget_in_bytes() -> None:
    assert problem().with_capacity("dram", 7 * GIB).capacity_bytes("dram") == 7 * GIB
    assert len(SHAPE.moe_layers) * SHAPE.num_experts == problem().num_experts


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [SMALL, SHAPE], ids=["small", "8x7b"])
def test_a_little_more_memory_never_makes_a_job_slower(shape: ModelShape) -> None:
    """Also where it is just enough for more slots, or for the first candidate of another kind."""
    workload = Workload.uniform(prompt_tokens=100, new_tokens=100, num_sequences=2000)
    asked = problem(cpu_machine(1), shape=shape, workload=workload, kv_on_disk=False)
    with pytest.raises(DoesNotFit) as caught:
        best_policy(asked)
    least = re.search(r"resources.dram: (\d+)MiB", str(caught.value))
    assert least is not None
    before = float("inf")
    for step in range(8):
        changed = asked.with_capacity("dram", (int(least[1]) + 150 * step) * 2**20)
        now = best_policy(changed).solution.seconds_per_sequence
        assert now <= before * (1 + 3e-4)
        before = now


@MANY
@given(st.floats(8, 30), st.floats(60, 120))
def test_without_a_disk_what_is_planned_still_fits(vram: float, dram: float) -> None:
    asked = problem(
        gpu_machine(vram, dram).without("disk"),
        workload=Workload.uniform(prompt_tokens=100, new_tokens=100, num_sequences=100),
    )
    try:
        policy = policy_of(asked)
    except DoesNotFit as refused:
        least = re.search(r"resources.(dram|vram): (\d+)MiB", str(refused))
        assert least is not None
        return
    for level, footprint in asked.footprints(policy).items():
        assert footprint.total_bytes <= asked.capacity_bytes(level), level


def test_experts_that_seem_faster_when_they_arrive_are_not_sent_away() -> None:
    machine = cpu_machine(120)
    processor = machine.dram.processor
    assert processor is not None
    streamed = {dtype: curve.scaled(1.5) for dtype, curve in processor.gemm.items()}
    odd = replace(machine.dram, processor=replace(processor, gemm_streamed=streamed))
    policy = policy_of(problem(replace(machine, levels={**machine.levels, "dram": odd})))
    assert policy.weights.dram == 1


@pytest.mark.parametrize(
    ("model", "layers"),
    [("qwen3-next-80b-a3b", "recurrent"), ("switch-base-8", "layers of an encoder")],
)
def test_a_schedule_that_attends_where_the_model_does_not_is_refused(
    model: str, layers: str
) -> None:
    asked = problem(gpu_machine(60), shape=load_model(model).shape)
    with pytest.raises(ConfigError, match=rf"cgopipe.* attends on the CPU, but {layers}"):
        best_policy(replace(asked, schedule="cgopipe"))


def test_a_prompt_that_is_not_cut_gets_a_pass_at_least_as_long_as_it_is() -> None:
    shape = load_model("switch-base-8").shape
    workload = shape.cached(Workload.uniform(prompt_tokens=9000, new_tokens=100))
    asked = problem(cpu_machine(64), shape=shape, workload=workload)
    assert policy_of(asked).tokens_per_pass >= 9100


@pytest.mark.parametrize(("dram_gib", "is_on_disk"), [(14, True), (24, True), (140, False)])
def test_keys_and_values_go_to_disk_where_that_is_faster(dram_gib: float, is_on_disk: bool) -> None:
    asked = problem(cpu_machine(dram_gib))
    within, chosen = best_policy(replace(asked, kv_on_disk=False)), best_policy(asked)
    assert (chosen.policy.kv_cache.disk > 0) == is_on_disk
    if is_on_disk:
        assert chosen.token_s < within.token_s
    else:
        assert chosen.token_s == pytest.approx(within.token_s, rel=0.01)


@pytest.mark.parametrize(("prompt_tokens", "is_on_disk"), [(77, False), (100_000, True)])
def test_keys_and_values_go_to_a_disk_of_unknown_rate_where_nothing_else_fits(
    prompt_tokens: int, is_on_disk: bool
) -> None:
    workload = Workload.uniform(prompt_tokens=prompt_tokens, new_tokens=128, num_sequences=500)
    asked = replace(problem(cpu_machine(14), workload=workload), kv_beside_weights=False)
    assert (policy_of(asked).kv_cache.disk > 0) == is_on_disk


@pytest.mark.parametrize(
    ("machine", "model"), [("t4", "qwen3-30b-a3b"), ("rtx4090", "qwen3-next-80b-a3b")]
)
def test_a_disk_for_keys_and_values_never_makes_a_plan_slower(machine: str, model: str) -> None:
    """Also where the solver's picture says that they belong there, and replays that they do not."""
    options = PlanOptions(hw=machine, model=model, prompt_len=512, gen_len=256, requests=2000)
    asked = stated_question(load_profile(machine), options).problem
    within, chosen = best_policy(replace(asked, kv_on_disk=False)), best_policy(asked)
    assert chosen.token_s <= 1.01 * within.token_s


def test_few_sequences_beside_many_experts_do_not_hide_many_that_are_faster() -> None:
    """By mean busy times 4 sequences come first on a T4; when all have climbed, many are faster."""
    options = PlanOptions(
        hw="t4", model="switch-base-128", prompt_len=512, gen_len=256, requests=400
    )
    asked = stated_question(load_profile("t4"), options).problem.evenly
    planned = best_policy(asked)
    assert planned.policy.batch_size > 100
    few = [one for one in planned.candidates if one.candidate.policy.batch_size < 20]
    assert planned.candidates[0] in few
