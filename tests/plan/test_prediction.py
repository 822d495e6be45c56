"""What a prediction is made of: passes, phases, lanes, and what would help."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.layout.admission import Caps
from moebatch.layout.footprint import slot_bytes
from moebatch.layout.lanes import pass_seconds
from moebatch.layout.load import CountedLoad, PassLoad
from moebatch.layout.routing import distinct_experts
from moebatch.plan.advice import _changes
from moebatch.plan.answer import answer_milp
from moebatch.plan.prediction import at_end, predict
from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import alike, job_loads, rough_loads, thinned
from moebatch.plan.replay.passes import job_passes
from moebatch.plan.replay.phases import phases_of, sequences_held
from moebatch.plan.roofline import Operation
from moebatch.plan.roofs import policy_roofs
from moebatch.plan.search.candidates import candidates
from moebatch.plan.search.planner import best_policy
from moebatch.plan.search.whole import whole_policy
from moebatch.spec.machine.hardware import RateCurve
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.policy.policy import PAGE_TOKENS, Placement, Policy
from moebatch.spec.workload import Length, LengthSample, Workload
from tests.few import examples
from tests.plan.problems import (
    GB,
    SMALL,
    WORKLOAD,
    cpu_machine,
    gpu_machine,
    launching,
    problem,
    screened_of,
)

MANY = examples(40)
LENGTHS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 100)), min_size=1, max_size=60)


def workload_of(lengths: list[tuple[int, int]], total: int | None = None) -> Workload:
    prompts, answers = zip(*lengths, strict=True)
    return Workload(
        num_sequences=total or len(lengths),
        mean_prompt_tokens=sum(prompts) / len(lengths),
        mean_new_tokens=sum(answers) / len(lengths),
        max_total_tokens=max(p + n for p, n in lengths),
        max_new_tokens=max(answers),
        lengths=tuple(Length(*length) for length in lengths),
    )


def policy(batch: int = 16, tokens: int = 64, **changes: object) -> Policy:
    usual = Policy(
        batch_size=batch,
        micro_batch_size=8,
        tokens_per_pass=tokens,
        num_slots=6,
        num_kv_pages=10**6,
        weights=Placement(disk=1.0),
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def small(disk: float = 2 * GB, workload: Workload | None = None) -> Problem:
    return problem(
        cpu_machine(3, disk=disk),
        shape=SMALL,
        workload=workload or Workload.uniform(prompt_tokens=60, new_tokens=20, num_sequences=100),
        kv_on_disk=False,
    )


@MANY
@given(LENGTHS, st.integers(1, 40), st.integers(0, 200))
def test_every_token_of_a_job_is_in_some_pass(
    lengths: list[tuple[int, int]], batch: int, more: int
) -> None:
    loads = job_loads(workload_of(lengths), policy(batch, batch + more))
    assert sum(n * load.prompt_tokens for n, load in loads) == sum(p for p, _ in lengths)
    assert sum(n * load.logits_rows for n, load in loads) == sum(n for _, n in lengths)
    pairs = sum(p * (p + 1) // 2 for p, _ in lengths)
    assert sum(n * load.prompt_pairs for n, load in loads) == pairs
    begun = sum(n * (load.prompt_slices - load.resumed_slices) for n, load in loads)
    assert begun == len(lengths)


def test_experts_are_chosen_in_every_pass_of_a_job() -> None:
    """One sequence by itself: a prompt of three tokens, and one token in each pass behind it."""
    of = small(workload=Workload.uniform(prompt_tokens=3, new_tokens=5, num_sequences=1))
    each, layers = distinct_experts(SMALL, 1), len(SMALL.moe_layers)
    assert each == pytest.approx(SMALL.experts_per_token)
    chosen = predict(of, policy(1, 8)).num_chosen
    assert chosen == pytest.approx(layers * (distinct_experts(SMALL, 3) + 4 * each))


@pytest.mark.parametrize(
    ("prompt", "new"), [(20, 60), (400, 4), (3, 3)], ids=["answers", "prompts", "short"]
)
def test_a_long_job_is_drawn_out_from_its_middle(prompt: int, new: int) -> None:
    one = policy(32, 256)

    def seconds(total: int) -> float:
        workload = Workload.uniform(prompt_tokens=prompt, new_tokens=new, num_sequences=total)
        return predict(small(workload=workload), one).job_time_s or 0.0

    assert seconds(20_000) == pytest.approx(10 * seconds(2_000), rel=0.05)
    endless = Workload.uniform(prompt_tokens=prompt, new_tokens=new)
    rate = predict(small(workload=endless), one).tokens_per_s
    assert rate == pytest.approx(20_000 * new / seconds(20_000), rel=0.05)


@pytest.mark.parametrize(
    ("prompt", "new", "rows", "batch", "tokens", "pages"),
    [
        (5, 150, 3323, 535, 921, 5350),
        (20, 119, 8306, 1117, 1120, 8344),
        (8, 34, 7358, 509, 905, 1527),  # as many begin as have pages
        (452, 37, 10863, 1213, 28013, 31210),
    ],
)
def test_a_job_is_drawn_out_by_whole_rounds(
    prompt: int, new: int, rows: int, batch: int, tokens: int, pages: int
) -> None:
    """The last round of rows that are all alike takes as long as any other."""
    workload = Workload.uniform(prompt_tokens=prompt, new_tokens=new, num_sequences=rows)
    asked = policy(batch, tokens, num_kv_pages=pages)
    whole = sum(count for count, _ in job_passes(workload, Caps.of(asked), rows))
    assert sum(count for count, _ in job_loads(workload, asked)) == pytest.approx(whole, rel=0.005)


def test_passes_whose_contexts_have_grown_much_are_not_counted_together() -> None:
    """Of long answers another lane may be the busiest at the end: their mean has none of it."""
    workload = Workload.uniform(prompt_tokens=5, new_tokens=1000, num_sequences=10)
    loads = [*job_passes(workload, Caps.of(policy(10)), 10)]
    assert sum(count for count, _ in loads) == 1000
    contexts = [load.decode_positions / load.decode_sequences for _, load in loads[1:]]
    assert len(contexts) > 4
    assert all(later < 1.6 * before + 128 for before, later in pairwise(contexts))


def test_sequences_that_begin_together_need_whole_pages_at_their_end() -> None:
    """Of 37 tokens three each, not two and a part."""
    workload = Workload.uniform(prompt_tokens=15, new_tokens=22, num_sequences=3331)
    held = sequences_held(workload, 9917, within=2.2)
    assert held == pytest.approx(9917 / 3)


@pytest.mark.few(4)
@pytest.mark.parametrize("total", [30, 100, 1000, 10_000])
@pytest.mark.parametrize(("prompt", "new"), [(64, 64), (1000, 16), (16, 200)])
def test_the_objective_of_the_milp_is_near_what_the_replay_says(
    total: int, prompt: int, new: int
) -> None:
    """Phases are a fluid picture of the passes: right within 12 % for what it chooses."""
    workload = Workload.uniform(prompt_tokens=prompt, new_tokens=new, num_sequences=total)
    asked = small(workload=workload)
    planned = best_policy(asked)
    solution = planned.solution
    rounded = whole_policy(asked, solution.chosen.candidate, solution.shares)
    assert rounded is not None
    replayed = predict(asked, rounded).job_time_s
    assert replayed == pytest.approx(solution.seconds_per_sequence * total, rel=0.12)


@pytest.mark.parametrize("new", [1, 2, 16])
@pytest.mark.parametrize("total", [1, 7])
def test_a_job_smaller_than_a_pass_is_planned_for_whole_passes(total: int, new: int) -> None:
    """One of thousands of tokens would have room for them that nothing needs, and reads as much."""
    workload = Workload.uniform(prompt_tokens=77, new_tokens=new, num_sequences=total)
    phases = phases_of(workload, policy(8, 4096).room)
    num_passes = sum(phase.num_passes for phase in phases) * total
    assert num_passes == pytest.approx(new)
    tokens = sum(phase.num_passes * phase.load.prompt_tokens for phase in phases)
    assert tokens == pytest.approx(77)


@pytest.mark.parametrize("prompt", [600, 4096])
def test_rough_loads_read_as_much_again_for_long_prompts_as_all_passes_do(prompt: int) -> None:
    workload = Workload.uniform(prompt_tokens=prompt, new_tokens=64, num_sequences=600)
    one = policy(64, 2048)
    exact, rough = (
        sum(n * load.prompt_context for n, load in loads)
        for loads in (job_loads(workload, one), rough_loads(workload, one))
    )
    assert rough == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("prompt", [40, 77, 300, 4096])
def test_rough_loads_begin_prompts_as_often_as_all_passes_do(prompt: int) -> None:
    workload = Workload.uniform(prompt_tokens=prompt, new_tokens=64, num_sequences=2000)
    one = policy(64, 2048)
    exact, rough, fluid = (
        sum(n * load.prompt_slices for n, load in loads)
        for loads in (
            job_loads(workload, one),
            rough_loads(workload, one),
            [(2000 * phase.num_passes, phase.load) for phase in phases_of(workload, one.room)],
        )
    )
    assert rough == pytest.approx(exact, rel=0.25)
    assert fluid == pytest.approx(exact, rel=0.25)


@pytest.mark.parametrize("shared", [0, 200])
def test_rough_loads_resume_prompts_as_often_as_all_passes_do(shared: int) -> None:
    """A pass ends within one prompt, of however many sequences a rough one has one for all."""
    workload = Workload.uniform(prompt_tokens=300, new_tokens=64, num_sequences=3000)
    workload = replace(workload, mean_shared_tokens=shared)
    one = policy(2048, 2048, num_kv_pages=2048 * 23)
    exact, rough = (
        sum(n * load.resumed_slices for n, load in loads)
        for loads in (job_loads(workload, one), rough_loads(workload, one))
    )
    assert rough == pytest.approx(exact, rel=0.01)


def test_rough_loads_in_which_a_token_stands_for_itself_are_all_passes() -> None:
    workload = Workload.uniform(prompt_tokens=20, new_tokens=20, num_sequences=300)
    one = policy(64, 300)
    exact, rough = job_loads(workload, one), rough_loads(workload, one)
    for figure in range(len(PassLoad._fields)):
        of_all, of_rough = (sum(n * load[figure] for n, load in loads) for loads in (exact, rough))
        assert of_rough == pytest.approx(of_all)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 8192])
@pytest.mark.parametrize("batch", [5, 11, 40])
def test_rough_loads_encode_in_as_many_passes_as_all_of_them(batch: int, tokens: int) -> None:
    """Such a pass goes through layers that others leave out, however few prompts it has."""
    workload = replace(
        Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=1000), is_encoded=True
    )
    one = policy(batch, tokens, num_kv_pages=batch * 48)
    exact, rough = (
        (
            sum(n for n, load in loads if load.prompt_tokens),
            sum(n * load.prompt_tokens for n, load in loads),
            sum(n for n, _ in loads),
        )
        for loads in (job_loads(workload, one), rough_loads(workload, one))
    )
    assert rough == pytest.approx(exact, rel=0.2)


def test_rough_loads_of_unequal_rows_tell_policies_apart_as_all_passes_do() -> None:
    lengths = [(40 + 7 * i % 200, 20 + 11 * i % 90) for i in range(300)]
    asked = small(workload=workload_of(lengths))

    def token_s(one: Policy, loads: list[CountedLoad]) -> float:
        seconds = sum(n * asked.cost_of(load, one).seconds for n, load in loads)
        return seconds / sum(n * load.logits_rows for n, load in loads)

    by_all_passes = []
    for batch, tokens in product((16, 64, 200), (256, 1024, 4096)):
        one = policy(batch, tokens, num_kv_pages=batch * 10)
        rough, exact = rough_loads(asked.workload, one), job_loads(asked.workload, one)
        assert sum(n for n, _ in rough) == pytest.approx(sum(n for n, _ in exact), rel=0.05)
        by_all_passes.append(token_s(one, rough) / token_s(one, exact))
    assert max(by_all_passes) <= 1.02 * min(by_all_passes)


def test_rough_loads_have_no_more_tokens_than_a_pass_may_have() -> None:
    """An H100 computed 98,304 of them in three parts, and what is more in a fourth: 1.18 times as
    long, so that a plan was beaten by 15 %."""
    workload = Workload.uniform(prompt_tokens=60, new_tokens=2, num_sequences=20_765)
    loads = rough_loads(workload, policy(18_432, 98_304, num_kv_pages=69_004))
    assert max(load.tokens for _, load in loads) <= 98_304


def test_rough_loads_look_no_further_ahead_for_long_answers_than_all_passes_do() -> None:
    """Prompts of half as many tokens would be looked ahead twice as far, and the longest answer
    would begin with the first ones; it waits until one of them has ended."""
    lengths = [(3000, 40 + 37 * i % 100) for i in range(800)]
    lengths[780] = (3000, 300)
    workload, one = workload_of(lengths), policy(640, 65_536, num_kv_pages=130_000)
    exact, rough = (
        sum(n for n, _ in loads) for loads in (job_loads(workload, one), rough_loads(workload, one))
    )
    assert rough == pytest.approx(exact, rel=0.03)


def test_passes_in_which_nothing_is_encoded_are_not_counted_with_others() -> None:
    """They leave layers out, which their mean with another would go through."""
    encoding = PassLoad.of_prompts(2, 30, encodes=True)
    loads = [(1, encoding if n % 7 == 0 else PassLoad.decoding(5, n)) for n in range(90)]
    for counted in (thinned(loads, 6, encodes=True), alike(loads, 6, encodes=True)):
        assert len(counted) <= 12
        assert sum(n for n, load in counted if load.prompt_tokens) == 13
        assert sum(n * load.prompt_tokens for n, load in counted) == pytest.approx(13 * 60)
        assert sum(n for n, _ in counted) == 90
    assert len(thinned(loads, 6, encodes=False)) == 6


def test_few_passes_are_not_counted_with_a_great_many_others() -> None:
    """The longest answers end alone: the mean of thousands of such passes and of some with fifty
    sequences would be a pass with many."""
    alone: CountedLoad = (4000, PassLoad.decoding(2, 3000))
    loads = [alone, *((20, PassLoad.decoding(50 + n, 500)) for n in range(60))]
    for counted in (thinned(loads, 8, encodes=False), alike(loads, 8, encodes=False)):
        assert alone in counted
        assert len(counted) <= 8
        assert sum(n for n, _ in counted) == pytest.approx(5200)


@pytest.mark.parametrize(
    ("prompt", "new", "total", "batch", "tokens", "pages"),
    [
        (121, 15, 14_685, 1677, 31_905, 13_002),
        (13, 139, 7205, 186, 22_217, 1360),
        (770, 5, 41_386, 320, 65_536, 15_680),
    ],
)
def test_a_long_job_in_part_has_as_many_prompts_for_its_answers_as_in_whole(
    prompt: int, new: int, total: int, batch: int, tokens: int, pages: int
) -> None:
    """Pages hold fewer sequences than there are places, and so rounds of them are smaller."""
    workload = Workload.uniform(prompt_tokens=prompt, new_tokens=new, num_sequences=total)
    loads = job_loads(workload, policy(batch, tokens, num_kv_pages=pages))
    of_prompts = sum(n * load.prompt_tokens for n, load in loads)
    answers = sum(n * load.logits_rows for n, load in loads)
    assert of_prompts / answers == pytest.approx(prompt / new, rel=0.01)


def test_few_unequal_rows_take_in_prompts_in_as_many_rough_passes_as_all() -> None:
    workload = workload_of([(100 + 20 * n, 250 + 30 * n) for n in range(9)])
    for tokens in (512, 2048):
        one = policy(9, tokens, num_kv_pages=400)
        exact, rough = (
            sum(n for n, load in loads if load.prompt_tokens)
            for loads in (job_loads(workload, one), rough_loads(workload, one))
        )
        assert rough == exact


@pytest.mark.exhaustive
def test_no_candidate_is_much_better_when_replayed() -> None:
    """The policy that is best in the fluid picture is best pass by pass, but for a few per cent."""
    lengths = [(20 + 7 * i % 200, 5 + 11 * i % 90) for i in range(300)]
    asked = small(workload=workload_of(lengths))
    planned = best_policy(asked)
    chosen = predict(asked, planned.policy).job_time_s
    assert chosen is not None
    near = screened_of(asked)
    policies = (whole_policy(asked, item.candidate, limits.shares) for item, limits in near)
    others = (predict(asked, policy).job_time_s for policy in policies if policy is not None)
    assert chosen <= 1.06 * min(time for time in others if time is not None)


def test_phases_count_the_passes_of_a_job() -> None:
    workload = Workload.uniform(prompt_tokens=64, new_tokens=32, num_sequences=16)
    phases = phases_of(workload, policy(16, 1024).room)
    passes = 16 * sum(phase.num_passes for phase in phases)
    assert passes == pytest.approx(33, abs=1)


@pytest.mark.parametrize(("batch", "tokens"), [(512, 4096), (1536, 8192), (6000, 16384)])
def test_phases_know_that_the_longest_answers_begin_first(batch: int, tokens: int) -> None:
    workload = workload_of([(150, 80 if i % 20 == 0 else 18) for i in range(200)], total=6000)
    one = policy(batch, tokens)
    passes = 6000 * sum(phase.num_passes for phase in phases_of(workload, one.room))
    assert passes == pytest.approx(sum(n for n, _ in job_loads(workload, one)), rel=0.05)


@pytest.mark.parametrize("new", [1, 2, 4])
@pytest.mark.parametrize("batch", [48, 96, 239])
def test_phases_know_that_short_answers_keep_their_places_for_whole_passes(
    batch: int, new: int
) -> None:
    workload = Workload.uniform(prompt_tokens=10, new_tokens=new, num_sequences=239)
    one = policy(batch, 4096, num_kv_pages=batch)
    passes = 239 * sum(phase.num_passes for phase in phases_of(workload, one.room))
    assert passes == pytest.approx(sum(n for n, _ in job_loads(workload, one)), rel=0.05)


@pytest.mark.parametrize("tokens", [6144, 24_576])
@pytest.mark.parametrize("batch", [667, 768, 1200, 1500, 1715])
def test_phases_know_how_few_sequences_the_last_round_has(batch: int, tokens: int) -> None:
    """Places that no other sequence takes are not waited for, and passes of the last sequences
    alone have as few as they have."""
    workload = Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000)
    one = policy(batch, tokens, num_kv_pages=batch * 48)
    phases = [(2000 * phase.num_passes, phase.load) for phase in phases_of(workload, one.room)]
    exact = job_loads(workload, one)
    assert sum(n for n, _ in phases) == pytest.approx(sum(n for n, _ in exact), rel=0.02)
    unlike, unlike_exact = (
        sum(n * load.decode_sequences**2 for n, load in loads) for loads in (phases, exact)
    )
    assert unlike == pytest.approx(unlike_exact, rel=0.17)


def test_a_lane_is_faster_with_a_faster_link_and_nothing_else_changes() -> None:
    slow, fast = small(disk=1 * GB), small(disk=4 * GB)
    one = policy()
    for _, load in job_loads(slow.workload, one):
        before, after = slow.cost_of(load, one).lanes, fast.cost_of(load, one).lanes
        assert before["disk->dram"] == pytest.approx(4 * after["disk->dram"])
        assert before["cpu"] == after["cpu"]


def test_experts_fresh_from_disk_have_a_rate_of_their_own() -> None:
    asked = small()
    processor = asked.hardware.dram.processor
    assert processor is not None
    slower = replace(processor, gemm_streamed={"bfloat16": RateCurve(((1, 1e11),))})
    level = replace(asked.hardware.dram, processor=slower)
    hardware = replace(asked.hardware, levels={**asked.hardware.levels, "dram": level})
    load = PassLoad(decode_sequences=64, decode_positions=6400, logits_rows=64)

    def cpu_s(share: float, problem: Problem) -> float:
        weights = Placement(dram=1 - share, disk=share)
        return problem.cost_of(load, policy(weights=weights)).lanes["cpu"]

    changed = replace(asked, hardware=hardware)
    assert cpu_s(0.0, changed) == cpu_s(0.0, asked)
    assert cpu_s(1.0, changed) > 2 * cpu_s(1.0, asked)
    middle = (cpu_s(0.0, changed) + cpu_s(1.0, changed)) / 2
    assert cpu_s(0.5, changed) == pytest.approx(middle)


@MANY
@given(
    st.floats(0, 500), st.floats(0, 5000), st.sampled_from(["cpu", "gpu"]), st.integers(0, 10**6)
)
def test_lanes_are_never_negative_and_grow_with_the_work(
    decodes: float, prompts: float, kind: str, pick: int
) -> None:
    asked = problem(cpu_machine() if kind == "cpu" else gpu_machine())
    pool = list(candidates(asked))
    one = pool[pick % len(pool)].policy
    less = load_of(decodes, prompts)
    more = load_of(2 * decodes + 1, 2 * prompts + 1)
    before, after = (asked.cost_of(load, one).lanes for load in (less, more))
    assert all(seconds > 0 for seconds in before.values())
    assert pass_seconds(after, one) >= pass_seconds(before, one) * (1 - 1e-9)


def load_of(decodes: float, prompts: float) -> PassLoad:
    return PassLoad(
        decode_sequences=decodes,
        decode_positions=100 * decodes,
        prompt_tokens=prompts,
        prompt_pairs=50 * prompts,
        logits_rows=decodes + prompts / 100,
    )


def test_what_binds_is_what_would_help() -> None:
    """A disk that is far too slow: twice its rate comes near to half the time."""
    answer = answer_milp(small(disk=0.2 * GB), "small")
    assert answer.prediction.bottleneck == "disk->dram"
    best = answer.improvements[0]
    assert best.speedup > 1.7
    assert any(better.change.what_if == "disk->dram=0.4GB/s" for better in answer.improvements)
    assert len(answer.improvements) <= 3


def test_advice_on_large_levels_and_fast_links_is_given_in_figures_that_can_be_asked_for() -> None:
    machine = gpu_machine(6 * 1024, 6 * 1024, link=6e12)
    asked = [change.what_if for change in _changes(problem(machine)) if change.what_if]
    assert {"dram=12290GiB", "dram->vram=12000GB/s"} <= {*asked}
    profile = load_profile("h100-pcie")
    for what_if in asked:
        if not what_if.startswith("weights"):
            profile.with_change(what_if)


def test_where_a_gpu_waits_for_launches_the_host_binds() -> None:
    """Everything is on the GPU: a faster one works less and waits as long."""
    machine, on_gpu = launching(gpu_machine(100)), Placement(vram=1.0)
    chosen = replace(
        policy(batch=16, tokens=16, micro_batch_size=1, num_slots=0, schedule="klotski"),
        weights=on_gpu,
        kv_cache=on_gpu,
        attention_on_gpu=True,
        ffn_on_gpu=True,
    )
    assert machine.vram is not None and machine.vram.processor is not None
    few = replace(WORKLOAD, num_sequences=200)
    for factor, binds in ((1.0, "gpu"), (8.0, "the host")):
        faster = replace(machine.vram, processor=machine.vram.processor.scaled(factor))
        levels = {**machine.levels, "vram": faster}
        asked = problem(replace(machine, levels=levels), shape=SMALL, workload=few)
        found = predict(asked, chosen)
        assert (found.bottleneck, found.binds) == ("gpu", binds)
        unasked = predict(replace(asked, hardware=asked.hardware.without_host), chosen)
        assert (unasked.launching_s, unasked.binds) == (0, "gpu")
        working_s = found.lanes_s["gpu"] - found.launching_s
        assert working_s == pytest.approx(unasked.lanes_s["gpu"])
    assert predict(small(), policy()).launching_s == 0


def test_turning_points_are_those_of_the_machine() -> None:
    asked = problem(gpu_machine())
    (gpu, *_) = policy_roofs(asked, best_policy(asked).policy)
    processor = asked.hardware.dram.processor
    assert processor is not None
    assert gpu.p1 == pytest.approx(processor.gemm_for("bfloat16").peak / (12 * GB))
    assert gpu.p2 > gpu.p1
    assert {placed.operation.name for placed in gpu.operations} == {"attention", "expert FFN"}


def test_attention_on_rooflines_is_that_of_all_layers_by_what_they_see() -> None:
    layers, context = SMALL.num_layers, WORKLOAD.decode_context

    def attention(**changes: Any) -> Operation:
        asked = problem(gpu_machine(), shape=replace(SMALL, **changes))
        (gpu, *_) = policy_roofs(asked, policy())
        return gpu.operations[0].operation

    whole = attention()
    narrow = attention(sliding_windows=(64,) * layers)
    half = attention(sliding_windows=(64, None) * (layers // 2))
    assert narrow.flops == pytest.approx(whole.flops * 64 / context)
    assert half.flops == pytest.approx((narrow.flops + whole.flops) / 2)
    assert half.bytes_j == pytest.approx((narrow.bytes_j + whole.bytes_j) / 2)

    shared = replace(SMALL.attention, num_kv_heads=1)
    other = attention(attention=shared)
    mixed = attention(layer_attentions=(SMALL.attention, shared) * (layers // 2))
    assert mixed.bytes_i == pytest.approx((whole.bytes_i + other.bytes_i) / 2)


def test_what_is_all_on_a_gpu_is_not_bound_by_the_link_to_it() -> None:
    asked, whole = problem(gpu_machine()), Placement(vram=1.0)
    on_gpu = replace(
        best_policy(asked).policy,
        weights=whole,
        kv_cache=whole,
        attention_on_gpu=True,
        ffn_on_gpu=True,
    )
    for weights, moves in ((whole, False), (Placement(vram=0.9, dram=0.1), True)):
        (gpu, *_) = policy_roofs(asked, replace(on_gpu, weights=weights))
        attention, ffn = gpu.operations
        assert not attention.operation.bytes_j
        assert bool(ffn.operation.bytes_j) is moves


def test_a_sample_of_lengths_stays_small_and_even() -> None:
    sample = LengthSample()
    for index in range(50_000):
        sample.add(Length(index, 1))
    assert 2_000 < len(sample.kept) <= 8192
    steps = {
        b.prompt_tokens - a.prompt_tokens
        for a, b in zip(sample.kept, sample.kept[1:], strict=False)
    }
    assert len(steps) == 1


def test_when_nobody_waits_experts_get_the_room_of_pages_and_less_is_read() -> None:
    """One long answer after many short ones: nearly all of the cache is free in its passes."""
    asked = small(workload=workload_of([(60, 20)] * 31 + [(60, 200)]))
    page = PAGE_TOKENS * SMALL.kv_bytes_per_token(asked.dtypes.compute_bytes)
    expert = slot_bytes(SMALL, asked.dtypes)
    one = policy(
        32, 2048, num_kv_pages=20 * expert // page, weights=Placement(dram=0.25, disk=0.75)
    )
    *_, last = job_loads(asked.workload, one)
    at_last = at_end(asked, one, last[1])
    assert 15 <= 64 * at_last.weights.dram - 16 <= 20
    assert at_last == replace(one, weights=at_last.weights)
    with_room, without = (
        predict(asked, replace(one, num_kv_pages=pages)).busy_s["disk->dram"]
        for pages in (one.num_kv_pages, 32 * 18)
    )
    assert with_room < 0.8 * without


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "cgopipe"},
        {"kv_cache": Placement(dram=0.5, disk=0.5)},
        {"weights": Placement(dram=1.0), "num_slots": 0},
    ],
    ids=["pages", "cache on disk", "everything resident"],
)
def test_elsewhere_residents_stay_as_many(changes: dict[str, object]) -> None:
    one, load = policy(**changes), PassLoad(decode_sequences=1, spare_pages=10**5)
    assert at_end(small(), one, load) == one
