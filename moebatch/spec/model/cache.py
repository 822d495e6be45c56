"""How much of a sequence the cache holds, layer by layer."""

from dataclasses import dataclass

from moebatch.spec.model.cache_layout import UNLIMITED, CacheLayout, SinkWindow
from moebatch.spec.policy.policy import PAGE_TOKENS, Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers in which the cache holds as much of every sequence, rows of which are alike, and it
    lies at the same places.

    A row is what is cached of one token. All rows of a sequence are there, in order of position; or
    as many as its newest tokens see, in a ring in which a new token takes the place of one that
    none sees any more; or one alone, the state that a recurrence has come to, which holds whatever
    it knows of all tokens. A layer is in several groups if it keeps several such things.
    """

    layers: tuple[int, ...]
    layout: CacheLayout
    """Of a row in one layer."""
    sink_window: SinkWindow | None = None
    """What is seen of a sequence where the rest is written over; None is all of it."""
    is_state: bool = False
    """Whether the row of a sequence is a state."""

    def __str__(self) -> str:
        if self.is_state:
            return "a state"
        return f"{self.most_rows} tokens" if self.sink_window else "all tokens"

    @property
    def is_whole(self) -> bool:
        """Whether all of a sequence is there, token by token."""
        return self.sink_window is None and not self.is_state

    @property
    def most_rows(self) -> int:
        """Rows of the longest sequence."""
        if self.is_state:
            return 1
        return UNLIMITED if self.sink_window is None else self.sink_window.most_cached

    @property
    def page_rows(self) -> int:
        """Rows that are given out together."""
        return 1 if self.is_state else PAGE_TOKENS

    def num_rows(self, num_tokens: int) -> int:
        return min(num_tokens, self.most_rows)

    def pages_of(self, num_tokens: int) -> int:
        return -(-self.num_rows(num_tokens) // self.page_rows)

    def num_pages(self, policy: Policy) -> int:
        """Pages of every layer. Those of the policy are given out by admission, and no sequence has
        more of them here; where it has no more than a ring, a ring for each in work is enough."""
        return min(policy.num_kv_pages, self.most_pages(policy.batch_size))

    def most_pages(self, batch_size: int) -> int:
        """Pages that so many sequences may have in a layer."""
        return batch_size * self.pages_of(UNLIMITED)
