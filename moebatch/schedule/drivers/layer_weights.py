"""Weights outside experts that come up layer by layer, beside whatever a schedule moves."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

from moebatch.schedule.lanes import lane_of
from moebatch.schedule.request import CannotGoOn
from moebatch.schedule.setup import NUM_LAYER_PLACES, Setup
from moebatch.schedule.task import Kind, Task


class LayerWeights:
    """Launches their way up before the tasks that compute with them.

    A few places take the layers in turns. When a step begins, the next one that needs weights is
    given the place of the step that is two such steps back: schedules begin a layer while the one
    before is still in work, but no later one.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._place = {layer: n % NUM_LAYER_PLACES for n, layer in enumerate(setup.streamed)}
        self._computes = {kind for kind in Kind if lane_of(kind, setup.compute).at == setup.compute}
        self._held: dict[int, int] = {}
        """By place, the step whose weights are there or on their way."""
        self._last: dict[int, Task] = {}
        """By such a step, the task launched last that reads them."""
        self._latest = -1

    def before(self, task: Task) -> Iterator[Task]:
        """`task`, after what has to be launched before it. Raises CannotGoOn where another step
        has the place of its own."""
        if not self._place or task.kind not in self._computes:
            yield task
            return
        is_first, step = task.step > self._latest, task.step
        self._latest = max(self._latest, step)
        if (place := self._place.get(self._setup.layer(step))) is not None:
            if self._held.get(place, -1) > step:
                raise CannotGoOn(f"{task}: the weights of its layer have made room for later ones")
            yield from self._up(step)
            if step not in self._last:
                task = replace(task, after=(*task.after, Task(Kind.LAYER_UP, step)))
            # Without what it waits for, which would keep the tasks of all passes before.
            self._last[step] = replace(task, after=())
        if is_first:
            following = self._next(step)
            before = self._held.get(self._place[self._setup.layer(following)])
            if before is None or before < step - 1:
                yield from self._up(following)
        yield task

    def _up(self, step: int) -> Iterator[Task]:
        place = self._place[self._setup.layer(step)]
        before = self._held.get(place)
        if before == step:
            return
        self._held[place] = step
        read = () if before is None else (self._last.pop(before),)
        yield Task(Kind.LAYER_UP, step, after=read)

    def _next(self, step: int) -> int:
        """The next step after this one whose weights come up."""
        streamed, layer = self._setup.streamed, self._setup.layer(step)
        number = bisect_right(streamed, layer)
        if number < len(streamed):
            return step - layer + streamed[number]
        return step - layer + self._setup.num_layers + streamed[0]
