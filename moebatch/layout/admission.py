"""In which order waiting sequences are taken in."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from moebatch.spec.workload import Length

AHEAD_TOKENS = 2**18
"""Prompt tokens that are looked ahead: some 10 MB of them."""

T = TypeVar("T")


def longest_first(source: Iterable[T], length_of: Callable[[T], Length]) -> Iterator[T]:
    """Hands out the sequence with the longest possible answer among those within sight.

    Passes cost much the same with few sequences as with many, and the longest answer ends last,
    so it should begin first: short ones are kept for the end, where they fill the seats that
    become free. (The rule of the longest processing time: Graham 1969.) Sequences with equal
    answers keep their order. More than `AHEAD_TOKENS` prompt tokens are never held, unless one
    sequence has more.
    """
    waiting: list[tuple[int, int, T]] = []
    num_held = 0
    for number, item in enumerate(source):
        length = length_of(item)
        heapq.heappush(waiting, (-length.new_tokens, number, item))
        num_held += length.prompt_tokens
        while num_held > AHEAD_TOKENS:
            taken = heapq.heappop(waiting)[2]
            num_held -= length_of(taken).prompt_tokens
            yield taken
    while waiting:
        yield heapq.heappop(waiting)[2]
