"""What a schedule asks of its driver, beside having tasks run."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.task import Task


@dataclass(frozen=True, slots=True)
class _OfStep:
    step: int


@dataclass(frozen=True, slots=True)
class _OfMicroBatch(_OfStep):
    micro_batch: int


class CannotGoOn(AssertionError):
    """A schedule asks for what cannot come, or launches what is not there."""


class NextPass:
    """Answered with the `Sweep` that comes next, or with None when the job is over. The pass
    before has been computed then; what was prefetched goes on arriving meanwhile."""


@dataclass(frozen=True, slots=True)
class Prefetch(_OfStep):
    """Experts of a step that are likely to be chosen: they come with low priority, as far as there
    are slots to hold them. The likeliest of a step replace those that were prefetched before."""

    count: int | None = None
    """How many, the likeliest first; None is the whole layer."""


class PrefetchToDram(_OfStep):
    """Experts of a step that live on disk come to main memory, below the level that computes."""


class Route(_OfMicroBatch):
    """Answered with the experts that the gate of a micro-batch has chosen. They are certain from
    then on: they come before all that is only prefetched, and are not given up before they have
    been computed."""


class GateChosen(_OfMicroBatch):
    """Answered with the experts that the gate of a micro-batch has chosen. Nothing is asked for
    yet."""


class Select(_OfStep):
    """What the gates of a step that are done have chosen for a later one, as Pre-gated MoE's do,
    comes behind what is asked for already, as far as there are slots. Gates that choose for their
    own step alone have nothing to say to it."""


class CancelPrefetch(_OfStep):
    """Prefetched experts of a step that no gate has chosen are not wanted any more."""


class Whole(_OfStep):
    """Answered when all experts of a step are ready, chosen or not, or as many as there are slots
    for."""


class Arrivals(_OfStep):
    """Answered with an `Arriving` of the experts that were chosen at a step, by any micro-batch: in
    the order in which they are ready, one by one or in groups."""


class InOrder(_OfMicroBatch):
    """Answered with an iterator over the experts that a micro-batch chose, by number; each is
    handed out when it is ready."""


class Free(_OfStep):
    """Slots of a step's experts are free as soon as what was launched for it is done."""


class Sync:
    """Answered when all that has been launched is done."""


_Ready = Callable[[Collection[ExpertKey], bool], list[ExpertKey]]
_Wait = Callable[[Collection[ExpertKey]], None]


class Arriving:
    """Chosen experts of a step: resident, arrived, in flight, absent. Each is handed out once."""

    def __init__(
        self, keys: Iterable[ExpertKey], ready: _Ready, wait: _Wait, *, most_together: int = 1
    ) -> None:
        """`ready` gives those of some experts that are ready, in the order in which they are to be
        computed: what becomes ready later comes behind them. Unless it is asked for all of them,
        those will do that have become so since it was asked last. `wait` returns when one is. A
        group has `most_together` experts at most."""
        self._left = dict.fromkeys(keys)
        self._ready = ready
        self._wait = wait
        self._most_together = most_together
        self._has_more = True
        """Whether some that are ready may not have been handed out: a schedule may stop asking."""

    @property
    def ready(self) -> Iterator[list[int]]:
        """Those that have arrived already, in groups that are computed together."""
        while self._left:
            ready = self._ready(self._left, self._has_more)
            self._has_more = bool(ready)
            if not ready:
                return
            for first in range(0, len(ready), self._most_together):
                group = ready[first : first + self._most_together]
                for key in group:
                    del self._left[key]
                yield [key.expert for key in group]
            self._has_more = False

    @property
    def groups(self) -> Iterator[list[int]]:
        """All that are left in such groups, those that are ready first."""
        yield from self.ready
        while self._left:
            self._wait(self._left)
            yield from self.ready

    def __iter__(self) -> Iterator[int]:
        """All that are left one by one, those that are ready first."""
        return chain.from_iterable(self.groups)


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
    encodes: bool = False
    """Whether tokens are among them that an encoder takes in."""
    tokens: tuple[int, ...] = ()
    """Of each micro-batch; empty is as many in all."""

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
