"""What a schedule asks of its driver, beside having tasks run."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from moebatch.schedule.task import Task


@dataclass(frozen=True, slots=True)
class NextPass:
    """Answered with the `Sweep` that comes next, or with None when the job is over. The pass
    before has been computed then; what was prefetched goes on arriving meanwhile."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Experts of a step that are likely to be chosen: they come with low priority, as far as there
    are slots to hold them. The likeliest of a step replace those that were prefetched before."""

    step: int
    count: int | None = None
    """How many, the likeliest first; None is the whole layer."""


@dataclass(frozen=True, slots=True)
class PrefetchToDram:
    """Experts of a step that live on disk come to main memory, below the level that computes."""

    step: int


@dataclass(frozen=True, slots=True)
class Route:
    """Answered when the gate of a micro-batch has chosen. What it chose is certain from then on: it
    comes before all that is only prefetched, and is not given up before it has been computed."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class GateChosen:
    """Answered when the gate of a micro-batch has chosen. Nothing is asked for yet."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Select:
    """What the gates of a step that have chosen have chosen for a later one, as Pre-gated MoE's do,
    comes behind what is asked for already, as far as there are slots. Gates that choose for their
    own step alone have nothing to say to it."""

    step: int


@dataclass(frozen=True, slots=True)
class CancelPrefetch:
    """Prefetched experts of a step that no gate has chosen are not wanted any more."""

    step: int


@dataclass(frozen=True, slots=True)
class Whole:
    """Answered when all experts of a step are ready, chosen or not, or as many as there are slots
    for."""

    step: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Answered with an `Arriving` of the experts that were chosen at a step, by any micro-batch: in
    the order in which they are ready."""

    step: int


@dataclass(frozen=True, slots=True)
class InOrder:
    """Answered with an iterator over the experts that a micro-batch chose, by number; each is
    handed out when it is ready."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Free:
    """Slots of a step's experts are free as soon as what was launched for it is done."""

    step: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Answered when all that has been launched is done."""


Question = NextPass | GateChosen | Route | Whole | Arrivals | InOrder | Sync
Word = Prefetch | PrefetchToDram | Select | CancelPrefetch | Free
Request = Question | Word
Schedule = Generator[Task | Request, Any, None]
"""Tasks in the order of their launch, with requests in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A pass, as far as a schedule has to know it."""

    num_micro_batches: int
    on_cpu: tuple[bool, ...] = ()
    """Which micro-batches attend on the CPU beside a GPU that does the rest; empty is none."""
    continuing: frozenset[int] = frozenset()
    """Micro-batches of a prompt that is cut: they see what the one before them has computed."""

    @property
    def micro_batches(self) -> range:
        """Their numbers."""
        return range(self.num_micro_batches)

    def attends_on_cpu(self, k: int) -> bool:
        """Where the attention of k is computed."""
        return bool(self.on_cpu) and self.on_cpu[k]

    def continues(self, k: int) -> bool:
        """Whether k sees keys and values that k - 1 makes in the same step."""
        return k in self.continuing
