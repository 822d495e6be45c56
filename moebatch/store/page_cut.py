"""Which parts of which experts make up a page."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from moebatch.schedule.slots import ExpertKey
from moebatch.store.memory import align_up
from moebatch.store.page_sources import PageSource


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

    def keys(self, layer: int) -> Sequence[ExpertKey]:
        """Streamed experts of a layer."""
        return self._keys.get(layer, ())

    def slot_of(self, key: ExpertKey) -> int:
        """The slot of a streamed expert within a half."""
        return self._slots[key]

    def page(self, layer: int, number: int, num_pages: int) -> Page:
        """Page `number` of so many."""
        pages = self._pages.get(layer, ())
        if len(pages) != num_pages:
            pages = tuple(self._cut(layer, p, num_pages) for p in range(num_pages))
            self._pages[layer] = pages  # the last number only: passes may differ without end
        return pages[number]

    def _layer_bytes(self, layer: int) -> int:
        return sum(map(self._source.num_bytes, self.keys(layer)))

    def _page_bytes(self, layer_bytes: int, num_pages: int) -> int:
        return align_up(-(-layer_bytes // num_pages), self._source.step_bytes)

    def _cut(self, layer: int, number: int, num_pages: int) -> Page:
        total = self._layer_bytes(layer)
        page_bytes = self._page_bytes(total, num_pages)
        start, stop = min(number * page_bytes, total), min((number + 1) * page_bytes, total)
        parts, before = [], 0
        for slot, key in enumerate(self.keys(layer)):
            num_bytes = self._source.num_bytes(key)
            first, last = max(start - before, 0), min(stop - before, num_bytes)
            if first < last:
                parts.append(PagePart(key, slot, first, last - first))
            before += num_bytes
        return Page(
            parts=tuple(parts),
            start=start,
            num_bytes=stop - start,
            buffer_start=number * self._page_bytes(self.largest_bytes, num_pages),
        )
