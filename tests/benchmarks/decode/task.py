"""What is measured: sequences that decode, and prompts that ride on them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moebatch.job.planning import plan_job
from moebatch.layout.load import PassLoad
from moebatch.plan.problem import Problem
from moebatch.plan.search.refusal import too_large
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Workload
from tests.benchmarks.decode.passes import PROMPT_TOKENS, STEADY_AFTER, filling_left, together

RIDER_TOKENS = 128
RIDER_ANSWER = 2
"""Riders come in one pass and end in the next; then others come."""
FILLING_TOKENS = 2048
"""Tokens of a pass while prompts come in; more would take memory that decoding can use."""
_SLOTS = range(2, 13)


@dataclass(frozen=True, kw_only=True)
class Task:
    """So many sequences decode; in every second pass so many prompt tokens ride, if any."""

    sequences: int
    ride: int
    num_passes: int
    """Of each kind."""

    @property
    def riders(self) -> int:
        return self.ride // RIDER_TOKENS

    @property
    def tokens_per_pass(self) -> int:
        least = max(FILLING_TOKENS, self.sequences) + self.ride + self.riders
        return together(self.sequences, self.ride, least)

    @property
    def answer(self) -> int:
        """Tokens that every sequence gets."""
        filling = len(filling_left(self.sequences, self.tokens_per_pass))
        return filling + STEADY_AFTER + (2 if self.ride else 1) * self.num_passes + 1

    @property
    def workload(self) -> Workload:
        """Riders left out."""
        longest = max(PROMPT_TOKENS + self.answer, RIDER_TOKENS + RIDER_ANSWER)
        return Workload(
            num_sequences=self.sequences,
            mean_prompt_tokens=PROMPT_TOKENS,
            mean_new_tokens=self.answer,
            max_total_tokens=longest,
        )

    @property
    def measured_loads(self) -> list[PassLoad]:
        """A pass of each kind that is measured."""
        alone = PassLoad(
            decode_sequences=self.sequences,
            decode_positions=self.sequences * (PROMPT_TOKENS + self.answer / 2),
            logits_rows=self.sequences,
        )
        if not self.ride:
            return [alone]
        riding = alone._replace(
            prompt_tokens=self.riders * RIDER_TOKENS,
            prompt_pairs=self.riders * RIDER_TOKENS * (RIDER_TOKENS + 1) / 2,
            logits_rows=self.sequences + self.riders,
        )
        return [alone, riding]

    def policy(self, problem: Problem) -> Policy:
        """The planner's, with all sequences at once, and as many slots as the cost model gives the
        passes that are measured. Raises SystemExit if they do not fit."""
        own = self.sequences * pages_of(PROMPT_TOKENS + self.answer)
        of_riders = self.riders * pages_of(RIDER_TOKENS + RIDER_ANSWER)
        policy = replace(
            plan_job(problem).policy,
            batch_size=self.sequences + self.riders,
            tokens_per_pass=self.tokens_per_pass,
            num_kv_pages=own + of_riders,
        )
        tried = (_with_most_experts(problem, replace(policy, num_slots=n)) for n in _SLOTS)
        fitting = [one for one in tried if one is not None]
        if not fitting:
            raise SystemExit("so many sequences do not fit into --dram")
        return min(fitting, key=lambda one: self._seconds(problem, one))

    def _seconds(self, problem: Problem, policy: Policy) -> float:
        return sum(problem.cost_of(load, policy).seconds for load in self.measured_loads)

    def requests(self, vocab_size: int) -> Iterator[Request]:
        """Those that stay first."""
        noise = random.Random(1)
        for index in range(self.sequences + self.riders * (self.answer // RIDER_ANSWER)):
            stays = index < self.sequences
            length = PROMPT_TOKENS if stays else RIDER_TOKENS
            answer = self.answer if stays else RIDER_ANSWER
            yield Request(
                index=index,
                custom_id=str(index),
                prompt_tokens=tuple(noise.randrange(5, vocab_size) for _ in range(length)),
                sampling=Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True),
            )


def _with_most_experts(problem: Problem, policy: Policy) -> Policy | None:
    """As many in memory as there is room for: the planner's choice also serves the filling."""
    for count in range(problem.num_experts, -1, -1):
        share = count / problem.num_experts
        tried = replace(policy, weights=Placement(dram=share, disk=1 - share))
        if too_large(problem, tried) is None:
            return tried
    return None
