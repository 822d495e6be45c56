"""How weights of experts come to the level that computes them: one by one, or layer by layer."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from moebatch.engine.lane import ChunkMover, Mover
from moebatch.layout.ladder import Ladder
from moebatch.schedule.driver import Driver
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.task import Kind, Task
from moebatch.store.experts import ExpertStore
from moebatch.store.paged_experts import PagedExperts
from moebatch.store.vram_experts import VramExperts

DISK = "disk->dram"
GetDriver = Callable[[], Driver]


class WeightStream(Protocol):
    """Experts on their way up, and where they are computed."""

    slots: SlotQueue
    """Of the level that computes, for experts that come one by one."""

    @property
    def below(self) -> SlotQueue | None:
        """Of main memory, where experts pass on their way from disk to a GPU."""

    @property
    def is_direct(self) -> bool:
        """Whether files are read past the page cache."""

    @property
    def tasks(self) -> Mapping[Kind, Callable[[Task], None]]:
        """What to do for tasks that bring weights, by their kind."""

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        """Matrices of an expert that has come."""

    def num_bytes(self, task: Task) -> int:
        """Bytes of weights that a task, or a chunk under the name of one, moves over its link."""

    def movers(self, driver: GetDriver) -> Mapping[str, Mover]:
        """What moves chunks beside the tasks of a lane, by its name."""

    def has_residents(self) -> bool:
        """Whether all has been read that no schedule asks for; called with the lock held."""

    def forget(self) -> None:
        """Nothing is required any more, after a pass that was given up."""


class ExpertwiseWeights:
    """Experts come one by one, in chunks, through the slots of each level."""

    def __init__(
        self, ladder: Ladder, setup: Setup, store: ExpertStore, vram: VramExperts | None
    ) -> None:
        """`vram` is the level above `store`, where there is one."""
        self._setup = setup
        self._store = store
        self._top = store if vram is None else vram
        self._link_up = ladder.link_up(ladder.top)
        self.slots = self._top.slots

    @property
    def below(self) -> SlotQueue | None:
        """Of main memory, if experts come from disk through it."""
        return self._store.slots if self._setup.window else None

    @property
    def is_direct(self) -> bool:
        """Whether files are read past the page cache."""
        return self._store.is_direct

    @property
    def tasks(self) -> Mapping[Kind, Callable[[Task], None]]:
        """Only chunks move."""
        return {}

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        """Matrices of an expert that has arrived, valid as long as it is in use."""
        return self._top.tensors(ExpertKey(self._setup.layer(step), expert))

    def num_bytes(self, task: Task) -> int:
        """Bytes of a chunk."""
        if task.kind not in (Kind.CHUNK, Kind.FETCH):
            return 0
        level = self._store if task.kind is Kind.FETCH else self._top
        return level.chunk_bytes(*_chunk_of(task, self._setup))

    def movers(self, driver: GetDriver) -> Mapping[str, Mover]:
        """One for each link up, the top one as the schedule wants it."""
        assert self._link_up is not None, "experts come from below"
        move = self._top.copy if isinstance(self._top, VramExperts) else self._top.read
        top = ChunkMover(
            slots=self.slots,
            move=move,
            step_of=_steps(driver),
            path=lambda: driver().disk_path,
        )
        return {**_reading(self._store, driver), self._link_up: top}

    def has_residents(self) -> bool:
        """A schedule waits for chunks from disk; what lives in main memory it takes to be there."""
        return self._top is self._store or self.below is not None or self._store.has_residents

    def forget(self) -> None:
        """At all levels."""
        for level in (self._top, self._store):
            level.slots.forget()


class PagewiseWeights:
    """Experts come layer by layer, in pages, into halves of a buffer."""

    below = None

    def __init__(self, setup: Setup, pages: PagedExperts, store: ExpertStore | None) -> None:
        """`store` is main memory under a GPU; None where pages are read where they are computed."""
        self.slots = SlotQueue({}, num_slots=0)
        self._setup = setup
        self._pages = pages
        self._store = store

    @property
    def is_direct(self) -> bool:
        """Whether files are read past the page cache."""
        return self._pages.is_direct

    @property
    def tasks(self) -> Mapping[Kind, Callable[[Task], None]]:
        """Pages are launched like all else."""
        return {
            Kind.STAGE: lambda task: self._pages.stage(task.step, *_page_of(task)),
            Kind.PAGE: lambda task: self._pages.page(task.step, *_page_of(task)),
            Kind.BLOCK: lambda task: self._pages.block(task.step),
        }

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        """Matrices of an expert whose step is in place."""
        return self._pages.tensors(step, expert)

    def num_bytes(self, task: Task) -> int:
        """Bytes of a page, or of a chunk that comes from disk below it."""
        if task.kind in (Kind.STAGE, Kind.PAGE, Kind.BLOCK):
            return self._pages.num_bytes(task.step, *_page_of(task))
        if task.kind is not Kind.FETCH:
            return 0
        assert self._store is not None, "chunks go to main memory"
        return self._store.chunk_bytes(*_chunk_of(task, self._setup))

    def movers(self, driver: GetDriver) -> Mapping[str, Mover]:
        """Main memory is filled chunk by chunk."""
        return {} if self._store is None else _reading(self._store, driver)

    def has_residents(self) -> bool:
        """A schedule takes what lives in main memory to be there."""
        return self._store is None or self._store.has_residents

    def forget(self) -> None:
        """Pages that have been brought, and experts that were to pass below."""
        self._pages.forget()
        if self._store is not None:
            self._store.slots.forget()


def _reading(store: ExpertStore, driver: GetDriver) -> Mapping[str, Mover]:
    """What reads experts that are going further up."""
    mover = ChunkMover(slots=store.slots, move=store.read, kind=Kind.FETCH, step_of=_steps(driver))
    return {DISK: mover}


def _steps(driver: GetDriver) -> Callable[[int], int]:
    return lambda layer: driver().step_of(layer)


def _chunk_of(task: Task, setup: Setup) -> tuple[ExpertKey, int]:
    assert task.expert is not None and task.part is not None, "a chunk of an expert"
    return ExpertKey(setup.layer(task.step), task.expert), task.part


def _page_of(task: Task) -> tuple[int, int]:
    """Page and number of pages."""
    return task.page or 0, task.num_pages or 1
