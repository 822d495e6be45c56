"""A job's figures side by side."""

from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.jobs.bound import Bound
from tests.benchmarks.jobs.catalogue import BenchJob
from tests.benchmarks.jobs.checkpoint import STORED
from tests.benchmarks.jobs.estimate import PeerResult
from tests.benchmarks.jobs.probe import Probe
from tests.benchmarks.jobs.run import Run


@dataclass(kw_only=True)
class VariantResult:
    """The job with something switched off."""

    name: str
    option: str
    passes_s: float | None = None
    why_not: str = ""


@dataclass(kw_only=True)
class JobResult:
    """Everything that was measured about one job."""

    job: BenchJob
    run: Run
    rates: Probe
    """Of the minutes of the job."""
    bound: Bound
    weights: str = STORED
    """What the experts are stored in."""
    stored_s: float | None = None
    """Seconds of the same job with the weights as they were made."""
    variants: list[VariantResult] = field(default_factory=list)
    peers: list[PeerResult] = field(default_factory=list)

    @property
    def of_bound(self) -> float:
        """1 is as fast as possible."""
        return self.bound.seconds / self.run.passes_s

    @property
    def faster(self) -> float | None:
        """How many times as fast as with the weights as they were made."""
        return None if self.stored_s is None else self.stored_s / self.run.passes_s

    @property
    def answer_rate(self) -> float:
        """Generated tokens per second of the passes."""
        return self.job.lengths.answer_tokens / self.run.passes_s

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second of the passes, those of shared headers included."""
        return self.job.lengths.prompt_tokens / self.run.passes_s

    def as_json(self) -> dict[str, Any]:
        """Plain data, for programs; units in the names."""
        run = self.run
        return {
            "job": self.job.name,
            "rows": self.job.in_words,
            "weights": self.weights,
            "times_stored": self.faster,
            "passes_s": run.passes_s,
            "wall_s": run.wall_s,
            "predicted_s": run.predicted_s,
            "hindsight_s": run.hindsight_s,
            "bound_s": self.bound.seconds,
            "bound_disk_s": self.bound.disk_s,
            "bound_compute_s": self.bound.compute_s,
            "share_of_bound": self.of_bound,
            "generated_tokens_per_s": self.answer_rate,
            "prompt_tokens_per_s": self.prompt_rate,
            "disk_busy_share": run.disk_share,
            "probed_disk_bytes_per_s": self.rates.disk_rate,
            "probed_gemm_flop_per_s": self.rates.gemm_rate,
            "peak_bytes": run.peak_bytes,
            "cgroup_peak_bytes": run.cgroup_peak_bytes,
            "variants": [vars(variant) for variant in self.variants],
            "peers": [peer.as_json() for peer in self.peers],
            "summary": run.summary,
        }
