"""How full the cache of keys and values will be."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moebatch.spec.policy import PAGE_TOKENS

Ints = NDArray[np.int64]


def peak_pages(tokens: Sequence[int] | Ints, left: Sequence[int] | Ints) -> int:
    """Most pages that sequences hold at any time, if all of them grow by one token a pass.

    Less than the sum of what each needs in the end, since they do not end together: one that ends
    gives its pages to those that are still growing.

    Args:
        tokens: what each sequence has now, at least 1.
        left: how many tokens each will still get.
    """
    tokens, left = np.asarray(tokens, np.int64), np.asarray(left, np.int64)
    if not len(left):
        return 0
    # As in `peaks`, but sequences that end together count as one, and none is sorted: this is
    # asked thousands of times.
    somebody_ends = np.bincount(left) > 0
    passes = np.flatnonzero(somebody_ends)[::-1]
    group = np.cumsum(somebody_ends[::-1])[::-1][left] - 1
    full, over = np.divmod(tokens - 1, PAGE_TOKENS)
    by_over = np.bincount(group * PAGE_TOKENS + over, minlength=len(passes) * PAGE_TOKENS)
    alive_by_over = by_over.reshape(-1, PAGE_TOKENS).cumsum(axis=0)
    at_least = alive_by_over[:, ::-1].cumsum(axis=1)
    whole, rest = np.divmod(passes, PAGE_TOKENS)
    one_more = np.where(rest > 0, at_least[np.arange(len(passes)), rest - 1], 0)
    full_pages = np.cumsum(np.bincount(group, weights=full))
    return int((full_pages + at_least[:, -1] * (whole + 1) + one_more).max())


def peaks(tokens: Sequence[int] | Ints, left: Sequence[int] | Ints) -> Ints:
    """The same from when on only the k longest of them are left, for k = 1, 2, and so on."""
    tokens, left = np.asarray(tokens, np.int64), np.asarray(left, np.int64)
    order = np.argsort(-left, kind="stable")
    # What is held only shrinks when a sequence ends, so it is largest when one has its last token.
    # Those alive then are the first `alive` ones; each holds (begun - 1 + passes) // page + 1.
    begun, passes = tokens[order] - 1, left[order]
    full, over = np.divmod(begun, PAGE_TOKENS)
    alive = np.arange(1, len(begun) + 1)
    whole, rest = np.divmod(passes, PAGE_TOKENS)
    # By how far its last page is filled, how many sequences begin one page more.
    at_least = np.cumsum(over[:, None] >= np.arange(PAGE_TOKENS + 1), axis=0)
    one_more = at_least[alive - 1, PAGE_TOKENS - rest]
    held = np.cumsum(full) + alive * (whole + 1) + one_more
    return np.maximum.accumulate(held)
