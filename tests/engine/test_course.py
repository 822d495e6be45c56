"""How long the rest of a run takes, told pass by pass: the real batcher on a virtual clock."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sin
from typing import Any, cast

import numpy as np
import pytest
import torch

from moebatch.engine.batcher import Batcher, Slice
from moebatch.engine.progress.course import Course, _load
from moebatch.engine.progress.endings import Endings
from moebatch.engine.progress.time_left import PassDone, Standing, TimeLeft
from moebatch.engine.sequence import Sequence
from moebatch.engine.text import AnswerText
from moebatch.layout.lanes import pass_seconds
from moebatch.layout.load import PassLoad
from moebatch.plan.prediction import predict
from moebatch.plan.problem import Problem
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout
from moebatch.spec.policy.policy import Batching, Placement, Policy, pages_of
from moebatch.spec.request import Begun, Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Length, Workload
from moebatch.store.kv.cache import KVCache
from tests.engine.test_batcher import NoText
from tests.plan.problems import SMALL, cpu_machine, problem

Factor = Callable[[float], float]
"""How much longer than planned passes take, by the share of the job that is done."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What comes in, and what will become of it."""

    prompt: int
    limit: int
    answer: int
    begun: int = 0
    shared: int = 0

    @property
    def length(self) -> Length:
        return Length(self.prompt + self.begun, self.limit - self.begun, self.shared)

    def sequence(self, index: int) -> Sequence:
        sampling = Sampling(max_tokens=self.limit)
        own = range(10_000 * (index + 1), 10_000 * (index + 1) + self.prompt - self.shared)
        request = Request(
            index=index,
            custom_id=str(index),
            prompt_tokens=(*range(self.shared), *own),
            sampling=sampling,
            begun=(Begun(tokens=tuple(range(self.begun)), logprobs=()),) if self.begun else (),
        )
        sequence = Sequence(request, 0, AnswerText(NoText(), sampling))
        sequence.output_tokens.extend(range(self.begun))
        return sequence


@dataclass(frozen=True)
class Told:
    """What was said after a pass, and what was true."""

    number: int
    eta_s: float
    truth_s: float
    mean_pass_s: float

    def is_within(self, share: float) -> bool:
        """No moment is told better than to a pass."""
        return abs(self.eta_s - self.truth_s) <= share * self.truth_s + self.mean_pass_s


class Ticking:
    """A virtual clock on which looking takes time, so that replays have a price."""

    def __init__(self, now: list[float]) -> None:
        self._now = now
        self._looked_s = 0.0

    def __call__(self) -> float:
        self._looked_s += 0.04
        return self._now[0] + self._looked_s


def asked_for(rows: list[Row]) -> Problem:
    lengths = tuple(row.length for row in rows)
    prompts, new, shared = (sum(values) / len(rows) for values in zip(*lengths, strict=True))
    workload = Workload(
        num_sequences=len(rows),
        mean_prompt_tokens=prompts,
        mean_new_tokens=new,
        mean_shared_tokens=shared,
        max_total_tokens=max(row.prompt + row.limit for row in rows),
        max_new_tokens=max(row.limit for row in rows),
        lengths=lengths,
    )
    return problem(cpu_machine(16), shape=SMALL, workload=workload)


def policy(asked: Problem, seats: int = 48, batching: Batching = "mixed") -> Policy:
    mean = asked.workload.mean_total_tokens
    pages = max(pages_of(asked.workload.max_total_tokens), int(seats * pages_of(int(mean)) * 1.2))
    return Policy(
        batch_size=seats,
        micro_batch_size=16,
        tokens_per_pass=8 * seats,
        num_slots=6,
        weights=Placement(dram=0.25, disk=0.75),
        num_kv_pages=pages,
        batching=batching,
    )


def run(
    rows: list[Row],
    under: Policy,
    *,
    factor: Factor,
    noise: float = 0.1,
    seed: int = 1,
    slowness: dict[str, float] | None = None,
) -> list[Told]:
    """All passes of a job, each as long as the plan says times the factor and noise; on a machine
    whose lanes take so much longer than the plan knows."""
    slowness, busy_s = slowness or {}, Counter[str]()
    asked, rng, now = asked_for(rows), random.Random(seed), [0.0]
    cache = KVCache(
        [CacheGroup(layers=(0,), layout=CacheLayout.of_heads(1, 1))],
        num_pages=[under.num_kv_pages],
        dtype=torch.float32,
    )
    batcher = Batcher((row.sequence(i) for i, row in enumerate(rows)), cache, under)
    course, time_left = Course(lambda: now[0]), TimeLeft(asked, under, clock=Ticking(now))
    course.begin()
    etas, ended_s, total = [], [], sum(row.answer for row in rows)
    come = 0
    while slices := batcher.next_pass():
        for piece in slices:
            sequence = piece.sequence
            sequence.num_cached += piece.num_tokens
            if sequence.num_pending == 0:
                come += 1
                sequence.output_tokens.append(7)
                if len(sequence.output_tokens) == rows[sequence.request.index].answer:
                    batcher.retire(sequence)
                    course.ended(sequence)
        more = factor(come / total) * rng.lognormvariate(0, noise)
        cost = asked.cost_of(_load(slices), under)
        lanes = {lane: seconds * slowness.get(lane, 1.0) for lane, seconds in cost.lanes.items()}
        busy_s.update({lane: seconds * more for lane, seconds in lanes.items()})
        reading_s = lanes.get("disk->dram", 0.0) + cost.full_slots_s
        now[0] += max(cost.seconds, pass_seconds(lanes, under), reading_s) * more
        course.after_pass(slices, batcher, num_grown=0)
        time_left.add([course.passes.popleft()])
        etas.append(time_left.seconds(course.standing, course.endings, busy_s=busy_s))
        ended_s.append(now[0])
    mean_s = now[0] / len(etas)
    return [
        Told(number, eta_s, now[0] - at_s, mean_s)
        for number, (eta_s, at_s) in enumerate(zip(etas, ended_s, strict=True), 1)
    ]


def require_right(told: list[Told]) -> None:
    """From the third pass on within 25 %, from the tenth within 10 %."""
    wrong = [t for t in told if t.number >= 3 and not t.is_within(0.25)]
    assert not wrong, wrong[:3]
    wrong = [t for t in told if t.number >= 10 and not t.is_within(0.10)]
    assert not wrong, (len(wrong), len(told), wrong[:3])


def ragged(count: int, seed: int, **more: int) -> list[Row]:
    """Answers as long as they may be: half of them short, some very long."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        limit = min(400, 1 + int(rng.lognormvariate(3.3, 1.0)))
        prompt = 5 + int(rng.lognormvariate(4.2, 0.9))
        rows.append(Row(prompt=prompt, limit=limit, answer=limit, **more))
    return rows


DRIFTS: dict[str, Factor] = {
    "as planned": lambda done: 1.0,
    "three times slower": lambda done: 3.0,
    "twice as fast": lambda done: 0.5,
    "drifting": lambda done: 1.4 * (1 + 0.05 * sin(6 * done)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("factor", DRIFTS.values(), ids=DRIFTS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_on_ragged_rows_the_time_left_is_right_from_the_third_pass_on(
    factor: Factor, seed: int
) -> None:
    rows = ragged(250, seed)
    require_right(run(rows, policy(asked_for(rows)), factor=factor, seed=seed))


def test_rows_that_are_gone_on_with_and_beginnings_that_are_shared_are_counted() -> None:
    begun = [replace(row, begun=row.limit // 3) if row.limit > 6 else row for row in ragged(150, 4)]
    shared = [replace(row, prompt=row.prompt + 64, shared=64) for row in ragged(150, 5)]
    shared[0] = replace(shared[0], shared=0)
    for rows in (begun, shared):
        require_right(run(rows, policy(asked_for(rows)), factor=lambda done: 1.3))


def test_static_batches_wait_for_their_longest() -> None:
    rows = ragged(90, 6)
    require_right(run(rows, policy(asked_for(rows), 32, "static"), factor=lambda done: 0.8))


def test_of_many_rows_some_stand_for_all() -> None:
    rows = [
        Row(prompt=5 + row.prompt % 40, limit=row.limit % 8 + 1, answer=row.limit % 8 + 1)
        for row in ragged(1500, 7)
    ]
    require_right(run(rows, policy(asked_for(rows), 64), factor=lambda done: 1.0))


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [150, 250])
def test_when_answers_end_early_those_that_ended_tell_of_the_others(limit: int) -> None:
    rng = random.Random(8)
    rows = [
        replace(row, limit=limit, answer=max(1, min(limit, int(rng.gauss(50, 12)))))
        for row in ragged(240, 8)
    ]
    told = run(rows, policy(asked_for(rows)), factor=lambda done: 1.0)
    assert told[2].eta_s > 1.5 * told[2].truth_s, "nothing is known yet but what may come"
    second_half = [t for t in told if t.number > len(told) / 2]
    assert all(t.is_within(0.4) for t in second_half), second_half[:3]
    right = sum(t.is_within(0.2) for t in second_half)
    assert right > 0.8 * len(second_half)


def test_one_pass_that_hangs_changes_little() -> None:
    rows, hung = ragged(150, 9), [0]

    def factor(done: float) -> float:
        hung[0] += 1
        return 60.0 if hung[0] in (4, 30) else 1.0

    told = run(rows, policy(asked_for(rows)), factor=factor)
    after = [t for t in told if t.number > 30]
    assert all(t.is_within(0.10) for t in after)


def test_before_the_first_pass_it_is_what_the_plan_says() -> None:
    rows = ragged(150, 10)
    asked = asked_for(rows)
    under = policy(asked)
    left_s = TimeLeft(asked, under).seconds(Course().standing, Course().endings)
    assert left_s == pytest.approx(predict(asked, under).job_time_s, rel=0.01)


def test_a_pass_in_work_counts_down_no_further_than_it_should_take() -> None:
    rows = ragged(60, 11)
    asked = asked_for(rows)
    time_left, course = TimeLeft(asked, policy(asked)), Course()

    def left_s(since_s: float) -> float:
        return time_left.seconds(course.standing, course.endings, since_s=since_s)

    assert left_s(0.5) == left_s(0.0) - 0.5
    assert 0 < left_s(10_000.0) == left_s(1000.0) < left_s(0.0)


def test_the_rest_is_replayed_only_where_that_pays() -> None:
    """What a replay costs has to be a small share of the time since the one before."""
    rows, looks = ragged(60, 12), []
    asked = asked_for(rows)
    now = [0.0]

    class Counting(TimeLeft):
        def _replayed(self, *args: object) -> object:  # type: ignore[override]
            looks.append(now[0])
            now[0] += 0.1
            return super()._replayed(*args)  # type: ignore[arg-type]

    time_left, course = Counting(asked, policy(asked), clock=lambda: now[0]), Course()
    for number in range(1, 101):
        now[0] += 1.0
        time_left.seconds(replace(course.standing, num_passes=number), course.endings)
    assert 4 <= len(looks) <= 6


@pytest.mark.few(1)
@pytest.mark.parametrize("slowness", [{"cpu": 40.0}, {"cpu": 12.0, "disk->dram": 2.0}])
def test_where_another_lane_is_the_slowest_than_was_planned_busy_lanes_tell(
    slowness: dict[str, float],
) -> None:
    """Late passes, with few sequences, take far less then than early ones."""
    rows = ragged(200, 13)
    require_right(run(rows, policy(asked_for(rows)), factor=lambda done: 1.0, slowness=slowness))


def test_a_lane_that_should_do_next_to_nothing_at_first_changes_little() -> None:
    """Such as writes of a pass that hardly writes: a hundred times as long is a moment."""
    rows = ragged(150, 14)
    asked = asked_for(rows)
    under = replace(policy(asked), kv_cache=Placement(disk=1))
    first = PassLoad(prompt_tokens=8, prompt_pairs=36, prompt_slices=1)
    priced = asked.cost_of(first, under)
    time_left, course = TimeLeft(asked, under), Course()
    time_left.add([PassDone(number=1, load=first, seconds=priced.seconds)])
    busy_s = {**priced.lanes, "dram->disk": 100 * priced.lanes["dram->disk"]}
    assert busy_s["dram->disk"] < 0.05 * priced.seconds
    left_s = time_left.seconds(course.standing, course.endings, busy_s=busy_s)
    assert left_s == pytest.approx(predict(asked, under).job_time_s, rel=0.1)


def slice_of(row: Row, *, pending: int, tokens: int, **request: Any) -> Slice:
    """Once it is computed: so many tokens of its sequence are still to come."""
    sequence = row.sequence(0)
    sequence.request = replace(sequence.request, **request)
    sequence.num_cached = sequence.num_tokens - pending
    return Slice(sequence, tokens)


def test_prompts_that_end_are_told_from_those_that_go_on_and_from_answers() -> None:
    """Only behind the last token of a prompt is a next token chosen."""
    long = Row(prompt=40, limit=9, answer=9)
    goes_on = slice_of(long, pending=20, tokens=10)
    ends = slice_of(replace(long, begun=1), pending=1, tokens=40)
    decodes = slice_of(replace(long, begun=3), pending=1, tokens=1)
    load = _load([goes_on, ends, decodes])
    assert (load.prompt_slices, load.decode_sequences, load.logits_rows) == (2, 1, 2)
    assert load.prompt_tokens == 50


@pytest.mark.parametrize("num_encoded", [1, 6])
def test_an_answer_that_goes_on_behind_an_encoded_prompt_is_no_prompt(num_encoded: int) -> None:
    """Its tokens go through the layers of the decoder, each as if it had just been chosen."""
    row = Row(prompt=num_encoded + 1, limit=9, answer=9)
    encoded = slice_of(row, pending=1, tokens=num_encoded, num_encoded=num_encoded)
    goes_on = slice_of(replace(row, begun=5), pending=1, tokens=5, num_encoded=num_encoded)
    load = _load([encoded, goes_on])
    assert (load.prompt_slices, load.prompt_tokens) == (1, num_encoded)
    assert load.prompt_pairs == num_encoded**2
    assert load.decode_sequences == load.logits_rows == 5
    assert load.decode_positions == 5 * num_encoded + 1 + 2 + 3 + 4 + 5


class Standings:
    """A batcher that is asked where a run stands."""

    def standing(self, num_passes: int) -> Standing:
        return Standing(num_passes=num_passes)


def test_where_a_run_stands_is_looked_at_once_a_second() -> None:
    now, batcher = [0.0], cast(Batcher, Standings())
    course, seen = Course(lambda: now[0]), []
    for _ in range(5):
        now[0] += 0.5
        course.after_pass([], batcher, num_grown=0)
        seen.append(course.standing.num_passes)
    assert seen == [1, 1, 3, 3, 5]


def test_the_time_since_the_last_pass_begins_anew_with_each() -> None:
    now, batcher = [0.0], cast(Batcher, Standings())
    course = Course(lambda: now[0])
    now[0] = 7.0
    course.begin()
    now[0] = 9.0
    assert course.since_s == 2.0
    course.after_pass([], batcher, num_grown=0)
    now[0] = 9.5
    assert course.since_s == 0.5


def test_of_an_answer_that_goes_on_only_what_is_new_tells_of_others() -> None:
    """That it got so far in an earlier run, others need not have done."""
    course, expected = Course(), Endings()
    row = Row(prompt=5, limit=100, answer=60, begun=40)
    sequence = row.sequence(0)
    sequence.output_tokens.extend([7] * 20)
    course.ended(sequence)
    expected.add(60, 100, begun=40)
    others = np.full(9, 100)
    told, waiting = course.endings.expected_new([], others), expected.expected_new([], others)
    np.testing.assert_array_equal(told[1], waiting[1])
