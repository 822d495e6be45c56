"""How weights of experts come to the level that computes them: one by one, or layer by layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

from moebatch.engine.lanes.lane import ChunkMover
from moebatch.layout.ladder import Ladder
from moebatch.schedule.drivers.driver import Driver
from moebatch.schedule.lanes import READ
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.task import Kind, Task
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.paged import PagedExperts
from moebatch.store.experts.vram import VramExperts
from moebatch.store.streamed_layers import StreamedLayers

GetDriver = Callable[[], Driver]


class WeightStream(ABC):
    """Experts on their way up, and where they are computed."""

    def __init__(
        self,
        setup: Setup,
        store: ExpertStore | None,
        slots: SlotQueue,
        *,
        layers: StreamedLayers | None,
        is_direct: bool,
    ) -> None:
        """`store` is main memory; None where pages are read straight to where they are computed.
        `layers` are those whose weights outside experts come up as well."""
        self.slots = slots
        """Of the level that computes, for experts that come one by one."""
        self.below: SlotQueue | None = None
        """Of main memory, where experts pass on their way from disk to a GPU."""
        self.is_direct = is_direct
        """Whether files are read past the page cache."""
        self.tasks: dict[Kind, Callable[[Task], None]] = {}
        """What to do for tasks that bring weights, by their kind."""
        if layers is not None:
            self.tasks[Kind.LAYER_UP] = lambda task: layers.bring(setup.layer(task.step))
        self._layers = layers
        self._setup = setup
        self._store = store

    @abstractmethod
    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        """Matrices of an expert that has come, valid as long as it is in use."""

    def num_bytes(self, task: Task) -> int:
        """Bytes of weights that a task, or a chunk under the name of one, moves over its link."""
        if task.kind is Kind.LAYER_UP and self._layers is not None:
            return self._layers.num_bytes(self._setup.layer(task.step))
        if task.kind is not Kind.FETCH:
            return 0
        assert self._store is not None, "chunks go to main memory"
        return self._store.chunk_bytes(*self._chunk_of(task))

    def movers(self, driver: GetDriver) -> Mapping[str, ChunkMover]:
        """What moves chunks beside the tasks of a lane, by its name: main memory is filled chunk by
        chunk."""
        if self._store is None:
            return {}
        slots, read = self._store.slots, self._store.read
        steps = _steps(driver)
        return {
            READ.name: ChunkMover(slots=slots, move=read, kind=Kind.FETCH, step_of=steps),
        }

    def has_residents(self) -> bool:
        """Whether all has been read that no schedule asks for: schedules take what lives in main
        memory to be there. Called with the lock held."""
        return self._store is None or self._store.has_residents

    def forget(self) -> None:
        """Nothing is required any more, after a pass that was given up."""
        if self._store is not None:
            self._store.slots.forget()

    def _chunk_of(self, task: Task) -> tuple[ExpertKey, int]:
        assert task.expert is not None and task.part is not None, "a chunk of an expert"
        return ExpertKey(self._setup.layer(task.step), task.expert), task.part


class ExpertwiseWeights(WeightStream):
    """Experts come one by one, in chunks, through the slots of each level."""

    def __init__(
        self,
        ladder: Ladder,
        setup: Setup,
        store: ExpertStore,
        vram: VramExperts | None,
        layers: StreamedLayers | None,
    ) -> None:
        """`vram` is the level above `store`, where there is one."""
        self._top = store if vram is None else vram
        super().__init__(setup, store, self._top.slots, layers=layers, is_direct=store.is_direct)
        self.below = store.slots if setup.window else None
        self._link_up = ladder.link_up(ladder.top)

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        return self._top.tensors(ExpertKey(self._setup.layer(step), expert))

    def num_bytes(self, task: Task) -> int:
        if task.kind is Kind.CHUNK:
            return self._top.chunk_bytes(*self._chunk_of(task))
        return super().num_bytes(task)

    def movers(self, driver: GetDriver) -> Mapping[str, ChunkMover]:
        """One for each link up, the top one as the schedule wants it."""
        assert self._link_up is not None, "experts come from below"
        move = self._top.copy if isinstance(self._top, VramExperts) else self._top.read
        top = ChunkMover(
            slots=self.slots,
            move=move,
            step_of=_steps(driver),
            path=lambda: driver().disk_path,
        )
        return {**super().movers(driver), self._link_up: top}

    def has_residents(self) -> bool:
        """A schedule waits for chunks from disk itself."""
        return self._top is self._store or self.below is not None or super().has_residents()

    def forget(self) -> None:
        self._top.slots.forget()
        super().forget()


class PagewiseWeights(WeightStream):
    """Experts come layer by layer, in pages, into halves of a buffer."""

    def __init__(
        self,
        setup: Setup,
        pages: PagedExperts,
        store: ExpertStore | None,
        layers: StreamedLayers | None,
    ) -> None:
        """`store` is main memory under a GPU."""
        slots = SlotQueue({}, num_slots=0)
        super().__init__(setup, store, slots, layers=layers, is_direct=pages.is_direct)
        self._pages = pages
        self._moved: Mapping[Kind, Callable[[Task], None]] = {
            Kind.STAGE: lambda task: pages.stage(task.step, *_page_of(task)),
            Kind.PAGE: lambda task: pages.page(task.step, *_page_of(task)),
            Kind.BLOCK: lambda task: pages.block(task.step),
        }
        self.tasks |= self._moved

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        return self._pages.tensors(step, expert)

    def num_bytes(self, task: Task) -> int:
        if task.kind in self._moved:
            return self._pages.num_bytes(task.step, *_page_of(task))
        return super().num_bytes(task)

    def forget(self) -> None:
        self._pages.forget()
        super().forget()


def _steps(driver: GetDriver) -> Callable[[int], int]:
    return lambda layer: driver().step_of(layer)


def _page_of(task: Task) -> tuple[int, int]:
    """Page and number of pages."""
    return task.page or 0, task.num_pages or 1
