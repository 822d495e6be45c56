"""Micro-batches have the same work, and nothing comes before what it continues."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from moebatch.engine.batcher import Slice
from moebatch.engine.passes.layout import balanced, lay_out, micro_batches
from moebatch.engine.sequence import Sequence
from moebatch.engine.text import AnswerText
from moebatch.layout.scratch import PROMPT_ROWS
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from tests.engine.test_engine import TokenText


def piece(num_tokens: int, context: int) -> Slice:
    sampling = Sampling()
    request = Request(
        index=0, custom_id="x", prompt_tokens=(1,) * (num_tokens + context), sampling=sampling
    )
    sequence = Sequence(request, 0, AnswerText(TokenText(), sampling))
    sequence.num_cached = context
    return Slice(sequence, num_tokens)


slices = st.lists(st.builds(piece, st.sampled_from((1, 1, 2, 60, 700)), st.integers(0, 900)))


@given(slices, st.integers(1, 9))
def test_everything_is_in_one_micro_batch_of_its_kind(work: list[Slice], size: int) -> None:
    groups = micro_batches(work, size)
    assert sorted(map(id, chain.from_iterable(groups))) == sorted(map(id, work))
    for group in groups:
        assert 0 < len(group) <= size
        assert len({one.num_tokens == 1 for one in group}) == 1
        if len(group) > 1:
            assert sum(one.num_tokens for one in group) <= max(PROMPT_ROWS, size)
    prompts = [one for group in groups for one in group if one.num_tokens > 1]
    assert list(map(id, prompts)) == [id(one) for one in work if one.num_tokens > 1]


@given(st.lists(st.integers(0, 900), min_size=1, max_size=60), st.integers(1, 20))
def test_no_two_micro_batches_differ_by_more_than_one_sequence(
    contexts: list[int], size: int
) -> None:
    groups = balanced([piece(1, context) for context in contexts], size)
    assert len(groups) == -(-len(contexts) // size)
    if len(contexts) % size == 0 or size == 1:
        return  # some are full, and the others have to take what is left
    sums = [sum(one.context for one in group) for group in groups if len(group) < size]
    if len(sums) == len(groups):
        assert max(sums) - min(sums) <= max(contexts) + 1


def test_long_and_short_sequences_are_mixed() -> None:
    groups = balanced([piece(1, context) for context in (99, 89, 9, 19)], 2)
    assert [sorted(one.context - 1 for one in group) for group in groups] == [[9, 99], [19, 89]]


def test_short_prompts_are_together_up_to_what_is_attended_at_once() -> None:
    half = PROMPT_ROWS // 2
    groups = micro_batches([piece(half, 0), piece(PROMPT_ROWS - half, 0), piece(2, 0)], 9)
    assert [len(group) for group in groups] == [2, 1]
    assert [len(group) for group in micro_batches([piece(2, 0)] * 3, 2)] == [2, 1]


def test_pieces_of_a_long_prompt_are_said_to_go_on_with_it() -> None:
    """So that each finds in the cache what those before it have written."""
    work = [piece(1, 30), piece(2 * PROMPT_ROWS + 1, 0), piece(5, 0)]
    layout = lay_out(work, 4, decode_place="dram", prompt_place="dram")
    sweep = layout.sweep("dram")
    assert (sweep.num_micro_batches, sweep.continuing) == (5, {2, 3})
    starts = [part.num_before for group in layout.groups for part in group.parts]
    assert starts == [30, 0, PROMPT_ROWS, 2 * PROMPT_ROWS, 0]
