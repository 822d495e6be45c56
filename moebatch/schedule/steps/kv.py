"""Keys and values on their way to where attention is computed, and back."""

from collections.abc import Iterator

from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.kv_route import FROM_ATTENTION, TO_ATTENTION
from moebatch.schedule.task import Kind, Task

NUM_WINDOWS = 2
"""One micro-batch attends in a window while the cache of the next one comes into the other."""


class KvTraffic:
    """Launches transfers of keys and values for layers that do not live where they are needed.

    Micro-batch k uses window k mod 2. A window is filled again only when the micro-batch that
    used it last has attended, and has stored what is new.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._last_use: dict[tuple[bool, int], tuple[Task, ...]] = {}
        self._up: dict[tuple[int, int], Task] = {}
        self._stored: dict[tuple[int, int], Task] = {}
        """By layer and micro-batch what stored keys and values that the next one reads. Schedules
        that run ahead store some of the next layer in between."""

    def up(self, sweep: Sweep, i: int, k: int) -> Iterator[Task]:
        """Brings the cache of micro-batch k up, unless that has been launched already.

        Call it for a micro-batch that continues the one before only after `down` of that one.
        """
        if k >= sweep.num_micro_batches or (i, k) in self._up:
            return
        before = self._last_use.get(self._window(sweep, k), ())
        if sweep.continues(k):
            stored = self._stored.pop((self._setup.layer(i), k - 1), None)
            assert stored is not None, (
                f"micro-batch {k} of step {i} continues {k - 1}, whose keys and values are not on "
                "their way down; launch `down` of that one before"
            )
            before += (stored,)
        for kind in self._kinds(sweep, i, k, TO_ATTENTION):
            task = Task(kind, i, k, after=before)
            yield task
            self._up[i, k] = task
            before = (task,)

    def ready(self, i: int, k: int) -> tuple[Task, ...]:
        """What attention of k has to wait for."""
        task = self._up.pop((i, k), None)
        return (task,) if task else ()

    def down(self, sweep: Sweep, i: int, k: int, attention: Task) -> Iterator[Task]:
        """Stores what is new after `attention` of k."""
        last = attention
        for kind in self._kinds(sweep, i, k, FROM_ATTENTION):
            last = Task(kind, i, k, after=(last,))
            yield last
        if sweep.continues(k + 1):
            self._stored[self._setup.layer(i), k] = last
        if last is not attention:
            self._last_use[self._window(sweep, k)] = (attention, last)

    def _window(self, sweep: Sweep, k: int) -> tuple[bool, int]:
        return sweep.attends_on_cpu(k), k % NUM_WINDOWS

    def _kinds(self, sweep: Sweep, i: int, k: int, wanted: tuple[Kind, ...]) -> list[Kind]:
        way = self._setup.kv_kinds(sweep, i, k)
        return [kind for kind in wanted if kind in way]
