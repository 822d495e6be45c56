"""What would help most: the same search with twice as much of one thing, with smaller weights, or
with a smaller cache."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from moebatch.formats.plain import PlainFormat
from moebatch.layout.footprint import Dtypes
from moebatch.plan.prediction import Prediction, predicted_rate
from moebatch.plan.problem import Problem
from moebatch.plan.search.bounds import lower_seconds
from moebatch.plan.search.known import Known
from moebatch.plan.search.planner import Planned, best_policy, best_seconds, screen
from moebatch.plan.search.ranking import ranked_among
from moebatch.plan.search.refine import widened_s
from moebatch.spec.machine.hardware import LevelName, Link
from moebatch.spec.model.named_formats import written_formats
from moebatch.units import format_bytes, format_number, format_rate

FACTOR = 2.0
_MOST_ADVICE = 3
"""Changes that are planned anew: each takes as long as the plan itself."""
_WORTH_SAYING = 1.01
_NEAR = 1 + 1e-6
"""What comes no nearer than this to the best is not looked at: room for rounding."""
_NOUNS: dict[LevelName, str] = {"vram": "GPU", "dram": "CPU", "disk": "disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A problem with twice as much of one thing, with smaller weights or a smaller cache."""

    words: str
    """What, how much of it."""
    problem: Problem
    what_if: str | None = None
    """The same for ``--what-if``, where that says it."""
    option: str | None = None
    """Another option that says it."""
    lanes: frozenset[str] = frozenset()
    """Those that are faster then; none where memory grows."""
    factor: float = FACTOR
    """No lane is faster than by this."""


class Improvement(NamedTuple):
    """A change of the machine, of the weights or of the cache, and what it would bring."""

    speedup: float
    """Job time now over job time then, the policy being chosen anew; of a promise by the objective
    of the MILP, or by a replay with more room."""
    change: Change
    known: Known
    """What is known of candidates for the changed problem."""


def improvements(
    problem: Problem, planned: Planned, now: Prediction | None = None
) -> list[Improvement]:
    """Changes worth saying when each is planned and predicted as `moebatch plan` would, the best
    first: of all those that are promising by the objective of the MILP. The search replays fewer
    waves than a prediction, which may be 3 % of the speedup. `now` is what is predicted of the plan
    if that is known."""
    found = []
    rate = now.tokens_per_s if now else predicted_rate(problem, planned.policy)
    for promise in promising(problem, planned)[:_MOST_ADVICE]:
        changed = promise.change.problem
        then = predicted_rate(changed, best_policy(changed, promise.known).policy)
        found.append(promise._replace(speedup=then / rate))
    return _worth_saying(found)


def promising(problem: Problem, planned: Planned) -> list[Improvement]:
    """Changes worth saying by the objective of the MILP, the best first: over all candidates where
    memory grows, over those that were near the best where something gets faster. That a wider cache
    saves a round of sequences, a replay shows alone, and what a smaller cache saves nearly."""
    enough_s = planned.solution.seconds_per_sequence / _WORTH_SAYING
    found = []
    for change in _smaller_caches(problem):
        known = Known(change.problem)
        speedup = planned.token_s / widened_s(change.problem, known, planned.policy)
        found.append(Improvement(speedup, change, known))
    for change in _changes(problem):
        changed, known = change.problem, planned.known
        ranked = planned.ranked
        if change.lanes:
            # Most changes are of a lane for which no other waits: that shows before anything is
            # worked out for the new machine.
            near = [
                item.candidate
                for item in planned.candidates
                if lower_seconds(problem, item.faster(change.lanes, change.factor))
                <= enough_s * _NEAR
            ]
            known = known.at_rates_of(changed)
            ranked = ranked_among(known, near)
        seconds = best_seconds(screen(changed, ranked, known, best_s=enough_s, near=_NEAR))
        speedup = planned.solution.seconds_per_sequence / seconds
        if not change.lanes:
            speedup = max(speedup, planned.token_s / widened_s(changed, known, planned.policy))
        found.append(Improvement(speedup, change, known))
    return _worth_saying(found)


def _worth_saying(found: Iterable[Improvement]) -> list[Improvement]:
    """The best first."""
    worthy = (one for one in found if one.speedup >= _WORTH_SAYING)
    return sorted(worthy, key=lambda one: -one.speedup)


def _changes(problem: Problem) -> Iterator[Change]:
    """Twice the capacity of a level, the bandwidth of a link, the speed of a processor; weights
    packed in int4, which helps where links are waited for."""
    hardware = problem.hardware
    for level in hardware.levels.values():
        if level.name != "disk":
            twice = int(level.capacity_bytes * FACTOR)
            yield Change(
                words=f"twice the {level.name} ({format_bytes(twice)})",
                what_if=f"{level.name}={_figure(twice / 2**30)}GiB",
                problem=problem.with_capacity(level.name, twice),
            )
        if level.processor is not None:
            name = _NOUNS[level.name]
            yield Change(
                words=f"a {name} twice as fast",
                problem=problem.with_level(
                    replace(level, processor=level.processor.scaled(FACTOR))
                ),
                lanes=frozenset({name.lower()}),
            )
    for link in hardware.links.values():
        yield from _link_changes(problem, link)
    yield from _packed(problem)


def _smaller_caches(problem: Problem) -> Iterator[Change]:
    """Numbers of the cache in fewer bits, where they have all."""
    shape, cache_dtype = problem.shape, problem.shape.attention.cache_dtype
    if cache_dtype is None:
        yield Change(
            words="keys and values in int8, an approximation",
            option="--kv-cache int8",
            problem=replace(problem, shape=shape.cached_in("int8")),
        )
    if shape.recurrence is not None and shape.recurrence.state_dtype == "float32":
        yield Change(
            words="states in float16, an approximation",
            option="--state-cache float16",
            problem=replace(problem, shape=shape.cached_in(cache_dtype or "full", "float16")),
        )


def _figure(number: float) -> str:
    """As options take it: without an exponent, and without commas."""
    return format_number(number).replace(",", "")


def _link_changes(problem: Problem, link: Link) -> Iterator[Change]:
    figures: dict[str, tuple[str, frozenset[str]]] = {
        link.name: ("bandwidth", frozenset({link.name})),
        f"{link.name}.staging": ("staging_bandwidth", frozenset({link.name, "staging"})),
    }
    for name, (field, lanes) in figures.items():
        rate = getattr(link, field)
        if rate:
            yield Change(
                words=f"twice the rate of {name} ({format_rate(rate * FACTOR)})",
                what_if=f"{name}={_figure(rate * FACTOR / 1e9)}GB/s",
                problem=problem.with_link(replace(link, **{field: rate * FACTOR})),
                lanes=lanes,
            )


def _packed(problem: Problem) -> Iterator[Change]:
    """What `moebatch pack` makes of plain numbers; it reads no others."""
    shape, before = problem.shape, problem.dtypes
    int4 = written_formats(shape).get("int4")
    if int4 is None or not isinstance(before.stored, PlainFormat):
        return
    dtypes = Dtypes(stored=int4, compute=before.compute)
    processors = (level.processor for level in problem.hardware.levels.values())
    is_measured = all(int4.name in each.decoding for each in processors if each)
    yield Change(
        words="int4 weights (moebatch pack)" + ", decoding not measured" * (not is_measured),
        what_if="weights=int4",
        problem=replace(problem, dtypes=dtypes),
        lanes=frozenset(problem.hardware.links),
        factor=before.expert_bytes(shape) / dtypes.expert_bytes(shape),
    )
