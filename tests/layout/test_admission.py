"""The order in which waiting sequences are taken in."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from moebatch.layout.admission import AHEAD_TOKENS, longest_first
from moebatch.spec.workload import Length

lengths = st.lists(
    st.builds(Length, st.integers(1, 400), st.integers(1, 9), st.just(0)), max_size=60
)


def of(length: Length) -> Length:
    return length


@given(lengths)
def test_within_sight_long_answers_go_first_and_equal_ones_keep_their_order(
    work: list[Length],
) -> None:
    assert list(longest_first(work, of)) == sorted(work, key=lambda length: -length.new_tokens)


@given(lengths)
def test_a_long_file_is_read_only_so_far_ahead(work: list[Length]) -> None:
    scale, held = AHEAD_TOKENS // 200, 0

    def read() -> Iterator[Length]:
        nonlocal held
        for prompt, new, _ in work:
            assert held <= AHEAD_TOKENS, "no more is read before that much is handed out"
            held += prompt * scale
            yield Length(prompt * scale, new)

    taken = []
    for prompt, new, _ in longest_first(read(), of):
        held -= prompt
        taken.append(Length(prompt // scale, new))
    assert sorted(taken) == sorted(work)
