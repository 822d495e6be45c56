"""Weights of a layer that go up in pages, into one half of a buffer while the other is in use."""

from collections import deque
from collections.abc import Iterator

from moebatch.schedule.request import Request, Sweep, Sync
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Task, attend, block, load, page, post, stage


class PagedWeights:
    """Launches pages, and the computation that reads them.

    The half into which step i + 1 goes has been read by ``post`` of the step before i: the order of
    launch does not protect it, so the first page waits for the last of these, an edge that
    MoE-Lightning leaves out. A pinned buffer is filled again when its page has gone up.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pages: dict[int, list[Task]] = {}
        self._last_post: dict[int, Task] = {}
        self._halves: deque[int] = deque(maxlen=2)
        self._pinned: dict[tuple[int, int], Task] = {}

    def first(self, i: int, weights: Iterator[Task]) -> Iterator[Task | Request]:
        """`weights` of the step that a pass begins with, unless they are on their way: before the
        very first pass, and where it leaves out other layers than the one before, behind which
        those of another step have come in vain."""
        if {*self._pages} - {i}:
            yield Sync()
            self._pages.clear()
            self._pinned.clear()
            self._halves.clear()
        if i not in self._pages:
            yield from weights

    def pages(self, i: int, num_pages: int) -> Iterator[Task]:
        """All weights of a step in so many pages."""
        for p in range(num_pages):
            yield from self.stage(i, p, num_pages)
            yield from self.page(i, p, num_pages)

    def stage(self, i: int, p: int, num_pages: int) -> Iterator[Task]:
        """Copies page p of so many into its pinned buffer."""
        if self._setup.has_staging and self._setup.is_moe(i):
            # Buffers for another number of pages overlap: all of them have to be empty.
            before = (
                task
                for (count, number), task in self._pinned.items()
                if count != num_pages or number == p
            )
            yield stage(i, p, *before, num_pages=num_pages)

    def page(self, i: int, p: int, num_pages: int) -> Iterator[Task]:
        """Brings page p of so many up."""
        if not self._setup.is_moe(i):
            return
        staged = (stage(i, p),) if self._setup.has_staging else ()
        overwrites = self._overwrites(i) if p == 0 else ()
        task = page(i, p, *staged, *overwrites, num_pages=num_pages)
        yield task
        self._pages.setdefault(i, []).append(task)
        self._pin(task, p, num_pages)

    def block(self, i: int) -> Iterator[Task]:
        """Brings all weights up at once, on a stream of their own (FlexGen)."""
        if not self._setup.is_moe(i):
            return
        task = block(i, *self._overwrites(i))
        yield task
        self._pages[i] = [task]

    def post(self, sweep: Sweep, i: int, k: int) -> Task:
        """All that follows attention for k; the first one waits for the weights of the layer."""
        up = load(i, k) if sweep.attends_on_cpu(k) else attend(i, k)
        # Without what it waits for, which would keep the tasks of all passes before.
        self._last_post[i] = post(i, k)
        return post(i, k, up, *(self._pages.pop(i, ()) if k == 0 else ()))

    def _overwrites(self, i: int) -> tuple[Task, ...]:
        """The last task that read what the first page of step i overwrites, if any did."""
        oldest = self._halves[0] if len(self._halves) == 2 else None
        self._halves.append(i)
        if oldest is None:
            return ()
        last = self._last_post.get(oldest)
        self._last_post = {
            step: task for step, task in self._last_post.items() if step in self._halves
        }
        return () if last is None else (last,)

    def _pin(self, task: Task, p: int, num_pages: int) -> None:
        self._pinned[num_pages, p] = task
        if p == num_pages - 1:
            self._pinned = {
                key: page_task for key, page_task in self._pinned.items() if key[0] == num_pages
            }
