"""Keys and values on their way to where attention is computed, and back."""

from collections.abc import Iterator

from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Kind, Task

NUM_WINDOWS = 2
"""One micro-batch attends in a window while the cache of the next one comes into the other."""


class KvTraffic:
    """Launches transfers of keys and values for layers that do not live where they are needed.

    Micro-batch k uses window k mod 2. A window is filled again only when whoever used it last has
    attended, and has stored what is new.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._last_use: dict[tuple[bool, int], tuple[Task, ...]] = {}
        self._up: dict[tuple[int, int], Task] = {}

    def up(self, sweep: Sweep, i: int, k: int) -> Iterator[Task]:
        """Brings the cache of micro-batch k up, unless that has been launched already."""
        if k >= sweep.num_micro_batches or (i, k) in self._up:
            return
        before = self._last_use.get(self._window(sweep, k), ())
        for kind in self._kinds_up(sweep, i, k):
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
        for kind in self._kinds_down(sweep, i, k):
            last = Task(kind, i, k, after=(last,))
            yield last
        if last is not attention:
            self._last_use[self._window(sweep, k)] = (attention, last)

    def _window(self, sweep: Sweep, k: int) -> tuple[bool, int]:
        return sweep.attends_on_cpu(k), k % NUM_WINDOWS

    def _kinds_up(self, sweep: Sweep, i: int, k: int) -> list[Kind]:
        return [
            kind
            for kind, needed in zip(
                (Kind.KV_READ, Kind.KV_UP), self._crossed(sweep, i, k), strict=True
            )
            if needed
        ]

    def _kinds_down(self, sweep: Sweep, i: int, k: int) -> list[Kind]:
        disk, link = self._crossed(sweep, i, k)
        return [kind for kind, needed in ((Kind.KV_DOWN, link), (Kind.KV_WRITE, disk)) if needed]

    def _crossed(self, sweep: Sweep, i: int, k: int) -> tuple[bool, bool]:
        """Whether the cache crosses the link to the disk, and the one to the GPU."""
        if not self._setup.kv_homes:
            return False, False
        home = self._setup.kv_homes[self._setup.layer(i)]
        on_gpu = self._setup.compute == "vram" and not sweep.attends_on_cpu(k)
        return home == "disk", on_gpu and home != "vram"
