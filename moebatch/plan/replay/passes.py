"""A job pass by pass: what the batcher does with sequences of these lengths.

Shape letters: S sequences in work, N sequences that wait, F the four fields of either.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import cycle, islice

import numpy as np

from moebatch.arrays import Ints
from moebatch.layout.admission import Admission, Caps, longest_first
from moebatch.layout.load import CountedLoad, PassLoad
from moebatch.layout.scratch import PROMPT_ROWS
from moebatch.spec.policy.policy import PAGE_TOKENS
from moebatch.spec.workload import Length, Workload

_GROWN = 0.5
_FEW_PAGES = 8
"""Contexts may grow by that part of them, or by so many pages, in passes that are counted together:
as they grow, another lane may become the one that is waited for, of which their mean says nothing.
"""


def job_passes(workload: Workload, caps: Caps, num_sequences: int) -> Iterator[CountedLoad]:
    """Loads of all passes of `num_sequences` sequences, those in which nothing begins or ends
    counted together."""
    tokens_for_one = PAGE_TOKENS // caps.page_tokens
    order = admission_order(
        workload.sample, num_sequences, is_static=caps.is_static, tokens_for_one=tokens_for_one
    )
    return iter(Replay(order, caps))


@lru_cache(maxsize=4)  # many policies are replayed with the same sequences
def admission_order(
    sample: tuple[Length, ...], count: int, *, is_static: bool, tokens_for_one: int = 1
) -> Ints:
    """So many lengths in the order of their admission, rows of prompt, new and shared tokens: all
    of the sample again and again, or some of it, evenly taken. Nobody writes them.

    Where one token stands for several, as many are looked ahead as of sequences that have all.
    """
    if len(sample) == 1:
        return np.tile(np.array(sample, dtype=np.int64), (count, 1))
    if count >= len(sample):
        lengths = list(islice(cycle(sample), count))
    else:
        lengths = [sample[index * len(sample) // count] for index in range(count)]
    if not is_static:
        lengths = list(longest_first(lengths, lambda length: _whole(length, tokens_for_one)))
    return np.array(lengths, dtype=np.int64)


def _whole(length: Length, tokens_for_one: int) -> Length:
    return length._replace(prompt_tokens=tokens_for_one * length.prompt_tokens)


def load_of(
    tokens: Ints,
    cached: Ints,
    *,
    num_decoding: int,
    num_positions: int,
    num_ending: int,
    prompt_rows: int = PROMPT_ROWS,
    encodes: bool = False,
) -> PassLoad:
    """What a pass has to do.

    Args:
        tokens: of each slice of a prompt.
        cached: positions before each of these slices.
        num_decoding: sequences that decode.
        num_positions: those that they attend to, themselves included, all together.
        num_ending: so many of them are the last ones of their prompts.
        prompt_rows: tokens of a slice that attend at once.
        encodes: they are whole prompts, whose tokens see each other.
    """
    if encodes:
        return PassLoad(
            decode_sequences=float(num_decoding),
            decode_positions=float(num_positions),
            prompt_tokens=float(tokens.sum()),
            prompt_pairs=float((tokens**2).sum()),
            prompt_slices=float(len(tokens)),
            logits_rows=float(num_decoding),
        )
    prompt_tokens = float(tokens.sum())
    if prompt_tokens <= prompt_rows:  # so no slice has more
        context = float(cached.sum())
    else:
        pieces = -(-tokens // prompt_rows)
        context = int(pieces @ (2 * cached + prompt_rows * (pieces - 1))) / 2
    return PassLoad(
        decode_sequences=float(num_decoding),
        decode_positions=float(num_positions),
        prompt_tokens=prompt_tokens,
        prompt_pairs=int(tokens @ (2 * cached + tokens + 1)) / 2,
        prompt_context=context,
        prompt_slices=float(len(tokens)),
        resumed_slices=float(np.count_nonzero(cached)),
        logits_rows=float(num_decoding + num_ending),
    )


def load_of_slices(
    slices: Iterable[tuple[int, int, bool]], *, num_ending: int, encodes: bool
) -> PassLoad:
    """The same of slices, each as its tokens, those of its sequence that are cached afterwards, and
    whether it is of an answer."""
    num_decoding, num_positions, prompts = 0, 0, list[tuple[int, int]]()
    for num_tokens, num_afterwards, is_answer in slices:
        before = num_afterwards - num_tokens
        if is_answer:
            num_decoding += num_tokens
            num_positions += sum(range(before + 1, num_afterwards + 1))
        else:
            prompts.append((num_tokens, before))
    tokens, cached = np.array(prompts, np.int64).reshape(-1, 2).T
    return load_of(
        tokens,
        cached,
        num_decoding=num_decoding,
        num_positions=num_positions,
        num_ending=num_ending,
        encodes=encodes,
    )


class Replay:
    """A job that goes on pass by pass: sequences in work, and those that wait."""

    def __init__(self, lengths: Ints, caps: Caps, in_work_FS: Ints | None = None) -> None:
        """`lengths` are those of `admission_order`; `in_work_FS` are the `fields_of` sequences in
        work."""
        prompts, new, shared = lengths.reshape(-1, 3).T
        if caps.encodes:
            prompts, new = np.maximum(prompts - 1, 1), new + 1
        self._waiting_FN = np.stack([prompts - shared, shared, shared, new])
        self._caps = caps
        self._admission = Admission(caps, in_work_FS)

    def __iter__(self) -> Iterator[CountedLoad]:
        """All passes until every sequence has ended."""
        while (load := self._next_pass()) is not None:
            yield load

    def _next_pass(self) -> CountedLoad | None:
        """Takes everything one pass further, or several if they are alike; None when all is
        done."""
        admission = self._admission
        while admission.lacks_pages:
            self._waiting_FN = np.concatenate([admission.send_back(), self._waiting_FN], axis=1)
        if admission.takes_more:
            self._waiting_FN = self._waiting_FN[:, admission.take_in(self._waiting_FN) :]
        if not len(admission):
            return None
        if admission.num_decoding == len(admission):
            return self._decode_until_one_ends()
        slices_S = admission.slices()
        load = _load(admission, slices_S, self._caps)
        admission.advance(slices_S)
        return 1, load

    def _decode_until_one_ends(self) -> CountedLoad:
        """Or is sent back, or until a waiting one can be taken in, or contexts have grown."""
        admission = self._admission
        sequences, cached = len(admission), int(admission.cached_S.sum())
        grown = max(_FEW_PAGES * self._caps.page_tokens, int(_GROWN * cached / sequences))
        count = min(admission.passes_alike(self._waiting_FN), grown)
        load = PassLoad(
            decode_sequences=float(sequences),
            decode_positions=float(cached + sequences * (count + 1) / 2),
            logits_rows=float(sequences),
            spare_pages=0.0 if self._waiting_FN.shape[1] else float(admission.spare_pages),
        )
        admission.advance(np.ones(sequences, np.int64), count)
        return count, load


def _load(admission: Admission, slices_S: Ints, caps: Caps) -> PassLoad:
    decodes_S, pending_S, cached_S = admission.decodes_S, admission.pending_S, admission.cached_S
    sliced = (slices_S > decodes_S).nonzero()[0]
    tokens = slices_S[sliced]
    return load_of(
        tokens,
        cached_S[sliced],
        num_decoding=admission.num_decoding,
        num_positions=int(cached_S @ decodes_S) + admission.num_decoding,
        num_ending=int(np.count_nonzero(pending_S[sliced] == tokens)),
        prompt_rows=caps.prompt_rows,
        encodes=caps.encodes,
    )
