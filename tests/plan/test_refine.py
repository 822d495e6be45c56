"""What trying a policy on the job itself makes better."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from moebatch.plan.prediction import predict
from moebatch.plan.problem import Problem
from moebatch.plan.question import changed_profile, stated_dtypes
from moebatch.plan.replay.loads import FEW_LOADS, job_loads, rough_loads
from moebatch.plan.search import refine
from moebatch.plan.search.known import Known
from moebatch.plan.search.neighbours import (
    far_away,
    in_even_passes,
    leaps,
    neighbours,
    with_more_on_disk,
)
from moebatch.plan.search.planner import best_policy
from moebatch.plan.search.refine import _climbed_by_replays, _promising, refined
from moebatch.plan.search.refusal import too_large
from moebatch.schedule.steps.attention import LOOK_AHEAD
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.workload import Length, Workload
from tests.plan.problems import GB, SMALL, cpu_machine, gpu_machine, problem

JOBS = {
    "short rows": [Length(20 + i % 90, 1 + i % 40) for i in range(300)],
    "long prompts": [Length(1500, 32)] * 60,
    "a common beginning": [Length(450, 32, 400)] * 400,
}
START = Policy(
    batch_size=48,
    micro_batch_size=48,
    tokens_per_pass=2048,
    num_slots=6,
    num_kv_pages=1200,
    weights=Placement(dram=0.125, disk=0.875),
)


def job(lengths: list[Length]) -> Problem:
    count = len(lengths)
    workload = Workload(
        num_sequences=count,
        mean_prompt_tokens=sum(length.prompt_tokens for length in lengths) / count,
        mean_new_tokens=sum(length.new_tokens for length in lengths) / count,
        mean_shared_tokens=sum(length.shared_tokens for length in lengths) / count,
        max_total_tokens=max(length.prompt_tokens + length.new_tokens for length in lengths),
        max_new_tokens=max(length.new_tokens for length in lengths),
        lengths=tuple(lengths),
    )
    return problem(cpu_machine(3, disk=2.2 * GB, flops=1.8e12), shape=SMALL, workload=workload)


def seconds(of: Problem, policy: Policy) -> float:
    found = predict(of, policy).job_time_s
    assert found is not None
    return found


def grid(of: Problem, start: Policy) -> Iterator[Policy]:
    """Policies that fit, far apart from each other, each with all the pages that it has room for
    or half as many."""
    for seats, tokens, slots in product((64, 200, 400), (1024, 2048, 4096), (2, 3, 6)):
        policy = replace(
            start,
            batch_size=seats,
            tokens_per_pass=tokens,
            num_slots=slots,
            weights=Placement(disk=1.0),
        )
        fitting = (n for n in range(6400, 0, -400) if fits(of, replace(policy, num_kv_pages=n)))
        pages = next(fitting, 0)
        yield from (replace(policy, num_kv_pages=n) for n in (pages, pages // 2) if n > 100)


def fits(of: Problem, policy: Policy) -> bool:
    return too_large(of, policy) is None


def test_what_a_cache_on_disk_leaves_experts_have_at_once() -> None:
    def num_held(policy: Policy) -> int:
        return of.num_resident(policy) + policy.num_slots

    of = job(JOBS["short rows"])
    shared = replace(START, kv_cache=Placement(dram=0.5, disk=0.5))
    moved = [one for one in neighbours(of, shared) if one.kv_cache.disk == 1]
    assert max(map(num_held, moved)) > num_held(shared)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", JOBS)
def test_none_of_many_others_is_much_better(name: str) -> None:
    of = job(JOBS[name])
    _, found = refined(of, Known(of), START)
    assert fits(of, found)
    best_s = min(seconds(of, other) for other in grid(of, START))
    assert seconds(of, found) <= min(seconds(of, START), best_s * 1.03)


class Counting(Known):
    """Remembers which policies were replayed."""

    def __init__(self, of: Problem) -> None:
        super().__init__(of)
        self.replayed: set[Policy] = set()

    def replayed_s(self, policy: Policy, *, most: int = FEW_LOADS) -> float:
        self.replayed.add(policy)
        return super().replayed_s(policy, most=most)


@pytest.mark.parametrize("batch_size", [1, 7, 48, 200, 400])
@pytest.mark.parametrize("name", JOBS)
def test_no_job_needs_more_pages_than_its_longest_sequences_hold(
    name: str, batch_size: int
) -> None:
    of = job(JOBS[name])
    most = of.most_pages(batch_size)
    assert most <= batch_size * pages_of(of.workload.max_cached_tokens)
    enough = replace(START, batch_size=batch_size, tokens_per_pass=4096, num_kv_pages=most)
    plenty = replace(enough, num_kv_pages=100 * most)
    assert num_passes(of, enough) == num_passes(of, plenty)


def test_sequences_of_unequal_lengths_need_fewer_pages_than_as_many_of_the_longest() -> None:
    of = job(JOBS["short rows"])
    assert of.most_pages(200) < 0.8 * 200 * pages_of(of.workload.max_cached_tokens)


def test_few_passes_are_priced_one_by_one() -> None:
    """Pairs of them tell nothing where each is of other sequences."""
    of = job([Length(20 + 30 * i, 5 + 3 * i) for i in range(9)])
    known, one = Known(of), replace(START, batch_size=9)
    assert len(rough_loads(of.workload, one)) <= 16
    assert known.replayed_s(one, most=8) == known.replayed_s(one)


def test_a_few_hundred_long_rows_are_replayed_nearly_as_they_run() -> None:
    """Were four of their tokens one, 324 sequences at once would be taken to be as fast as 465."""
    of = stated(
        "4xt4",
        "mimo-v2-flash",
        job([Length(1000 + 7919 * i % 8000, 60 + 31 * i % 450) for i in range(500)]).workload,
    )
    policy = Policy(
        batch_size=324,
        micro_batch_size=4,
        tokens_per_pass=24_576,
        num_slots=6,
        num_kv_pages=137_013,
        weights=Placement(vram=0.079, dram=0.703, disk=0.218),
        kv_cache=Placement(disk=1.0),
        attention_on_gpu=True,
        ffn_on_gpu=True,
    )
    faster = replace(policy, batch_size=465)
    known, gained = Known(of), seconds(of, policy) / seconds(of, faster)
    assert gained > 1.08
    assert known.replayed_s(policy) / known.replayed_s(faster) == pytest.approx(gained, rel=0.03)


def num_passes(of: Problem, policy: Policy) -> float:
    return sum(count for count, _ in job_loads(of.workload, policy))


def test_of_prompts_that_take_many_passes_each_fewer_policies_are_replayed() -> None:
    counts = []
    for prompt_tokens in (2_000, 200_000):
        workload = Workload.uniform(prompt_tokens=prompt_tokens, new_tokens=100, num_sequences=1000)
        asked = problem(cpu_machine(16), workload=workload)
        known = Counting(asked)
        best_policy(asked, known)
        counts.append(len(known.replayed))
    short, long = counts
    assert 0 < long <= 3 < short


def test_rows_of_unequal_lengths_are_planned_as_well_as_those_of_their_mean() -> None:
    shape = load_model("mixtral-8x7b").shape
    lengths = [Length(5 + i, 20 + 19 * i) for i in range(20)]
    unequal = replace(job(lengths).workload, num_sequences=100_000)
    of = Problem(
        shape=shape,
        dtypes=stated_dtypes(shape),
        hardware=load_profile("h800").hardware(),
        workload=unequal,
    )
    of_means = replace(of, workload=replace(unequal, lengths=()))
    planned, other = best_policy(of).policy, best_policy(of_means).policy
    assert seconds(of, planned) <= 1.01 * seconds(of, other)


def test_the_last_row_does_not_wait_where_a_few_experts_leave_it_room() -> None:
    shape = load_model("gemma-4-26b-a4b").shape
    of = Problem(
        shape=shape,
        dtypes=stated_dtypes(shape),
        hardware=load_profile("2xt4").hardware(),
        workload=Workload.uniform(prompt_tokens=700, new_tokens=881, num_sequences=12),
    )
    assert best_policy(of).policy.num_kv_pages >= 12 * pages_of(700 + 881)


def test_experts_that_leave_a_gpu_go_to_disk_where_main_memory_is_full() -> None:
    one_row = Workload.uniform(prompt_tokens=6000, new_tokens=16, num_sequences=1)
    policy = best_policy(problem(gpu_machine(15, 40), workload=one_row)).policy
    assert policy.weights.disk, "main memory has no room for all that leave"
    assert policy.tokens_per_pass >= 6000, "what is on disk is read once for the whole prompt"


def test_an_expert_is_computed_while_the_next_one_arrives_however_slow_the_disk_is() -> None:
    of = job(JOBS["short rows"])
    of = replace(of, hardware=cpu_machine(5, disk=0.1 * GB, flops=3e12))
    policy = best_policy(of).policy
    assert policy.weights.disk > 0
    assert policy.num_slots >= 2


def stated(machine: str, model: str, workload: Workload, *what_if: str) -> Problem:
    shape, profile = load_model(model).shape, changed_profile(load_profile(machine), what_if)
    return Problem(
        shape=shape,
        dtypes=stated_dtypes(shape),
        hardware=profile.hardware(),
        workload=workload,
    )


def test_a_batch_that_bounds_its_micro_batches_grows_with_them() -> None:
    workload = Workload.uniform(prompt_tokens=2, new_tokens=953, num_sequences=37_430)
    asked = replace(stated("2xt4", "gpt-oss-20b", workload), schedule="cgopipe")
    policy = best_policy(asked).policy
    assert policy.micro_batch_size > 2000
    assert policy.num_micro_batches > LOOK_AHEAD, "fewer wait for each other"


def test_a_batch_that_shrinks_still_has_micro_batches_ahead() -> None:
    policy = replace(
        START,
        schedule="cgopipe",
        batch_size=3000,
        micro_batch_size=1000,
        tokens_per_pass=4000,
        num_slots=16,
    )
    smaller = [one for one in neighbours(job(JOBS["short rows"]), policy) if one.batch_size < 3000]
    assert smaller
    assert all(one.num_micro_batches > LOOK_AHEAD for one in smaller)


def test_a_single_micro_batch_grows_with_its_batch() -> None:
    of = stated("h100-pcie", "flexolmo-7x7b", job(JOBS["short rows"]).workload)
    policy = replace(START, batch_size=12, micro_batch_size=12, ffn_on_gpu=True)
    assert {(one.batch_size, one.micro_batch_size) for one in neighbours(of, policy)} >= {(24, 24)}


def test_a_single_micro_batch_that_grows_may_have_passes_of_fewer_tokens() -> None:
    """Whose room it may need: A.X-K1's plan with 8 GiB of a GPU was beaten by 20 %."""
    of = stated("h100-pcie", "flexolmo-7x7b", job(JOBS["short rows"]).workload)
    policy = replace(START, batch_size=160, micro_batch_size=160, ffn_on_gpu=True)
    sizes = {
        (one.micro_batch_size, one.tokens_per_pass)
        for one in neighbours(of, policy)
        if one.batch_size == 200
    }
    assert (200, 1536) in sizes


def test_micro_batches_of_a_schedule_that_is_asked_for_change_on_a_cpu_too() -> None:
    """A plan for Ling-mini in micro-batches of 8 was beaten by 6 %."""
    of = replace(job(JOBS["short rows"]), schedule="hot")
    assert {one.micro_batch_size for one in neighbours(of, START)} >= {24, 48}
    policy = replace(START, schedule="hot", micro_batch_size=24)
    assert {one.micro_batch_size for one in neighbours(of, policy)} >= {12, 24, 48}


def test_half_the_sequences_leave_room_to_experts() -> None:
    """A plan for Switch-Base on a T4 had 42 sequences, of which none fewer was faster until there
    were half as many, and was beaten by 6 %."""
    of = job(JOBS["short rows"])
    halves = [one for one in neighbours(of, START) if one.batch_size == START.batch_size // 2]
    assert any(one.weights.dram > START.weights.dram for one in halves)


def test_what_a_cache_leaves_that_goes_to_disk_slots_may_have() -> None:
    """A.X-K1's plan for long prompts was beaten by 11 %."""
    of = replace(job(JOBS["short rows"]), kv_on_disk=True)
    moved = [one for one in leaps(of, START) if one.kv_cache.disk == 1]
    assert any(one.weights.dram == 0 and one.num_slots > START.num_slots for one in moved)


def test_twice_the_sequences_with_more_on_disk_take_no_more_of_the_gpu() -> None:
    """Where a share stayed as it was, twice the cache had no room there: a plan for GLM-5.3-Flash
    on a T4 was beaten by 6.6 %."""
    workload = Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000)
    of = stated("t4", "glm-5.3-flash", workload)
    policy = Policy(
        batch_size=1000,
        micro_batch_size=4,
        tokens_per_pass=32_768,
        num_slots=6,
        num_kv_pages=48_000,
        weights=Placement(vram=41 / 12_096, dram=543 / 12_096, disk=11_512 / 12_096),
        kv_cache=Placement(vram=1 / 45, dram=44 / 45),
        attention_on_gpu=True,
        ffn_on_gpu=True,
        streamed_layers=45,
    )
    twice = list(with_more_on_disk(of, policy))
    assert [one.batch_size for one in twice] == [2000, 2000]
    assert all(one.kv_cache.vram <= 1 / 90 and one.kv_cache.dram <= 1 / 2 for one in twice)


def test_prompts_that_begin_in_one_pass_decode_in_wider_micro_batches() -> None:
    """All at once in the next one, not half of them as mean lengths have it: a plan for
    Switch-Base was beaten by 20 %."""
    workload = Workload.uniform(prompt_tokens=3, new_tokens=1, num_sequences=488)
    of = stated("2xt4", "switch-base-128", workload)
    policy = replace(START, batch_size=488, micro_batch_size=244, num_kv_pages=488)
    policy = replace(policy, ffn_on_gpu=True, attention_on_gpu=True, kv_cache=Placement(vram=1.0))
    assert 488 in [one.micro_batch_size for one in in_even_passes(of, policy)]


def test_rows_of_one_token_have_as_many_places_as_pages() -> None:
    """All of them take a page, and one pass."""
    workload = Workload.uniform(prompt_tokens=14, new_tokens=1, num_sequences=239)
    policy = best_policy(stated("4xt4", "qwen3-30b-a3b", workload)).policy
    assert policy.batch_size == policy.num_kv_pages == 239


def test_prompts_that_begin_together_fill_their_few_passes_alike() -> None:
    """Two of as many tokens as they can have, of which the second would have little to compute
    beside the same experts."""
    workload = Workload.uniform(prompt_tokens=57, new_tokens=5, num_sequences=349)
    of = stated("l4", "ernie-4.5-21b-a3b", workload)
    policy = best_policy(of).policy
    even_s = seconds(of, replace(policy, tokens_per_pass=10_500))
    assert seconds(of, policy) <= 1.01 * even_s


def test_many_unequal_rows_of_few_passes_are_replayed_often() -> None:
    lengths = [Length(3 + i % 3, 6 + 5 * i % 6) for i in range(300)]
    workload = replace(job(lengths).workload, num_sequences=60_000)
    of = stated("l4", "qwen2-57b-a14b", workload, "vram=157GiB")
    known = Counting(of)
    best_policy(of, known)
    assert len(known.replayed) > 60


def test_where_few_may_be_replayed_the_most_promising_of_each_size_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mean lengths tell policies of one size apart, and say less of two sizes."""
    of = job(JOBS["short rows"])
    known, others = Counting(of), _promising(of, Known(of), START, far_away(of, START))
    monkeypatch.setattr(refine, "_num_replays", lambda problem, policy: 3)
    _climbed_by_replays(of, known, (known.replayed_s(START), START))
    of_size: dict[tuple[int, int], Policy] = {}
    for one in sorted(others, key=known.mean_s):
        of_size.setdefault((one.batch_size, one.tokens_per_pass), one)
    first, second, third, *_ = of_size.values()
    assert known.replayed >= {first, second, third}


def test_a_climb_that_saw_less_in_the_end_than_a_new_one_would_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, better = job(JOBS["short rows"]), (0.5, replace(START, batch_size=64))
    num_around = len(_promising(of, Known(of), START, far_away(of, START)))
    monkeypatch.setattr(refine, "_fastest", lambda known, others, best: better)
    monkeypatch.setattr(refine, "_num_replays", lambda problem, policy: num_around + 1)
    end, may_go_on = _climbed_by_replays(of, Known(of), (1.0, START))
    assert end == better
    assert may_go_on, "it looked at one policy around the better one"
    monkeypatch.setattr(refine, "_num_replays", lambda problem, policy: 1)
    assert _climbed_by_replays(of, Known(of), better) == (better, False)


def test_sequences_that_all_begin_together_do_not_lead_a_plan_astray() -> None:
    """By mean lengths all keys and values should be in main memory, of half of each answer; but
    all are there at once with all that they ever have."""
    workload = Workload.uniform(prompt_tokens=1, new_tokens=209, num_sequences=99_249)
    of = stated("generic-cpu", "glm-4.7-flash", workload)
    more = of.with_capacity("dram", int(1.3 * of.capacity_bytes("dram")))
    assert seconds(more, best_policy(more).policy) <= 1.01 * seconds(of, best_policy(of).policy)


def test_a_climb_looks_around_however_much_a_job_goes_through() -> None:
    """Little memory, few sequences, and many passes: twice the sequences are 1.65 times as fast."""
    workload = Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000)
    of = stated("generic-cpu", "qwen2-57b-a14b", workload)
    policy = best_policy(of).policy
    twice = [one for one in neighbours(of, policy) if of.fits(one)]
    assert twice
    assert seconds(of, policy) <= 1.03 * min(seconds(of, one) for one in twice)


def test_more_rounds_of_fewer_sequences_are_found() -> None:
    """Beyond so many sequences in a pass experts are computed one by one: three rounds of 667 are
    1.19 times as fast as two of 1,313 and 687."""
    workload = Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000)
    of = stated("h100", "mellum2-12b-a2.5b", workload)
    policy = best_policy(of).policy
    other = replace(policy, batch_size=667, micro_batch_size=667, tokens_per_pass=12_288)
    assert seconds(of, policy) <= 1.03 * seconds(of, replace(other, num_kv_pages=667 * 48))


def test_a_plan_with_its_cache_on_disk_is_tried_where_another_may_have_it_there() -> None:
    """What the disk is only allowed to hold, main memory may have room for: a plan with the whole
    cache on disk and three times as many sequences is 1.4 times as fast."""
    workload = Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000)
    of, more = (
        stated("rtx4090", "mimo-v2-flash", workload, *changes) for changes in ((), ("dram=184GiB",))
    )
    planned = best_policy(of).policy
    assert planned.kv_cache.disk
    assert seconds(more, best_policy(more).policy) <= 1.01 * seconds(more, planned)


def test_what_need_not_lie_on_disk_stays_in_main_memory() -> None:
    """Two climbs end with a layer of the cache, or with some experts, on a disk that nothing is
    won by."""
    workload = Workload.uniform(prompt_tokens=77, new_tokens=128, num_sequences=5000)
    policy = best_policy(stated("t4", "mixtral-8x7b", workload)).policy
    assert (policy.kv_cache.disk, policy.weights.disk) == (0.0, 0.0)


def test_a_pass_that_takes_seconds_may_have_more_tokens() -> None:
    """Answers are short, and each pass of their prompts needs most experts: in passes of 32,768
    tokens it takes 1.47 times as long."""
    workload = Workload.uniform(prompt_tokens=300, new_tokens=4, num_sequences=30_000)
    of = stated("h800", "deepseek-v3", workload)
    assert best_policy(of).policy.tokens_per_pass > 45_000
    assert stated("generic-cpu", "deepseek-v3", workload).most_worth_risking == 32_768


OTHERS = {
    "smaller passes of fewer sequences": (
        ("h100", "deepseek-v2-lite"),
        Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000),
        Policy(
            batch_size=1750,
            micro_batch_size=584,
            tokens_per_pass=1750,
            num_slots=0,
            num_kv_pages=84_000,
            weights=Placement(vram=1.0),
            ffn_on_gpu=True,
            schedule="cgopipe",
        ),
    ),
    "larger passes of more sequences": (
        ("h100", "llama-4-scout", "dram=240GiB"),
        Workload.uniform(prompt_tokens=1371, new_tokens=8, num_sequences=3183),
        Policy(
            batch_size=367,
            micro_batch_size=323,
            tokens_per_pass=63_781,
            num_slots=6,
            num_kv_pages=32_000,
            weights=Placement(vram=0.25, dram=0.75),
            ffn_on_gpu=True,
        ),
    ),
    "few slots beside attention on the CPU": (
        ("h100-pcie", "qwen2-57b-a14b"),
        Workload.uniform(prompt_tokens=451, new_tokens=314, num_sequences=135),
        Policy(
            batch_size=135,
            micro_batch_size=64,
            tokens_per_pass=8192,
            num_slots=6,
            num_kv_pages=6480,
            weights=Placement(vram=0.66, dram=0.34),
            ffn_on_gpu=True,
        ),
    ),
    "a twentieth of many experts stays": (
        ("rtx4090", "switch-large-128"),
        job([Length(2000 + 7919 * i % 20_000, 4) for i in range(30)]).workload,
        Policy(
            batch_size=5,
            micro_batch_size=4,
            tokens_per_pass=131_072,
            num_slots=6,
            num_kv_pages=4538,
            weights=Placement(vram=0.046, dram=0.954),
            kv_cache=Placement(vram=1.0),
            attention_on_gpu=True,
            ffn_on_gpu=True,
        ),
    ),
    "all sequences at once, most of their cache on disk": (
        ("rtx4090", "longcat-flash-chat"),
        Workload.uniform(prompt_tokens=76, new_tokens=124, num_sequences=37_747),
        Policy(
            batch_size=26_078,
            micro_batch_size=52,
            tokens_per_pass=37_747,
            num_slots=9,
            num_kv_pages=216_322,
            weights=Placement(vram=112 / 14_336, disk=1 - 112 / 14_336),
            kv_cache=Placement(dram=11 / 28, disk=17 / 28),
            ffn_on_gpu=True,
            streamed_layers=54,
        ),
    ),
    "larger passes where the cache leaves the GPU": (
        ("l4", "a.x-k1", "dram=368GiB"),
        Workload.uniform(prompt_tokens=15, new_tokens=22, num_sequences=3331),
        Policy(
            batch_size=3331,
            micro_batch_size=256,
            tokens_per_pass=26_345,
            num_slots=6,
            num_kv_pages=9993,
            weights=Placement(vram=110 / 11_520, dram=4100 / 11_520, disk=7310 / 11_520),
            ffn_on_gpu=True,
            streamed_layers=60,
        ),
    ),
    "micro-batches wider than prompts have anyway": (
        ("h800", "mellum2-12b-a2.5b"),
        Workload.uniform(prompt_tokens=2019, new_tokens=1, num_sequences=3276),
        Policy(
            batch_size=3276,
            micro_batch_size=3276,
            tokens_per_pass=110_592,
            num_slots=0,
            num_kv_pages=416_052,
            weights=Placement(vram=1.0),
            attention_on_gpu=True,
            ffn_on_gpu=True,
        ),
    ),
    "more slots while more tokens are computed": (
        ("generic-cpu", "qwen3-30b-a3b"),
        Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000),
        Policy(
            batch_size=2000,
            micro_batch_size=16,
            tokens_per_pass=16_384,
            num_slots=324,
            num_kv_pages=96_000,
            weights=Placement(dram=0.163, disk=0.837),
            kv_cache=Placement(disk=1.0),
        ),
    ),
    "fewer rounds, of which mean lengths say too much": (
        ("rtx4090", "ernie-4.5-vl-28b-a3b", "dram=256GiB"),
        Workload.uniform(prompt_tokens=47, new_tokens=143, num_sequences=45_929),
        Policy(
            batch_size=11_484,
            micro_batch_size=1024,
            tokens_per_pass=11_484,
            num_slots=74,
            num_kv_pages=137_808,
            weights=Placement(vram=0.433, dram=0.567),
            ffn_on_gpu=True,
            schedule="cgopipe",
        ),
    ),
    "all prompts in one pass instead of six": (
        ("a100-80g", "ling-lite-1.5"),
        Workload.uniform(prompt_tokens=8, new_tokens=54, num_sequences=686),
        Policy(
            batch_size=686,
            micro_batch_size=686,
            tokens_per_pass=6174,
            num_slots=0,
            num_kv_pages=2744,
            weights=Placement(vram=1.0),
            kv_cache=Placement(vram=1.0),
            attention_on_gpu=True,
            ffn_on_gpu=True,
        ),
    ),
    "a round less, with some of its cache below the GPU": (
        ("h100-pcie", "minimax-m3", "dram=288GiB"),
        Workload.uniform(prompt_tokens=52_984, new_tokens=4, num_sequences=316),
        Policy(
            batch_size=7,
            micro_batch_size=1,
            tokens_per_pass=80_411,
            num_slots=6,
            num_kv_pages=23_184,
            weights=Placement(vram=46 / 7296, dram=2633 / 7296, disk=4617 / 7296),
            kv_cache=Placement(vram=0.85, dram=0.15),
            attention_on_gpu=True,
            ffn_on_gpu=True,
        ),
    ),
    "more slots for more experts that come, beside a larger batch": (
        ("h100", "qwen3.5-35b-a3b", "dram->vram=16GB/s"),
        Workload.uniform(prompt_tokens=1389, new_tokens=647, num_sequences=3153),
        Policy(
            batch_size=156,
            micro_batch_size=156,
            tokens_per_pass=1686,
            num_slots=16,
            num_kv_pages=19_968,
            weights=Placement(vram=0.947, dram=0.053),
            kv_cache=Placement(vram=1.0),
            attention_on_gpu=True,
            ffn_on_gpu=True,
        ),
    ),
}
"""Machine, model and changes, workload, and a policy that was faster than the plan by 4 to 63 %."""


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_walk_from_a_plan_found_is_no_longer_much_faster(name: str) -> None:
    (machine, model, *changes), workload, other = OTHERS[name]
    of = stated(machine, model, workload, *changes)
    assert of.fits(other)
    assert seconds(of, best_policy(of).policy) <= 1.03 * seconds(of, other)


@pytest.mark.parametrize(
    ("model", "tokens", "num_slots"),
    [
        # What fewer tokens leave, slots have at once: 12 of them beside 32,768 took 1.7 % longer.
        ("hy4", 24_576, 36),
        # Passes of 12,288 tokens take longer than those of 8192, and those of 16,384 as long.
        ("jamba-1.5-mini", 32_768, 6),
    ],
)
def test_no_climb_ends_between_passes_of_many_tokens(
    model: str, tokens: int, num_slots: int
) -> None:
    workload = Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000)
    of = stated("generic-cpu", model, workload, "disk->dram=2GB/s").as_cached
    planned = best_policy(of).policy
    other = replace(planned, tokens_per_pass=tokens, num_slots=num_slots)
    other = replace(other, weights=Placement(disk=1.0))
    assert of.fits(other)
    assert seconds(of, planned) <= 1.002 * seconds(of, other)


def test_the_other_processor_may_attend() -> None:
    workload = Workload.uniform(prompt_tokens=100, new_tokens=50, num_sequences=1000)
    of = stated("t4", "mixtral-8x7b", workload)
    on_gpu = replace(START, attention_on_gpu=True, ffn_on_gpu=True, kv_cache=Placement(vram=1.0))
    on_gpu = replace(on_gpu, weights=Placement(vram=0.05, dram=0.95))
    on_cpu, *_ = (one for one in neighbours(of, on_gpu) if not one.attention_on_gpu)
    assert on_cpu.kv_cache.dram == 1
    assert on_cpu.weights.vram > on_gpu.weights.vram, "experts have the room of its cache"
    assert any(one.attention_on_gpu for one in neighbours(of, on_cpu))


def test_the_cache_may_leave_a_gpu_that_still_attends() -> None:
    """As it does for a model whose other layers keep states there: experts have its room."""
    workload = Workload.uniform(prompt_tokens=100, new_tokens=50, num_sequences=1000)
    of = stated("t4", "qwen3-next-80b-a3b", workload)
    on_gpu = replace(START, attention_on_gpu=True, ffn_on_gpu=True, kv_cache=Placement(vram=1.0))
    on_gpu = replace(on_gpu, weights=Placement(vram=0.001, dram=0.999))
    below, *_ = (one for one in neighbours(of, on_gpu) if one.kv_cache.dram == 1)
    assert below.attention_on_gpu
    assert below.weights.vram > on_gpu.weights.vram


def test_a_cache_below_a_gpu_may_come_up() -> None:
    """In the room of experts that leave; a climb that went down finds its way back."""
    workload = Workload.uniform(prompt_tokens=100, new_tokens=50, num_sequences=1000)
    of = stated("t4", "mixtral-8x7b", workload)
    below = replace(START, attention_on_gpu=True, ffn_on_gpu=True, kv_cache=Placement(dram=1.0))
    below = replace(below, weights=Placement(vram=0.1, dram=0.9))
    for policy in (below, replace(below, attention_on_gpu=False)):
        above, *_ = (one for one in neighbours(of, policy) if one.kv_cache.vram == 1)
        assert above.attention_on_gpu
        assert above.weights.vram < policy.weights.vram


def test_a_cache_of_unequal_rows_may_come_up_with_fewer_pages_than_its_longest_ones_hold() -> None:
    """Experts that stay are worth more than room for all of them at once: a plan for a ragged job
    of Switch-Large on two T4 was beaten by 11 %."""
    lengths = job([Length(300 + 7 * i % 600, 1 + 11 * i % 90) for i in range(1000)])
    of = stated("t4", "mixtral-8x7b", lengths.workload)
    below = replace(START, attention_on_gpu=True, ffn_on_gpu=True, kv_cache=Placement(dram=1.0))
    below = replace(below, weights=Placement(vram=0.1, dram=0.9))
    all_pages, *_ = (one for one in neighbours(of, below) if one.kv_cache.vram == 1)
    known = Known(of)
    promising = _promising(of, known, below, neighbours(of, below))
    fewer = max((one for one in promising if one.kv_cache.vram), key=lambda one: one.weights.vram)
    assert all_pages.weights.vram < fewer.weights.vram < below.weights.vram
