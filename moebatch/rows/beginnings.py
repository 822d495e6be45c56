"""How much of each prompt earlier rows begin with."""

from collections.abc import Sequence

from moebatch.spec.policy import PAGE_TOKENS

_MOST_PAGES = 2**18


class Beginnings:
    """Remembers hashes of the pages of all prompts, of the first `_MOST_PAGES` different ones.

    Good enough to plan with: whether a page is really the same is looked at when it is used, and
    whether it is still there only shows then.
    """

    def __init__(self) -> None:
        self._pages: set[int] = set()

    def add(self, prompt: Sequence[int]) -> int:
        """Takes in the next prompt; the tokens at its beginning that need not be computed again.

        Two tokens of a prompt are always computed, see `store/kv_prefixes.py`.
        """
        number, num_shared = 0, 0
        for first in range(0, len(prompt) - PAGE_TOKENS - 1, PAGE_TOKENS):
            number = hash((number, prompt[first : first + PAGE_TOKENS]))
            if number in self._pages:
                num_shared = first + PAGE_TOKENS
            elif len(self._pages) < _MOST_PAGES:
                self._pages.add(number)
        return num_shared
