"""Keys and values of all sequences, in pages that have one owner each.

Shape letters: R cache rows (one token each), G KV heads, C head size.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from moebatch.spec.policy import PAGE_TOKENS, pages_of
from moebatch.store.memory import Arena


class KVCache:
    """A fixed number of pages, shared by all layers: page p holds the same tokens in each.

    A page belongs to the free list or to one owner. `rows` of an owner are the places of its
    tokens in `keys_RGC` and `values_RGC`, in order of position.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_pages = num_pages
        num_rows = num_pages * PAGE_TOKENS
        shape = (num_rows, num_kv_heads, head_dim)
        layer_bytes = num_rows * num_kv_heads * head_dim * dtype.itemsize
        self._arena = Arena(2 * num_layers * layer_bytes)
        self.keys_RGC = [
            self._arena.tensor(2 * i * layer_bytes, shape, dtype) for i in range(num_layers)
        ]
        self.values_RGC = [
            self._arena.tensor((2 * i + 1) * layer_bytes, shape, dtype) for i in range(num_layers)
        ]
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[Hashable, list[int]] = {}
        self._rows: dict[Hashable, Tensor] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def pages_to_grow(self, owner: Hashable, num_tokens: int) -> int:
        """Pages that `owner` lacks to hold `num_tokens` tokens."""
        return max(0, pages_of(num_tokens) - len(self._pages.get(owner, ())))

    def grow(self, owner: Hashable, num_tokens: int) -> None:
        """Gives `owner` pages until it can hold `num_tokens` tokens."""
        missing = self.pages_to_grow(owner, num_tokens)
        assert missing <= len(self._free), "ask pages_to_grow before growing"
        if missing == 0:
            return
        new = [self._free.pop() for _ in range(missing)]
        self._pages.setdefault(owner, []).extend(new)
        rows = (torch.tensor(new)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).view(-1)
        held = self._rows.get(owner)
        self._rows[owner] = rows if held is None else torch.cat([held, rows])

    def rows(self, owner: Hashable, num_tokens: int) -> Tensor:
        """Cache rows, int64 [num_tokens], of the owner's positions from 0."""
        return self._rows[owner][:num_tokens]

    def release(self, owner: Hashable) -> None:
        """Takes all pages of `owner` back."""
        self._free.extend(self._pages.pop(owner, ()))
        self._rows.pop(owner, None)

    def check_integrity(self) -> None:
        """Asserts that every page has exactly one owner."""
        owned = [page for pages in self._pages.values() for page in pages]
        assert sorted(owned + self._free) == list(range(self.num_pages)), "page owners differ"
