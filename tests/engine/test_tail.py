"""When nobody waits any more, memory goes from pages to experts; answers stay the same."""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.batcher import Batcher
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.spec import EngineSpec
from moebatch.engine.tail import Tail
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.policy.policy import Placement, Policy
from moebatch.spec.request import Outcome, Request
from moebatch.spec.sampling import Sampling
from moebatch.store.experts.dram import ExpertStore
from tests.engine.test_engine import TokenText, policy, requests, tokens_of
from tests.schedule.check import check_timeline
from tests.tiny import CACHED_APART

POLICIES = {
    "usual": policy(),
    "one slot": policy(num_slots=1, resident=0),
    "much room": policy(num_kv_pages=300),
    "nearly everything resident": policy(resident=0.9, num_slots=2),
    "all at once": policy(batch_size=10, tokens_per_pass=1000, micro_batch_size=100),
    "small slices": policy(tokens_per_pass=9, batch_size=3),
    "static batches": replace(policy(batch_size=4), batching="static"),
    "cache just large enough": policy(num_kv_pages=8),
}


@dataclass
class Watched:
    """Memory of cache and experts, looked at whenever it changes."""

    built: BuiltEngine
    sizes: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    """Bytes that had been read after each pass."""
    preempted: list[tuple[int, int]] = field(default_factory=list)
    """Pages of the cache and sequences sent back so far, after each pass."""

    def look(self) -> None:
        self.built.check_integrity()
        built = self.built
        in_slots = built.experts.num_bytes if built.experts is not None else 0
        self.sizes.append(built.cache.bytes_on("dram") + in_slots)


@contextmanager
def watched(
    folder: Path, chosen: Policy, monkeypatch: pytest.MonkeyPatch, **options: object
) -> Iterator[Watched]:
    order = EngineSpec(
        files=open_model(folder, "float32"),
        policy=chosen,
        max_tokens=512,
        num_traced_passes=10**6,
        **options,
    )
    built = build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    found = Watched(built)
    after_pass, grow = Tail.after_pass, ExpertStore.grow

    def watch_pass(self: Tail, batcher: Batcher) -> None:
        after_pass(self, batcher)
        found.look()
        found.reads.append(built.reads.num_bytes)
        found.preempted.append((built.cache.first.num_pages, batcher.num_preempted))

    def watch_growth(self: ExpertStore) -> None:
        grow(self)
        found.look()

    monkeypatch.setattr(Tail, "after_pass", watch_pass)
    monkeypatch.setattr(ExpertStore, "grow", watch_growth)
    found.look()
    try:
        with torch.inference_mode():
            yield found
        found.look()
        assert max(found.sizes) == found.sizes[0], "memory is given back before it is taken"
        assert built.recorder is not None
        check_timeline(built.recorder.timeline)
    finally:
        built.close()
        monkeypatch.undo()


def answers(built: BuiltEngine, rows: Sequence[Request]) -> list[tuple[int, ...]]:
    outcomes: list[Outcome] = list(built.engine.run(rows))
    return tokens_of(sorted(outcomes, key=lambda outcome: outcome.request.index))


def ragged(lengths: Sequence[int]) -> list[Request]:
    """Answers of these lengths after short prompts."""
    rows = requests([3 + i % 5 for i in range(len(lengths))])
    return [
        replace(row, sampling=Sampling(temperature=0.0, max_tokens=length))
        for row, length in zip(rows, lengths, strict=True)
    ]


CASES = [
    (title, family)
    for title in POLICIES
    for family in CACHED_APART
    if family == CACHED_APART[0] or title in ("usual", "much room")
]


@pytest.mark.few
@pytest.mark.parametrize(("title", "family"), CASES)
def test_tokens_stay_those_of_transformers_and_memory_never_grows(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    title: str,
    family: str,
) -> None:
    chosen = POLICIES[title]
    with watched(tiny_checkpoint(family), chosen, monkeypatch) as found:
        assert answers(found.built, requests()) == expected(family)
        if title == "much room":
            engine = found.built.engine
            assert engine.course.passes[-1].num_grown == engine.statistics.num_grown > 0


@pytest.mark.few(name=("klotski", "cgopipe", "flexgen", "pregated", "promoe"))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_with_experts_that_stay(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    chosen = replace(policy(num_kv_pages=150, num_slots=9), schedule=name)
    with watched(tiny_checkpoint("mixtral"), chosen, monkeypatch) as found:
        assert answers(found.built, requests()) == expected("mixtral")
        assert (found.built.engine.statistics.num_grown > 0) == (
            not SCHEDULES[name].traits.is_paged
        )


def test_less_is_read_the_longer_a_tail_lasts_and_the_answers_are_the_same(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rows = tiny_checkpoint("mixtral"), ragged([5 + 3 * i for i in range(24)])
    chosen = policy(batch_size=24, num_kv_pages=100, resident=0, num_slots=2)
    found = {}
    for plans_tail in (True, False):
        with watched(folder, chosen, monkeypatch, plans_tail=plans_tail) as run:
            num_tokens = answers(run.built, rows)
            statistics = run.built.engine.statistics
            found[plans_tail] = num_tokens, run.built.reads.num_bytes
            assert (statistics.num_grown > 0) == plans_tail
            assert statistics.num_preempted == 0
    assert found[True][0] == found[False][0]
    assert found[True][1] < 0.6 * found[False][1]


def test_when_all_experts_have_come_to_stay_nothing_is_read_any_more(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = policy(num_kv_pages=300, resident=0, num_slots=2)
    with watched(tiny_checkpoint("mixtral"), chosen, monkeypatch) as found:
        answers(found.built, ragged([40] * 8))
        assert found.built.engine.statistics.num_grown == 18
        assert found.reads[-1] == found.reads[-10]


def test_nobody_is_sent_back_because_the_cache_has_become_smaller(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short answers so far say nothing about those that are in work at the end."""
    stops = Sampling(temperature=0.0, max_tokens=60, stop_token_ids=frozenset(range(320)))
    rows = requests([4] * 48)
    rows = [
        *(replace(row, sampling=stops) for row in rows[:40]),
        *(replace(row, sampling=Sampling(temperature=0.0, max_tokens=60)) for row in rows[40:]),
    ]
    chosen = policy(num_kv_pages=30, num_slots=2, resident=0)
    with watched(tiny_checkpoint("mixtral"), chosen, monkeypatch) as found:
        answers(found.built, rows)
        assert found.built.engine.statistics.num_grown > 0
        counts = {count for num_pages, count in found.preempted if num_pages < 30}
        assert len(counts) == 1


def test_sequences_that_begin_alike_keep_what_they_share(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = requests([70])[0].prompt_tokens
    rows = [replace(row, prompt_tokens=header + row.prompt_tokens) for row in ragged(range(4, 24))]
    chosen, found = policy(batch_size=20, num_kv_pages=100, resident=0), {}
    for shares in (True, False):
        with watched(tiny_checkpoint("mixtral"), chosen, monkeypatch, shares=shares) as run:
            found[shares] = answers(run.built, rows)
            assert run.built.engine.statistics.num_grown > 0
            assert (run.built.engine.statistics.shared_tokens > 0) == shares
    assert found[True] == found[False]


def test_if_the_system_refuses_the_memory_everything_goes_on_without(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: ExpertStore) -> None:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(ExpertStore, "grow", refuse)
    with watched(tiny_checkpoint("mixtral"), policy(num_kv_pages=300), monkeypatch) as found:
        assert answers(found.built, requests()) == expected("mixtral")
        assert found.built.engine.statistics.num_grown == 0
        assert found.built.cache.first.num_pages < 300


def test_keys_and_values_on_disk_stay_where_they_are(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    chosen = replace(policy(num_kv_pages=300), kv_cache=Placement(dram=0.5, disk=0.5))
    with watched(tiny_checkpoint("mixtral"), chosen, monkeypatch, scratch=tmp_path) as found:
        assert answers(found.built, requests()) == expected("mixtral")
        assert found.built.cache.first.num_pages == 300
