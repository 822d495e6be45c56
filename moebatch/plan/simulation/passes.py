"""Passes for the simulator: what each of their micro-batches has to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import prompt_rows
from moebatch.plan.options import Work
from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import job_loads, mean_of
from moebatch.spec.policy.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """A pass by its micro-batches."""

    loads: tuple[PassLoad, ...]
    on_cpu: tuple[bool, ...]
    """Which of them attend on the CPU beside a GPU."""

    @property
    def tokens(self) -> float:
        return sum(load.tokens for load in self.loads)

    @property
    def logits_rows(self) -> float:
        """Tokens that the pass generates."""
        return sum(load.logits_rows for load in self.loads)


def passes_of(problem: Problem, policy: Policy, work: Work, count: int) -> list[MicroBatches]:
    if work == "mean":
        return [split(mean_load(problem, policy), problem, policy)] * count
    decode = split(decode_load(problem, policy), problem, policy)
    if work == "decode":
        return [decode] * count
    return [split(prompt_load(problem, policy), problem, policy), *[decode] * (count - 1)]


def decode_load(problem: Problem, policy: Policy) -> PassLoad:
    """A full batch, each sequence in the middle of its answer."""
    return PassLoad.decoding(policy.batch_size, problem.workload.decode_context)


def prompt_load(problem: Problem, policy: Policy) -> PassLoad:
    """All prompts of a full batch."""
    workload = problem.workload
    return PassLoad.of_prompts(
        policy.batch_size,
        workload.mean_own_tokens,
        workload.mean_shared_tokens,
        encodes=workload.is_encoded,
    )


def mean_load(problem: Problem, policy: Policy) -> PassLoad:
    """The mean of all passes of the job."""
    return mean_of(job_loads(problem.workload, policy))[1]


def split(load: PassLoad, problem: Problem, policy: Policy) -> MicroBatches:
    """A pass in micro-batches: those that decode first, then slices of prompts."""
    count = load.decode_sequences
    decodes = list(_shares(count, policy.micro_batch_size))
    prompts = list(_shares(load.prompt_tokens, prompt_rows(policy, problem.ladder.top)))
    decoding = PassLoad(count, load.decode_positions, logits_rows=count)
    prefill = load.in_stack(encodes=True)._replace(logits_rows=max(0.0, load.logits_rows - count))
    loads = [
        *(decoding.times(share) for share in decodes),
        *(prefill.times(share) for share in prompts),
    ]
    beside_gpu = problem.ladder.attends_at(policy) != problem.ladder.top
    on_cpu = (*[beside_gpu] * len(decodes), *[False] * len(prompts))
    return MicroBatches(loads=tuple(loads), on_cpu=on_cpu)


def _shares(total: float, size: int) -> Iterator[float]:
    """Parts of at most `size`, all but the last one full, as shares of the total."""
    if total <= 0:
        return
    count = ceil(total / size - 1e-9)
    for number in range(count):
        yield min(size, total - number * size) / total
