"""Klotski's way to a policy: as many batches as hide all transfers, and fixed rules for places
(`klotski_places`).

An alternative to the MILP. Klotski (section 4) lets ``n`` batches of ``bs`` sequences go through a
layer one after the other while the next weights arrive: the gate, ``K`` experts that are expected
to be hot, then the other activated ones. For a ``bs``, ``n`` is the smallest number under which
inequalities (4) to (7) hold: every transfer is done before its weights are needed. Times of experts
and their number depend on ``n``, as does the place of the cache, so ``n`` = 1, 2, ... are tried. If
memory ends first, bubbles remain and the largest ``n`` is taken: that of GPU memory or of all
memory, whichever finishes the job first.

On a machine without a GPU the same holds one level down: main memory computes, the disk loads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2
from typing import NamedTuple

from moebatch.errors import DoesNotFit
from moebatch.layout.load import PassLoad
from moebatch.layout.routing import distinct_experts
from moebatch.plan.answer import Answer
from moebatch.plan.papers.klotski_places import lowest, placed
from moebatch.plan.prediction import predict
from moebatch.plan.pricing.task_prices import TaskPrices
from moebatch.plan.problem import Problem
from moebatch.plan.search.candidates import FEWEST_SLOTS, MAX_BATCH_SIZE, candidates, kv_pages
from moebatch.plan.search.refusal import refusal, too_large
from moebatch.schedule.task import Kind
from moebatch.spec.policy.policy import Policy
from moebatch.units import format_duration

BATCH_SIZES = (4, 8, 16, 32, 64)
"""Batch sizes of the paper's evaluation."""
TIE = 0.01
"""Plans within this of the fastest, relatively, are equally good; the one of fewest batches is
taken, since each costs a little that the cost model does not know."""
_MOST_TOKENS_ON_GPU = 32768
_MOST_TOKENS = 8192
_FEW_TOKENS = 512
"""Tokens of a pass where memory is so short that prompts have to wait."""
PREFETCH_EXPERTS = 8
"""Experts for which the level that computes has room on their way."""
_ROUNDING = 1e-9
_Frame = tuple[int, int]
"""Most tokens of a pass, and slots."""


# --- inequalities -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Seconds and counts of one layer that has its experts to load, in a decoding pass.

    The letters are the paper's. Times of attention, gate and cache are those of one batch; times
    of experts are for all batches together, and change with their number. Weights outside experts
    always live where they are used, so ``tIO_A`` and ``tIO_G`` are 0.
    """

    attention_s: float
    """``tA``: attention, with its projections and norms."""
    gate_s: float
    """``tG``: the router, and whatever else passes every token beside the experts."""
    load_expert_s: float
    """``tIO_E``: one expert."""
    load_cache_s: float = 0.0
    """``tIO_KV``: keys and values that do not live where attention is computed."""
    hot_s: float
    """``t_hot``: all hot experts."""
    cold_s: float
    """Sum of ``tE`` over the cold experts."""
    num_hot: int
    """``K``: experts that are loaded before the gate has chosen."""
    num_cold: float
    """``|Q|``: activated experts that are not among the hot ones, on the mean."""


class Inequality(NamedTuple):
    """Time that there is on the left, time that a transfer takes on the right."""

    name: str
    """``(4)`` to ``(7)``, the paper's numbers, or ``disk``."""
    meaning: str
    left_s: float
    right_s: float

    @property
    def holds(self) -> bool:
        """Whether the transfer is hidden."""
        return self.left_s >= self.right_s * (1 - _ROUNDING)


def inequalities(times: LayerTimes, num_batches: int) -> tuple[Inequality, ...]:
    """(4) to (7) for so many batches.

    With a cache that is loaded for each batch, its transfers stand in the way of those that follow
    on the same link, so they are added on the right of (5) to (7). Where fewer than one cold expert
    is activated, (6) waits for that part of one only.
    """
    attention = num_batches * times.attention_s
    routed = attention + num_batches * times.gate_s
    hot = routed + times.hot_s
    loaded, expert = num_batches * times.load_cache_s, times.load_expert_s
    first_cold = times.num_hot + min(1.0, times.num_cold)
    all_experts = times.num_hot + times.num_cold
    return (
        Inequality("(4)", "the gate arrives during attention", attention, 0.0),
        Inequality(
            "(5)", "hot experts arrive before they are due", routed, loaded + times.num_hot * expert
        ),
        Inequality(
            "(6)",
            "the first cold expert arrives while hot ones compute",
            hot,
            loaded + first_cold * expert,
        ),
        Inequality(
            "(7)",
            "all experts and the next attention arrive within the layer",
            hot + times.cold_s,
            loaded + all_experts * expert,
        ),
    )


def layer_times(problem: Problem, policy: Policy) -> LayerTimes:
    """Times of a layer in a pass in which the full batch of `policy` decodes.

    Micro-batches of the policy are Klotski's batches.
    """
    price, shape = TaskPrices(prices=problem.prices, policy=policy), problem.shape
    batch = PassLoad.decoding(policy.micro_batch_size, problem.workload.decode_context)
    active = distinct_experts(shape, policy.batch_size)
    rows = policy.batch_size * shape.computed_per_token / active
    expert_s = price.expert_s(rows, fresh=policy.weights.disk, is_mean=True)
    expert_s += price.launching_s([rows])
    hot = shape.experts_per_token
    top = problem.ladder.top
    below = 1 - policy.kv_cache.on(top)
    first = min(shape.moe_layers)
    return LayerTimes(
        attention_s=price.attend_s(batch),
        gate_s=price.gate_s(batch, first) + price.shared_expert_s(batch, first),
        load_expert_s=price.chunk_s(1.0) if policy.weights.on(top) < 1 else 0.0,
        load_cache_s=below * price.kv_s(Kind.KV_UP, batch) if below else 0.0,
        hot_s=min(hot, active) * expert_s,
        cold_s=max(0.0, active - hot) * expert_s,
        num_hot=hot,
        num_cold=max(0.0, active - hot),
    )


def disk_keeps_up(problem: Problem, policy: Policy, last: Inequality) -> Inequality:
    """Whether the disk gives what a mean layer needs of it, experts and cache, in the time of a
    layer without a disk, the larger side of the `last` inequality. A window of layers in main
    memory only evens out variations."""
    price = TaskPrices(prices=problem.prices, policy=policy)
    batch = PassLoad.decoding(policy.batch_size, problem.workload.decode_context)
    experts = distinct_experts(problem.shape, policy.batch_size) * policy.weights.disk
    read_s = price.fetch_s(experts) + policy.kv_cache.disk * price.kv_s(Kind.KV_READ, batch)
    layer_s = max(last.left_s, last.right_s)
    return Inequality("disk", "the disk keeps up with the layers", layer_s, read_s)


# --- how many batches ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class KlotskiPlan:
    """A policy and the inequalities that led to it."""

    num_batches: int
    """``n``: batches that share one pass over the weights."""
    batch_size: int
    """``bs``: sequences of each."""
    times: LayerTimes
    """At this ``n``, of a layer whose experts are loaded."""
    inequalities: tuple[Inequality, ...]
    """(4) to (7), and whether the disk keeps up where it feeds main memory below a GPU."""
    limit: str | None
    """Why ``n`` cannot grow further although bubbles remain; None if there are none."""
    policy: Policy

    @property
    def bubble_free(self) -> bool:
        """Whether every transfer of a decoding pass is hidden."""
        return all(inequality.holds for inequality in self.inequalities)


def klotski_policy(problem: Problem, *, batch_size: int | None = None) -> KlotskiPlan:
    """The policy of Klotski's rules that finishes the job first; of equal ones that of the fewest
    batches.

    Without a `batch_size` (``bs``) those of the paper are tried; it is never more than the job has
    sequences. ``K`` is as many as a token chooses.

    Raises DoesNotFit if not even one batch fits.
    """
    assert batch_size is None or batch_size >= 1, "a batch has a sequence"
    most = problem.workload.num_sequences or MAX_BATCH_SIZE
    sizes = (batch_size,) if batch_size else BATCH_SIZES
    tried = sorted({min(size, most) for size in sizes})
    scans = [_Scan(problem=problem, batch_size=size) for size in tried]
    plans = [plan for scan in scans if (plan := scan.plan()) is not None]
    if not plans:
        raise _refusal(problem, scans[0])
    seconds = [_seconds_per_token(problem, plan) for plan in plans]
    fastest = min(seconds) * (1 + TIE)
    equals = (plan for plan, own in zip(plans, seconds, strict=True) if own <= fastest)
    return min(equals, key=lambda plan: plan.num_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scan:
    """Tries numbers of batches of one size."""

    problem: Problem
    batch_size: int

    def plan(self) -> KlotskiPlan | None:
        """With the first number of batches that leaves no bubbles; else the largest number.

        There are up to three largest ones: more would drive keys and values off the GPU, experts
        onto the disk, or keys and values there. The one that finishes the job first is taken.
        None if not even one batch fits.
        """
        frame = next((frame for frame in self._frames() if self._at(frame, 1)), None)
        if frame is None:
            return None
        last, largest = self._at(frame, 1), []
        while last is not None and not last.bubble_free:
            following = self._at(frame, last.num_batches + 1)
            limit = self._limit(last.policy, following.policy if following else None)
            if limit:
                largest.append(replace(last, limit=limit))
            if following is None or following.policy.kv_cache.disk:
                return min(largest, key=partial(_seconds_per_token, self.problem))
            last = following
        return last

    def _limit(self, policy: Policy, following: Policy | None) -> str | None:
        """What moves down with one batch more; None if nothing does."""
        sequences = policy.batch_size + self.batch_size
        level = self.problem.ladder.top
        if following is None:
            return self._limit_of_job(sequences) or f"{sequences} sequences do not fit"
        if following.kv_cache.disk:
            return f"keys and values of {sequences} sequences do not fit into memory"
        if following.weights.disk and not policy.weights.disk:
            return f"beside {sequences} sequences not all experts fit into memory"
        if following.kv_cache.on(level) < 1 and policy.kv_cache.on(level) == 1:
            return f"keys and values of {sequences} sequences do not fit into {level}"
        return None

    def _limit_of_job(self, sequences: int) -> str | None:
        total = self.problem.workload.num_sequences
        if total is not None and sequences >= total + self.batch_size:
            return f"the job has only {total} sequences"
        if sequences > MAX_BATCH_SIZE:
            return f"no more than {MAX_BATCH_SIZE} sequences are tried"
        return None

    def _at(self, frame: _Frame, num_batches: int) -> KlotskiPlan | None:
        """So many batches; None if they do not fit or are more than the job has."""
        if num_batches > 1 and self._limit_of_job(num_batches * self.batch_size):
            return None
        policy = placed(self.problem, self.unplaced(frame, num_batches))
        if policy is None:
            return None
        times = layer_times(self.problem, policy)
        rows = inequalities(times, num_batches)
        if self.problem.with_vram and self.problem.has_disk:
            rows += (disk_keeps_up(self.problem, policy, rows[-1]),)
        return KlotskiPlan(
            num_batches=num_batches,
            batch_size=self.batch_size,
            times=times,
            inequalities=rows,
            limit=None,
            policy=policy,
        )

    def _frames(self) -> Iterator[_Frame]:
        """Most tokens of a pass and slots, the best first."""
        most = _MOST_TOKENS_ON_GPU if self.problem.with_vram else _MOST_TOKENS
        slots = min(PREFETCH_EXPERTS, self.problem.shape.num_experts)
        for tokens in (most, _FEW_TOKENS):
            for num_slots in range(slots, min(FEWEST_SLOTS, slots) - 1, -1):
                yield tokens, num_slots

    def unplaced(self, frame: _Frame, num_batches: int) -> Policy:
        """The policy with everything as far down as it can be."""
        most_tokens, num_slots = frame
        total = num_batches * self.batch_size
        weights, kv_cache = lowest(self.problem)
        return Policy(
            batch_size=total,
            micro_batch_size=self.batch_size,
            tokens_per_pass=self._tokens_per_pass(total, most_tokens),
            num_slots=num_slots,
            num_kv_pages=kv_pages(self.problem, total),
            weights=weights,
            kv_cache=kv_cache,
            attention_on_gpu=self.problem.with_vram,
            ffn_on_gpu=self.problem.with_vram,
            schedule="klotski",
        )

    def _tokens_per_pass(self, sequences: int, most: int) -> int:
        """Enough for the prompts that come in for sequences that end, in the long run, and for the
        longest one where prompts are not cut."""
        workload = self.problem.workload
        steady = sequences * (1 + workload.mean_prompt_tokens / max(1.0, workload.mean_new_tokens))
        return max(sequences, workload.fewest_pass_tokens, min(most, 1 << ceil(log2(steady))))


def _seconds_per_token(problem: Problem, plan: KlotskiPlan) -> float:
    return 1 / predict(problem, plan.policy).tokens_per_s


def _refusal(problem: Problem, scan: _Scan) -> DoesNotFit:
    """Why one small batch does not fit, and whether anything else would."""
    weights, kv_cache = lowest(problem)
    for candidate in candidates(problem, slots=FEWEST_SLOTS):
        least = replace(candidate.policy, weights=weights, kv_cache=kv_cache)
        if (least.num_slots or not problem.hardware.disk) and not too_large(problem, least):
            why = too_large(problem, scan.unplaced((_FEW_TOKENS, FEWEST_SLOTS), 1))
            where = "the GPU" if problem.with_vram else "the CPU"
            hint = (
                f"Klotski's least is a batch of {scan.batch_size}, all computed on {where}; "
                "another policy fits: plan without --method klotski"
            )
            return DoesNotFit(f"{why}\n{hint}")
    return refusal(problem)


# --- the answer, in the words of moebatch -------------------------------------------------------


def answer_klotski(problem: Problem, model: str) -> Answer:
    """The fewest batches that leave no bubble, or as many as fit. Raises DoesNotFit."""
    plan = klotski_policy(problem)
    return Answer(
        problem=problem,
        model=model,
        method="klotski",
        solver=f"n = {plan.num_batches} batches of {plan.batch_size}",
        policy=plan.policy,
        prediction=predict(problem, plan.policy),
        notes=tuple(_notes(plan)),
    )


def _notes(plan: KlotskiPlan) -> Iterator[str]:
    yield from (_line(inequality) for inequality in plan.inequalities)
    if plan.limit is not None:
        yield f"bubbles remain: {plan.limit}"


def _line(inequality: Inequality) -> str:
    sign = ">=" if inequality.holds else "<"
    return (
        f"inequality {inequality.name}, {inequality.meaning}: "
        f"{format_duration(inequality.left_s)} {sign} {format_duration(inequality.right_s)}"
    )
