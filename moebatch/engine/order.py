"""What is to be built: a model under a policy, and what belongs to the job."""

from dataclasses import dataclass
from pathlib import Path

from moebatch.engine.model_files import ModelFiles
from moebatch.engine.pass_log import PassLog
from moebatch.plan.scratch import Limits, limits_of
from moebatch.predict.predictor import Predictor, RoutingObserver
from moebatch.spec.policy import Policy, pages_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Everything that passes are made from."""

    files: ModelFiles
    policy: Policy
    max_tokens: int
    """Longest sequence, prompt and answer."""
    predictor: Predictor
    """Which experts next."""
    observer: RoutingObserver | None = None
    """Told what gates choose."""
    log: PassLog | None = None
    """Keeps what the first passes have to do."""
    scratch: Path | None = None
    """Folder for keys and values that live on disk."""

    @property
    def limits(self) -> Limits:
        """The largest pieces of work."""
        return limits_of(self.policy, max_tokens=self.max_tokens)

    @property
    def window_pages(self) -> int:
        """Pages of the largest micro-batch."""
        wanted = self.policy.micro_batch_size * pages_of(self.max_tokens)
        return min(self.policy.num_kv_pages, wanted)
