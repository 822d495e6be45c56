"""Which parts of which experts make up a page."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from moebatch.checkpoint.direct import align_up
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.experts.page_sources import PageSource


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
