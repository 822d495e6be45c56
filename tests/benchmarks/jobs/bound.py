"""The time that no job can go below: its bytes have to cross the disk's link, and its operations
have to be done.
"""

from dataclasses import dataclass

from moebatch.spec.model.shape import ModelShape
from tests.benchmarks.jobs.lengths import Lengths
from tests.benchmarks.jobs.probe import Probe


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Seconds that each lane needs at the least."""

    disk_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.disk_s, self.compute_s)

    @property
    def lane(self) -> str:
        """The one that binds."""
        return "disk" if self.disk_s >= self.compute_s else "compute"


def bound_of(num_bytes: float, num_flop: float, rates: Probe) -> Bound:
    """Both lanes at the rates that were probed beside the job."""
    return Bound(disk_s=num_bytes / rates.disk_rate, compute_s=num_flop / rates.gemm_rate)


def job_flop(lengths: Lengths, shape: ModelShape) -> float:
    """FLOP of a job: every prompt token once, a header that is shared only once, and every token
    of an answer but the last, which nothing follows."""
    header = lengths.num_header_tokens
    rows = list(zip(lengths.prompts, lengths.answers, strict=True))
    own = [(prompt - header, answer) for prompt, answer in rows]
    tokens = header + sum(prompt + answer - 1 for prompt, answer in own)
    pairs = _pairs(0, header) + sum(_pairs(header, prompt + answer - 1) for prompt, answer in own)
    experts = len(shape.moe_layers) * shape.experts_per_token * shape.expert_params
    dense = shape.resident_params - shape.embedding_params
    head = shape.vocab_size * shape.hidden_size * lengths.answer_tokens
    attention = pairs * sum(each.flops_per_pair for each in shape.attending)
    return 2.0 * tokens * (experts + dense) + 2.0 * head + attention


def _pairs(before: int, tokens: int) -> int:
    """Queries and positions that they see, of so many tokens after `before` others."""
    return before * tokens + tokens * (tokens + 1) // 2
