"""Pages whose tokens are known, so that sequences that begin alike can hold them together."""

from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass

from moebatch.spec.policy.policy import PAGE_TOKENS

_ROOT = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPrefix:
    """What is there of the beginning of a sequence."""

    pages: tuple[int, ...] = ()
    """Computed, in order of position."""
    num_pending_tokens: int = 0
    """Further tokens that another sequence is about to compute."""

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed again."""
        return len(self.pages) * PAGE_TOKENS


@dataclass(slots=True, eq=False)
class _Node:
    """A page and everything before it."""

    number: int
    key: tuple[int, tuple[int, ...]]
    page: int
    end: int
    """Tokens up to the end of the page."""
    is_computed: bool = False


class KvPrefixes:
    """A tree of full pages of prompts: a page is found by its own tokens below the page before it.

    Tokens themselves are compared, not hashes of them. A page that is forgotten before those
    behind it makes them unreachable, never wrong.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, tuple[int, ...]], _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._pending: dict[Hashable, list[_Node]] = {}
        self._last_number = _ROOT

    def find(self, prompt: Sequence[int]) -> KvPrefix:
        """The longest known beginning of a prompt."""
        pages: list[int] = []
        num_pending, before = 0, _ROOT
        for tokens in _full_pages(prompt):
            node = self._nodes.get((before, tokens))
            if node is None:
                break
            before = node.number
            if not node.is_computed or num_pending:
                num_pending += PAGE_TOKENS
            else:
                pages.append(node.page)
        return KvPrefix(pages=tuple(pages), num_pending_tokens=num_pending)

    def enter(self, owner: Hashable, prompt: Sequence[int], pages: Sequence[int]) -> None:
        """Registers what `owner`, which has these pages, is about to compute of its prompt."""
        before = _ROOT
        for place, tokens in enumerate(_full_pages(prompt)):
            key = before, tokens
            node = self._nodes.get(key)
            if node is None:
                self._last_number += 1
                end = (place + 1) * PAGE_TOKENS
                node = _Node(self._last_number, key, pages[place], end)
                self._nodes[key] = self._by_page[node.page] = node
                self._pending.setdefault(owner, []).append(node)
            before = node.number

    def publish(self, owner: Hashable, num_tokens: int) -> None:
        """`owner` has computed its first `num_tokens` tokens."""
        waiting = self._pending.pop(owner, [])
        for node in waiting:
            node.is_computed = node.end <= num_tokens
        rest = [node for node in waiting if not node.is_computed]
        if rest:
            self._pending[owner] = rest

    def withdraw(self, owner: Hashable) -> None:
        """What `owner` has entered and not computed will not come."""
        for node in self._pending.pop(owner, []):
            self.forget(node.page)

    @property
    def computing(self) -> Set[Hashable]:
        """Owners of what is still to be computed."""
        return self._pending.keys()

    def is_known(self, page: int) -> bool:
        """Whether a page would be found."""
        return page in self._by_page

    def forget(self, page: int) -> None:
        """A known page is about to hold something else."""
        del self._nodes[self._by_page.pop(page).key]

    def move(self, page: int, to: int) -> None:
        """What a page holds is in another one, which was not known."""
        node = self._by_page.pop(page, None)
        if node is not None:
            node.page = to
            self._by_page[to] = node


def _full_pages(prompt: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Tokens of the pages that can be shared: full ones, and at least two tokens are left, since
    the last one has to be computed for its logits and slices of one token are answers."""
    for first in range(0, len(prompt) - PAGE_TOKENS - 1, PAGE_TOKENS):
        yield tuple(prompt[first : first + PAGE_TOKENS])
