"""Candidates by the least that they can take, as far as a search looks at them."""

from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from moebatch.plan.search.bounds import least_experts_s, least_seconds
from moebatch.plan.search.candidates import Candidate
from moebatch.plan.search.known import Known

Ranked = tuple[float, Candidate]
"""A candidate behind the least seconds per sequence that it can take."""


class Ranking:
    """Candidates in that order, which their source works out one by one; those that have been asked
    for are kept, so that it may be gone through again."""

    def __init__(self, source: Iterable[Ranked]) -> None:
        self._source = iter(source)
        self._asked_for: list[Ranked] = []

    def __iter__(self) -> Iterator[Ranked]:
        number = 0
        while number < len(self._asked_for) or self._goes_on():
            yield self._asked_for[number]
            number += 1

    def _goes_on(self) -> bool:
        following = next(self._source, None)
        if following is not None:
            self._asked_for.append(following)
        return following is not None


def ranked_among(known: Known, some: Iterable[Candidate]) -> Ranking:
    """Candidates by what they would take if everything were where it is computed; that does not
    depend on capacities. Of most no more is worked out than what their experts take."""
    return Ranking(_by_least(known, some))


def _by_least(known: Known, some: Iterable[Candidate]) -> Iterator[Ranked]:
    alike: dict[Hashable, list[tuple[int, Candidate]]] = {}
    for number, candidate in enumerate(some):
        alike.setdefault(_key(candidate), []).append((number, candidate))
    # Those that take as long keep their order.
    waiting = [
        (least_experts_s(known, those[0][1]), False, those[0][0], those) for those in alike.values()
    ]
    heapify(waiting)
    while waiting:
        seconds, is_exact, _, those = heappop(waiting)
        if is_exact:
            yield seconds, those[0][1]
            continue
        seconds = least_seconds(known, those[0][1])
        for number, candidate in those:
            heappush(waiting, (seconds, True, number, [(number, candidate)]))


def _key(candidate: Candidate) -> Hashable:
    """Where nothing streams, levels below and slots do nothing: many candidates share one."""
    policy = candidate.policy
    places = policy.attention_on_gpu, policy.ffn_on_gpu
    return candidate.phases, policy.micro_batch_size, policy.schedule, places
