"""Klotski's way to a policy: as many batches as hide all transfers, and fixed rules for places.

An alternative to the MILP. For a batch size ``bs`` the number of batches ``n`` that share one pass
over the weights is the smallest one under which inequalities (4) to (7) hold. Times of experts and
their number depend on ``n``, as does the place of the cache, so ``n`` = 1, 2, ... are tried. If
memory ends first, bubbles remain and the largest ``n`` is taken: that of GPU memory or of all
memory, whichever finishes the job first.

On a machine without a GPU the same holds one level down: main memory computes, the disk loads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2

from moebatch.errors import DoesNotFit
from moebatch.plan.candidates import FEWEST_SLOTS, MAX_BATCH_SIZE, candidates, kv_pages
from moebatch.plan.papers.klotski_bubbles import Inequality, LayerTimes, disk_window, inequalities
from moebatch.plan.papers.klotski_placement import (
    PREFETCH_EXPERTS,
    CpuPriority,
    lowest_cache,
    lowest_weights,
    placed,
)
from moebatch.plan.papers.klotski_times import disk_read_s, layer_times
from moebatch.plan.prediction import predict
from moebatch.plan.problem import Problem
from moebatch.plan.refusal import refusal, too_large
from moebatch.spec.policy import Policy

BATCH_SIZES = (4, 8, 16, 32, 64)
"""Batch sizes of the paper's evaluation."""
TIE = 0.01
"""Plans within this of the fastest, relatively, are equally good; the one of fewest batches is
taken, since each costs a little that the cost model does not know."""
_MOST_TOKENS_ON_GPU = 32768
_MOST_TOKENS = 8192
_FEW_TOKENS = 512
"""Tokens of a pass where memory is so short that prompts have to wait."""
_Frame = tuple[int, int]
"""Most tokens of a pass, and slots."""


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
    """(4) to (7)."""
    disk: Inequality | None
    """Whether the disk keeps up where it feeds main memory below a GPU; None elsewhere."""
    limit: str | None
    """Why ``n`` cannot grow further although bubbles remain; None if there are none."""
    policy: Policy

    @property
    def bubble_free(self) -> bool:
        """Whether every transfer of a decoding pass is hidden."""
        return all(inequality.holds for inequality in (*self.inequalities, self.disk) if inequality)


def klotski_policy(
    problem: Problem,
    *,
    batch_size: int | None = None,
    cpu_priority: CpuPriority = "experts",
    num_hot: int | None = None,
) -> KlotskiPlan:
    """The policy of Klotski's rules that finishes the job first; of equal ones that of the fewest
    batches.

    Args:
        batch_size: ``bs``; None tries those of the paper. Never more than the job has sequences.
        cpu_priority: what main memory below a GPU holds first.
        num_hot: ``K``; None is as many as a token chooses.

    Raises DoesNotFit if not even one batch fits.
    """
    assert batch_size is None or batch_size >= 1, "a batch has a sequence"
    most = problem.workload.num_sequences or MAX_BATCH_SIZE
    sizes = (batch_size,) if batch_size else BATCH_SIZES
    hot = num_hot or problem.shape.experts_per_token
    scans = [
        _Scan(problem=problem, batch_size=size, priority=cpu_priority, num_hot=hot)
        for size in sorted({min(size, most) for size in sizes})
    ]
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
    priority: CpuPriority
    num_hot: int

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
        policy = placed(self.problem, self.unplaced(frame, num_batches), self.priority)
        if policy is None:
            return None
        times = layer_times(self.problem, policy, num_hot=self.num_hot)
        rows = inequalities(times, num_batches)
        has_window = self.problem.with_vram and bool(lowest_weights(self.problem).disk)
        return KlotskiPlan(
            num_batches=num_batches,
            batch_size=self.batch_size,
            times=times,
            inequalities=rows,
            disk=disk_window(rows[-1], disk_read_s(self.problem, policy)) if has_window else None,
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
        return Policy(
            batch_size=total,
            micro_batch_size=self.batch_size,
            tokens_per_pass=self._tokens_per_pass(total, most_tokens),
            num_slots=num_slots,
            num_kv_pages=kv_pages(self.problem, total),
            weights=lowest_weights(self.problem),
            kv_cache=lowest_cache(self.problem),
            attention_on_gpu=self.problem.with_vram,
            ffn_on_gpu=self.problem.with_vram,
            schedule="klotski",
        )

    def _tokens_per_pass(self, sequences: int, most: int) -> int:
        """Enough for the prompts that come in for sequences that end, in the long run."""
        workload = self.problem.workload
        steady = sequences * (1 + workload.mean_prompt_tokens / max(1.0, workload.mean_new_tokens))
        return max(sequences, min(most, 1 << ceil(log2(steady))))


def _seconds_per_token(problem: Problem, plan: KlotskiPlan) -> float:
    return 1 / predict(problem, plan.policy).tokens_per_s


def _refusal(problem: Problem, scan: _Scan) -> DoesNotFit:
    """Why one small batch does not fit, and whether anything else would."""
    for candidate in candidates(problem, slots=FEWEST_SLOTS):
        least = candidate.placed(lowest_weights(problem), lowest_cache(problem))
        if (least.num_slots or not problem.hardware.disk) and not too_large(problem, least):
            why = too_large(problem, scan.unplaced((_FEW_TOKENS, FEWEST_SLOTS), 1))
            where = "the GPU" if problem.with_vram else "the CPU"
            hint = (
                f"Klotski's least is a batch of {scan.batch_size}, all computed on {where}; "
                "another policy fits: plan without --method klotski"
            )
            return DoesNotFit(f"{why}\n{hint}")
    return refusal(problem)
