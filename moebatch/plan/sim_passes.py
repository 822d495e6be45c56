"""Passes for the simulator: what each of their micro-batches has to do."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil

from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import PROMPT_ROWS, gpu_prompt_rows
from moebatch.plan.options import Work
from moebatch.plan.problem import Problem
from moebatch.plan.replay import job_loads
from moebatch.spec.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """A pass by its micro-batches."""

    loads: tuple[PassLoad, ...]
    on_cpu: tuple[bool, ...]
    """Which of them attend on the CPU beside a GPU."""

    @property
    def tokens(self) -> float:
        """Of all of them."""
        return sum(load.tokens for load in self.loads)

    @property
    def logits_rows(self) -> float:
        """Tokens that the pass generates."""
        return sum(load.logits_rows for load in self.loads)


def passes_of(problem: Problem, policy: Policy, work: Work, count: int) -> list[MicroBatches]:
    """So many passes of a job."""
    if work == "mean":
        return [split(mean_load(problem, policy), problem, policy)] * count
    decode = split(decode_load(problem, policy), problem, policy)
    if work == "decode":
        return [decode] * count
    return [split(prompt_load(problem, policy), problem, policy), *[decode] * (count - 1)]


def decode_load(problem: Problem, policy: Policy) -> PassLoad:
    """A full batch, each sequence in the middle of its answer."""
    workload, batch = problem.workload, policy.batch_size
    context = workload.mean_prompt_tokens + workload.mean_new_tokens / 2
    return PassLoad(decode_sequences=batch, decode_positions=batch * context, logits_rows=batch)


def prompt_load(problem: Problem, policy: Policy) -> PassLoad:
    """All prompts of a full batch."""
    workload, batch = problem.workload, policy.batch_size
    own, shared = workload.mean_own_tokens, workload.mean_shared_tokens
    return PassLoad(
        prompt_tokens=batch * own,
        prompt_pairs=batch * own * (shared + (own + 1) / 2),
        prompt_context=batch * shared,
        logits_rows=batch,
    )


def mean_load(problem: Problem, policy: Policy) -> PassLoad:
    """The mean of all passes of the job."""
    loads = job_loads(problem.workload, policy)
    total = sum(count for count, _ in loads)
    return PassLoad(
        **{
            field.name: sum(count * getattr(load, field.name) for count, load in loads) / total
            for field in fields(PassLoad)
        }
    )


def split(load: PassLoad, problem: Problem, policy: Policy) -> MicroBatches:
    """A pass in micro-batches: those that decode first, then slices of prompts."""
    prompt_rows = gpu_prompt_rows(policy) if problem.with_vram else PROMPT_ROWS
    decodes = list(_shares(load.decode_sequences, policy.micro_batch_size))
    prompts = list(_shares(load.prompt_tokens, prompt_rows))
    ended = load.logits_rows - load.decode_sequences
    loads = [
        PassLoad(
            decode_sequences=share * load.decode_sequences,
            decode_positions=share * load.decode_positions,
            logits_rows=share * load.decode_sequences,
        )
        for share in decodes
    ]
    loads += [
        PassLoad(
            prompt_tokens=share * load.prompt_tokens,
            prompt_pairs=share * load.prompt_pairs,
            prompt_context=share * load.prompt_context,
            logits_rows=share * max(0.0, ended),
        )
        for share in prompts
    ]
    beside_gpu = problem.with_vram and not policy.attention_on_gpu
    on_cpu = (*[beside_gpu] * len(decodes), *[False] * len(prompts))
    return MicroBatches(loads=tuple(loads), on_cpu=on_cpu)


def _shares(total: float, size: int) -> Iterator[float]:
    """Parts of at most `size`, all but the last one full, as shares of the total."""
    if total <= 0:
        return
    count = ceil(total / size - 1e-9)
    for number in range(count):
        yield min(size, total - number * size) / total
