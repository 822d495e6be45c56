"""Layers of experts that come in pages, into one half of a buffer while the other is in use."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from moebatch.checkpoint.direct import align_up
from moebatch.layout.buffers import RESIDENT_TERM, SLOTS_TERM
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts.page_sources import PageSource
from moebatch.store.memory import Arena, copy_bytes

MAX_PAGES = 4096
"""Most pages that a staging buffer has room for: each begins at an aligned place."""

Slots = tuple[Tensor, ...]


class PagePart(NamedTuple):
    """A part of an expert, and its slot in the half of a buffer."""

    key: ExpertKey
    slot: int
    start: int
    """Within the slot."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A run of bytes of a layer's streamed experts, one after the other."""

    parts: tuple[PagePart, ...]
    start: int
    """Bytes of the layer before it."""
    num_bytes: int
    buffer_start: int
    """Where it is staged. Pages of the same number are staged at the same place in all layers, so
    that it is free when the page before has gone up."""


class PageCut:
    """The streamed experts of each layer, in slots from 0 on, cut into pages of equal bytes.

    The last page takes what is left; with very many pages the last ones may be empty.
    """

    def __init__(
        self, source: PageSource, experts: Iterable[ExpertKey], resident: Collection[ExpertKey]
    ) -> None:
        living_here = frozenset(resident)
        streamed = sorted(key for key in experts if key not in living_here)
        self._keys = {
            layer: tuple(keys) for layer, keys in groupby(streamed, key=lambda key: key.layer)
        }
        self._slots = {key: slot for keys in self._keys.values() for slot, key in enumerate(keys)}
        self._source = source
        self._pages: dict[int, tuple[Page, ...]] = {}
        self.largest_bytes = max(map(self._layer_bytes, self._keys), default=0)
        """Streamed bytes of the layer that has most."""
        self.most_keys = max(map(len, self._keys.values()), default=0)
        """Streamed experts of the layer that has most: a half has room for these (MoE-Lightning,
        appendix A.1)."""

    def keys(self, layer: int) -> Sequence[ExpertKey]:
        return self._keys.get(layer, ())

    def slot_of(self, key: ExpertKey) -> int:
        """The slot of a streamed expert within a half."""
        return self._slots[key]

    def page(self, layer: int, number: int, num_pages: int) -> Page:
        pages = self._pages.get(layer, ())
        if len(pages) != num_pages:
            pages = tuple(self._cut(layer, num_pages))
            self._pages[layer] = pages  # the last number only: passes may differ without end
        return pages[number]

    def _layer_bytes(self, layer: int) -> int:
        return sum(map(self._source.num_bytes, self.keys(layer)))

    def _page_bytes(self, layer_bytes: int, num_pages: int) -> int:
        return align_up(-(-layer_bytes // num_pages), self._source.step_bytes)

    def _cut(self, layer: int, num_pages: int) -> Iterator[Page]:
        """One walk over experts and pages."""
        total = self._layer_bytes(layer)
        page_bytes = self._page_bytes(total, num_pages)
        buffer_bytes = self._page_bytes(self.largest_bytes, num_pages)
        sizes = [(key, self._source.num_bytes(key)) for key in self.keys(layer)]
        slot, done = 0, 0  # expert in hand, and bytes of it that earlier pages have
        for number in range(num_pages):
            start, stop = min(number * page_bytes, total), min((number + 1) * page_bytes, total)
            left, parts = stop - start, []
            while left:
                key, num_bytes = sizes[slot]
                length = min(left, num_bytes - done)
                parts.append(PagePart(key, slot, done, length))
                left, done = left - length, done + length
                if done == num_bytes:
                    slot, done = slot + 1, 0
            yield Page(
                parts=tuple(parts),
                start=start,
                num_bytes=stop - start,
                buffer_start=number * buffer_bytes,
            )


@dataclass(slots=True, eq=False)
class _Half:
    """Room for the streamed experts of one layer."""

    room: Tensor
    slots: Slots
    step: int | None = None
    """Whose weights it holds."""
    is_whole: bool = False
    """Whether the last page has been moved."""


class PagedExperts:
    """Two halves of a buffer, slots for residents, and pages that move in between.

    A *step* is a layer of one walk through the model, counted on from pass to pass. Halves are
    taken in turn, in the order in which steps are paged: the third one overwrites the first. Pages
    of a step are staged, and moved, in order from page 0 on, by one thread for each; what waits
    for what is the schedule's business.
    """

    def __init__(
        self,
        source: PageSource,
        memory: DeviceMemory,
        experts: Iterable[ExpertKey],
        *,
        num_layers: int,
        resident: Collection[ExpertKey] = (),
        has_staging: bool = False,
    ) -> None:
        """Room in `memory` for `experts` of a model of so many layers.

        Raises DoesNotFit if the device has no room for the residents and both halves.
        """
        self._source = source
        self._num_layers = num_layers
        self._cut = PageCut(source, experts, resident)
        num_bytes = len(resident) * source.slot_bytes
        living_here = memory.allocate(num_bytes, what=RESIDENT_TERM)
        self._resident = dict(zip(resident, self._slots(living_here), strict=True))
        num_bytes = self._cut.most_keys * source.slot_bytes
        rooms = [memory.allocate(num_bytes, what=SLOTS_TERM) for _ in range(2)]
        self._halves = [_Half(room, self._slots(room)) for room in rooms]
        self._num_paged = 0
        self._staging: Arena | None = None
        if has_staging:
            num_bytes = self._cut.largest_bytes + MAX_PAGES * source.step_bytes
            self._staging = Arena(num_bytes, pinned=memory.device.type == "cuda")

    @property
    def is_direct(self) -> bool:
        """Whether files are read past the page cache."""
        return self._source.is_direct

    def load_residents(self) -> None:
        """Reads experts that live here, before anything else goes on. Raises StorageError."""
        self._source.load(self._resident)

    def num_bytes(self, step: int, page: int = 0, num_pages: int = 1) -> int:
        """Bytes that a page of so many moves, or all of them."""
        return self._page(step, page, num_pages).num_bytes

    def stage(self, step: int, page: int, num_pages: int) -> None:
        """Copies a page from below into its place in the staging buffer.

        Waits for experts that come from disk; raises what reading them failed with.
        """
        assert num_pages <= MAX_PAGES, "more pages than staging buffers have room for"
        self._prefetch(step, page)
        cut = self._page(step, page, num_pages)
        done, room = 0, self._staged(cut)
        for part in cut.parts:
            self._source.move(part.key, part.start, room[done : done + part.num_bytes])
            done += part.num_bytes

    def page(self, step: int, page: int, num_pages: int) -> None:
        """Moves a page of so many into the half of its step: out of the staging buffer, if there
        is one, else from below as `block` does.

        It has arrived when this returns on an emulated device; on a GPU the copy is issued on the
        current stream.
        """
        half, cut = self._half_of(step, page), self._page(step, page, num_pages)
        if self._staging is None:
            self._prefetch(step, page)
            self._bring(cut, half.slots)
        else:
            copy_bytes(half.room[cut.start : cut.start + cut.num_bytes], self._staged(cut))
        half.is_whole = page == num_pages - 1

    def block(self, step: int) -> None:
        """Moves all weights of a step at once, straight from below.

        Waits for experts that come from disk; raises what reading them failed with.
        """
        half = self._half_of(step, 0)
        self._prefetch(step, 0)
        self._bring(self._page(step, 0, 1), half.slots)
        half.is_whole = True

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        """The tensors of an expert of a step whose pages have all been moved, valid until the
        step after the next is paged."""
        key = ExpertKey(step % self._num_layers, expert)
        slot = self._resident.get(key)
        if slot is None:
            half = next((half for half in self._halves if half.step == step), None)
            assert half is not None and half.is_whole, f"weights of step {step} are not there"
            slot = half.slots[self._cut.slot_of(key)]
        return self._source.tensors(key, slot)

    def forget(self) -> None:
        """Steps that have been paged are not used any more, after a pass that was given up. To be
        called before the store below forgets."""
        for half in self._halves:
            half.step, half.is_whole = None, False
        self._source.forget()

    def close(self) -> None:
        """Gives files and pinned memory back. Nothing may be on its way."""
        self._source.close()
        if self._staging is not None:
            self._staging.unpin()

    def _slots(self, room: Tensor) -> Slots:
        return room.view(-1, self._source.slot_bytes).unbind()

    def _page(self, step: int, page: int, num_pages: int) -> Page:
        return self._cut.page(step % self._num_layers, page, num_pages)

    def _half_of(self, step: int, page: int) -> _Half:
        """The half of a step whose page comes. With the first one it takes that of the step before
        the last, even if it has come before, in vain."""
        for half in self._halves if page else ():
            if half.step == step:
                return half
        half = self._halves[self._num_paged % 2]
        self._num_paged += 1
        half.step, half.is_whole = step, False
        return half

    def _prefetch(self, step: int, page: int) -> None:
        if page == 0:
            self._source.prefetch(self._cut.keys(step % self._num_layers))

    def _bring(self, page: Page, slots: Slots) -> None:
        for key, slot, start, num_bytes in page.parts:
            self._source.move(key, start, slots[slot][start : start + num_bytes])

    def _staged(self, page: Page) -> Tensor:
        """The place of a page in the staging buffer."""
        assert self._staging is not None, "there is no staging buffer"
        return self._staging.bytes[page.buffer_start : page.buffer_start + page.num_bytes]
