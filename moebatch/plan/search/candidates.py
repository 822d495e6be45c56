"""The integer side of a policy: every batch, micro-batch and place of computation worth a look.

Batch and micro-batch are candidates rather than variables of the MILP: the time of an expert
depends on its rows through a measured curve, and the number of passes on one over the batch, so
neither is linear in them; with candidates both are exact, and the rest is linear.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil

from moebatch.layout.footprint import cache_bytes
from moebatch.once import once
from moebatch.plan.problem import Problem
from moebatch.plan.replay.phases import Phase, phases_of
from moebatch.schedule.definition import Traits
from moebatch.schedule.registry import PLANNED, find_schedule
from moebatch.schedule.steps.attention import LOOK_AHEAD
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import STREAMING_SLOTS, Placement, Policy, pages_of

MAX_BATCH_SIZE = 4096
CPU_MICRO_BATCH_SIZE = 256
"""Attention on a CPU goes sequence by sequence inside; a micro-batch only bounds its buffers."""
FEWEST_SLOTS = 2
"""One is computed while the next one arrives."""
_CPU_MICRO_BATCH_SIZES = (16, CPU_MICRO_BATCH_SIZE)
_WIDE_MICRO_BATCH_SIZES = (16, 64, 256)
"""Where they only bound buffers and windows."""
_MICRO_BATCH_SIZES = (16, 32, 64, 128, 256, 512)
_PASS_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_GPU_PASS_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_KV_SLACK = 1.1
"""Pages beyond the mean need, since lengths vary from pass to pass."""
KINDS = ("weights", "kv_cache")
"""What lies on levels."""
Variable = tuple[str, LevelName]
"""``("weights", "dram")``: the share of the weights in main memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A policy but for the shares, which the MILP chooses."""

    policy: Policy
    """Its placements only say where everything would best be."""
    weight_levels: tuple[LevelName, ...]
    """Levels that may hold experts, the one that computes first."""
    kv_levels: tuple[LevelName, ...]
    """Levels that may hold keys and values, the one that computes first."""
    phases: tuple[Phase, ...]

    def __str__(self) -> str:
        policy = self.policy
        where = f"A{policy.attention_on_gpu:d}F{policy.ffn_on_gpu:d}"
        return (
            f"N{policy.batch_size}_mu{policy.micro_batch_size}_T{policy.tokens_per_pass}"
            f"_S{policy.num_slots}_{where}"
        )

    @property
    def uses_disk(self) -> bool:
        """Whether anything may live on disk."""
        return "disk" in self.weight_levels or "disk" in self.kv_levels

    def slower(self, factor: float, *, num_slots: int) -> "Candidate":
        """The same with other slots, whose waiting counts as so much more of every pass."""
        phases = (phase._replace(num_passes=phase.num_passes * factor) for phase in self.phases)
        policy = replace(self.policy, num_slots=num_slots)
        return replace(self, policy=policy, phases=tuple(phases))

    def levels(self, kind: str) -> tuple[LevelName, ...]:
        """Those that may hold ``weights`` or ``kv_cache``, the one that computes first."""
        return self.weight_levels if kind == "weights" else self.kv_levels

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Shares on levels below the one that computes; what is left to 1 is there."""
        return tuple((kind, level) for kind in KINDS for level in self.levels(kind)[1:])

    def placement(self, kind: str, shares: Mapping[Variable, float]) -> Placement:
        """That which open shares amount to."""
        top, *lower = self.levels(kind)
        below = {level: min(1.0, max(0.0, shares[kind, level])) for level in lower}
        return Placement(**{top: max(0.0, 1 - sum(below.values())), **below})

    def placed(self, shares: Mapping[Variable, float]) -> Policy:
        weights, kv_cache = (self.placement(kind, shares) for kind in KINDS)
        return replace(self.policy, weights=weights, kv_cache=kv_cache)


def candidates(problem: Problem, *, slots: int = STREAMING_SLOTS) -> Iterator[Candidate]:
    """All candidates, those first that take the least.

    Each comes in several kinds: experts stream through so many `slots`, or all are where they are
    computed; and they, like keys and values, may live on that level only, or on lower ones too.
    """
    of_machine = _gpu_policies if problem.ladder.top == "vram" else _cpu_policies
    phases: dict[tuple[int, int, int], tuple[Phase, ...]] = {}
    for policy, is_widest in of_machine(problem, (min(slots, problem.num_experts), 0)):
        room = policy.room
        found = once(phases, room, partial(phases_of, problem.workload, room))
        yield from _kinds(problem, policy, found, is_widest=is_widest)


def _cpu_policies(problem: Problem, slot_counts: Sequence[int]) -> Iterator[tuple[Policy, bool]]:
    """And whether their micro-batches are the widest."""
    schedules = _schedules(problem)
    open_ones = [name for name, traits in schedules.items() if traits.attention is None]
    schedule = (open_ones or [*schedules])[0]
    if schedules[schedule].is_paged:
        slot_counts = (_paged_slots(problem),)
    for batch_size in batch_sizes(problem):
        tokens_of_pass = _cpu_tokens(problem, batch_size)
        for tokens, slots, micro_batch in product(
            tokens_of_pass, slot_counts, _CPU_MICRO_BATCH_SIZES
        ):
            policy = _policy(
                problem, batch_size, micro_batch, tokens, slots, schedule, (False, False)
            )
            yield policy, micro_batch == CPU_MICRO_BATCH_SIZE


def _gpu_policies(problem: Problem, slot_counts: Sequence[int]) -> Iterator[tuple[Policy, bool]]:
    """And whether their micro-batches are the widest."""
    # With attention on the CPU either one micro-batch is in each processor at a time, and experts
    # run for each of them; or the processors take turns, and experts take all tokens of the pass.
    for (schedule, traits), attention in product(_schedules(problem).items(), (False, True)):
        if traits.attention not in (None, "gpu" if attention else "cpu"):
            continue
        if not (attention or problem.shape.attends_beside_gpu):
            continue
        is_paged = traits.is_paged
        sizes = _MICRO_BATCH_SIZES if is_paged else _WIDE_MICRO_BATCH_SIZES
        counts = slot_counts
        if is_paged:
            counts = (_paged_slots(problem),)
        elif not attention:  # a layer comes while the CPU attends
            counts = (problem.shape.num_experts, 0)
        for batch_size in batch_sizes(problem):
            micro_batches = sorted(
                {min(size, widest_micro_batch(traits, batch_size)) for size in sizes}
            )
            tokens_of_pass = _gpu_tokens(problem, batch_size)
            for micro_batch, tokens, slots in product(micro_batches, tokens_of_pass, counts):
                policy = _policy(
                    problem, batch_size, micro_batch, tokens, slots, schedule, (attention, True)
                )
                yield policy, is_paged or micro_batch == micro_batches[-1]


def _schedules(problem: Problem) -> dict[str, Traits]:
    """That which is asked for, or those among which to choose, and what they are like."""
    if problem.schedule is not None:
        return {problem.schedule: find_schedule(problem.schedule).traits}
    return {each.name: each.traits for each in PLANNED}


def _paged_slots(problem: Problem) -> int:
    """Two layers come in pages, whatever is resident."""
    return 2 * problem.shape.num_experts


def widest_micro_batch(traits: Traits, batch_size: int) -> int:
    """CGOPipe needs one micro-batch in work and others ahead of it: with fewer, its lanes wait for
    each other, which busy times do not show."""
    return ceil(batch_size / (LOOK_AHEAD + 1)) if traits.moves == "pages" else batch_size


def batch_sizes(problem: Problem) -> tuple[int, ...]:
    """Two per doubling, and the whole job where it is small."""
    most = problem.workload.num_sequences or MAX_BATCH_SIZE
    sizes = {1, 2, 4, 8, 12, 16, 24, 32, 48}
    for power in range(6, 13):
        sizes |= {2**power, 2**power * 3 // 2}
    smaller = {size for size in sizes if size < min(most, MAX_BATCH_SIZE)}
    return tuple(sorted({*smaller, min(most, MAX_BATCH_SIZE)}))


def _cpu_tokens(problem: Problem, batch_size: int) -> Sequence[int]:
    """All that have room for the batch, and for the longest prompt where it is not cut."""
    least = max(batch_size, problem.workload.fewest_pass_tokens)
    enough = [tokens for tokens in _PASS_TOKENS if tokens >= least] or [least]
    return _used(problem, enough)


def _gpu_tokens(problem: Problem, batch_size: int) -> Sequence[int]:
    """As many as a steady job needs, and twice that, so that filling seats does not take long."""
    workload = problem.workload
    steady = batch_size * (1 + workload.mean_own_tokens / max(1.0, workload.mean_new_tokens))
    least = max(batch_size, workload.fewest_pass_tokens)
    enough = [tokens for tokens in _GPU_PASS_TOKENS if tokens >= max(steady, least)]
    return _used(problem, enough[:2] or [max(least, _GPU_PASS_TOKENS[-1])])


def _used(problem: Problem, sizes: Sequence[int]) -> Sequence[int]:
    """The same, but none with more tokens than the job has for a pass."""
    most = problem.workload.most_pass_tokens
    return [*dict.fromkeys(min(tokens, most) for tokens in sizes)]


def _policy(
    problem: Problem,
    batch_size: int,
    micro_batch_size: int,
    tokens: int,
    slots: int,
    schedule: str,
    on_gpu: tuple[bool, bool],
) -> Policy:
    attention, ffn = on_gpu
    return Policy(
        batch_size=batch_size,
        micro_batch_size=min(micro_batch_size, batch_size),
        tokens_per_pass=tokens,
        num_slots=slots,
        num_kv_pages=kv_pages(problem, batch_size),
        weights=Placement(vram=1.0) if ffn else Placement(dram=1.0),
        kv_cache=Placement(vram=1.0) if attention else Placement(dram=1.0),
        attention_on_gpu=attention,
        ffn_on_gpu=ffn,
        schedule=schedule,
        streamed_layers=min(problem.streamed_layers, problem.most_streamed_layers),
    )


def kv_pages(problem: Problem, batch_size: int) -> int:
    """Pages for so many sequences of mean length, half-filled last pages counted, and at least
    for the longest one. What they share is held once."""
    workload = problem.workload
    longest = problem.fewest_pages
    if workload.mean_total_tokens == workload.max_total_tokens and not workload.mean_shared_tokens:
        return batch_size * longest
    own = int(workload.mean_total_tokens - workload.mean_shared_tokens)
    each = pages_of(min(own, workload.most_cached)) + 1
    together = pages_of(int(workload.mean_shared_tokens))
    wanted = int(batch_size * each * _KV_SLACK) + together
    return max(longest, min(wanted, batch_size * longest))


def _kinds(
    problem: Problem, policy: Policy, phases: tuple[Phase, ...], *, is_widest: bool
) -> Iterator[Candidate]:
    """The policy with all levels on which experts, or keys and values, may live. Lower levels take
    windows and slots of their own, so each kind is a candidate.

    Micro-batches that are not the widest are only for keys and values that need windows.
    """
    for weight_levels, kv_levels in product(
        _weight_levels(problem, policy), _kv_levels(problem, policy)
    ):
        has_windows = len(kv_levels) > 1 or kv_levels[0] != problem.ladder.top
        if is_widest or has_windows:
            yield Candidate(
                policy=policy, weight_levels=weight_levels, kv_levels=kv_levels, phases=phases
            )


def _weight_levels(problem: Problem, policy: Policy) -> list[tuple[LevelName, ...]]:
    levels = _at_and_below(problem, "vram" if policy.ffn_on_gpu else "dram")
    if not policy.num_slots or len(levels) == 1:
        return [levels[:1]]
    num_bytes = problem.num_experts * problem.dtypes.expert_bytes(problem.shape)
    return _large_enough(problem, [levels[:n] for n in range(2, len(levels) + 1)], num_bytes)


def _kv_levels(problem: Problem, policy: Policy) -> list[tuple[LevelName, ...]]:
    levels = _at_and_below(problem, "vram" if policy.attention_on_gpu else "dram")
    if not problem.keeps_kv_on_disk:
        levels = tuple(level for level in levels if level != "disk")
    num_bytes = cache_bytes(problem.memory.groups, problem.dtypes, policy)
    return _large_enough(problem, [levels[:n] for n in range(1, len(levels) + 1)], num_bytes)


def _large_enough(
    problem: Problem, kinds: list[tuple[LevelName, ...]], num_bytes: float
) -> list[tuple[LevelName, ...]]:
    """Kinds whose levels can hold so much; the last one in any case."""
    fitting = [kind for kind in kinds if sum(map(problem.capacity_bytes, kind)) >= num_bytes]
    return fitting or kinds[-1:]


def _at_and_below(problem: Problem, level: LevelName) -> tuple[LevelName, ...]:
    levels = problem.ladder.levels
    below = reversed(levels[: levels.index(level) + 1])
    return tuple(name for name in below if name != "disk" or problem.has_disk)
