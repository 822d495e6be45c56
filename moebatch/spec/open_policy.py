"""A policy in which details may be left open until the job is known."""

from dataclasses import dataclass
from math import ceil

from moebatch.spec.policy import (
    STREAMING_SLOTS,
    Batching,
    CacheRule,
    Placement,
    Policy,
    PredictorName,
    Schedule,
    pages_of,
)
from moebatch.spec.workload import Workload

_IN_DRAM = Placement(dram=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPolicy:
    """Fields of a `Policy`; None is what suits the job."""

    batch_size: int
    micro_batch_size: int
    weights: Placement
    kv_cache: Placement = _IN_DRAM
    attention_on_gpu: bool = False
    ffn_on_gpu: bool = False
    schedule: Schedule = "klotski"
    batching: Batching = "mixed"
    tokens_per_pass: int | None = None
    """None with static batching, where it means nothing."""
    num_slots: int | None = None
    num_kv_pages: int | None = None
    num_hot: int | None = None
    """None stays None, see `Policy`."""
    cache: CacheRule = "static"
    cache_sizes: tuple[int, ...] = ()
    predictor: PredictorName | None = None
    """None stays None, see `Policy`."""

    @classmethod
    def of(cls, policy: Policy) -> "OpenPolicy":
        """A policy with nothing left open. Micro-batches larger than the batch become as large."""
        is_static = policy.batching == "static"
        return cls(
            batch_size=policy.batch_size,
            micro_batch_size=min(policy.micro_batch_size, policy.batch_size),
            weights=policy.weights,
            kv_cache=policy.kv_cache,
            attention_on_gpu=policy.attention_on_gpu,
            ffn_on_gpu=policy.ffn_on_gpu,
            schedule=policy.schedule,
            batching=policy.batching,
            tokens_per_pass=None if is_static else policy.tokens_per_pass,
            num_slots=policy.num_slots,
            num_kv_pages=policy.num_kv_pages,
            num_hot=policy.num_hot,
            cache=policy.cache,
            cache_sizes=policy.cache_sizes,
            predictor=policy.predictor,
        )

    @property
    def streams_experts(self) -> bool:
        """Whether some experts do not live where they are computed."""
        return (self.weights.vram if self.ffn_on_gpu else self.weights.dram) < 1

    def resolve(self, workload: Workload, *, num_experts: int) -> Policy:
        """The policy for a job on a model with so many experts in all its layers.

        What is open becomes: as many tokens of a pass as a job needs whose sequences begin and
        end steadily; a few slots if experts stream; pages for a batch of the longest sequences.
        """
        slots, pages = self.num_slots, self.num_kv_pages
        if slots is None:
            slots = min(STREAMING_SLOTS, num_experts) if self.streams_experts else 0
        if pages is None:
            pages = self.batch_size * pages_of(workload.max_total_tokens)
        return Policy(
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            tokens_per_pass=self._tokens(workload),
            num_slots=slots,
            num_kv_pages=max(1, pages),
            weights=self.weights,
            kv_cache=self.kv_cache,
            attention_on_gpu=self.attention_on_gpu,
            ffn_on_gpu=self.ffn_on_gpu,
            schedule=self.schedule,
            batching=self.batching,
            num_hot=self.num_hot,
            cache=self.cache,
            cache_sizes=self.cache_sizes,
            predictor=self.predictor,
        )

    def _tokens(self, workload: Workload) -> int:
        if self.batching == "static":
            return self.batch_size
        if self.tokens_per_pass is not None:
            return self.tokens_per_pass
        prompts = workload.mean_prompt_tokens / max(1.0, workload.mean_new_tokens)
        return ceil(self.batch_size * (1 + prompts))
