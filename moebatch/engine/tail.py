"""The end of a job: memory of pages that are not needed any more goes to experts that stay."""

from moebatch.engine.batcher import Batcher
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.kv.cache import KVCache

_LEAST_PASSES = 3
"""An expert that stays is read once more, and saves its bytes in each pass after that."""


class Tail:
    """Shrinks the cache of keys and values, and grows the number of resident experts.

    When no sequence waits any more the batch only shrinks, and so do the pages that it holds at its
    peak. Each expert that has room in what is left stays in memory: where every expert is used in
    each pass, that saves its bytes in each of them. Memory is given back before it is taken, so
    there is never more of it than at the start.
    """

    def __init__(self, cache: KVCache, experts: ExpertStore) -> None:
        self._cache = cache
        self._experts = experts
        self._spare_bytes = 0
        """What was given back and not taken again."""
        self._is_over = not cache.can_shrink

    @property
    def num_grown(self) -> int:
        """Experts that have become resident, or are about to."""
        return self._experts.num_grown

    def after_pass(self, batcher: Batcher) -> None:
        """Moves memory from pages to experts, as far as all sequences in work can get the longest
        answers that they may have. Nothing may be in work."""
        if self._is_over or not self._experts.can_grow:
            return
        rest = batcher.rest()
        if rest is None or rest.num_passes < _LEAST_PASSES:
            return
        free_pages = self._cache.first.num_pages - rest.num_pages
        free_bytes = self._cache.bytes_beyond(rest.num_pages) + self._spare_bytes
        if free_pages > 0 and free_bytes >= self._experts.slot_bytes:
            self._spare_bytes += self._cache.give_back(rest.num_pages)
            self._grow()

    def _grow(self) -> None:
        while self._spare_bytes >= self._experts.slot_bytes and self._experts.can_grow:
            try:
                self._experts.grow()
            except (OSError, MemoryError):
                self._is_over = True
                return
            self._spare_bytes -= self._experts.slot_bytes
