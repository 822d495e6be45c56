"""`make test` has every value of a matrix, `make test-all` every case."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.few import few

VALUES = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)


@given(names=VALUES, families=VALUES, policies=VALUES)
def test_every_value_is_there_and_no_case_that_brings_none(
    names: list[int], families: list[int], policies: list[int]
) -> None:
    cases = [
        {"name": name, "family": family, "policy": policy}
        for name, family, policy in product(names, families, policies)
    ]
    kept = few(cases, {})
    for parameter, values in (("name", names), ("family", families), ("policy", policies)):
        assert {cases[number][parameter] for number in kept} == set(values)
    assert len(kept) == max(map(len, (names, families, policies)))


def test_values_take_turns_in_meeting_each_other() -> None:
    cases = [{"name": name, "family": family} for name in range(6) for family in range(3)]
    families = [cases[number]["family"] for number in few(cases, {})]
    assert sorted(families) == [0, 0, 1, 1, 2, 2]


def test_of_a_parameter_it_may_be_said_which_values_have_to_be_there() -> None:
    cases = [{"name": name, "family": family} for name in "abcdef" for family in (1, 2)]
    kept = [cases[number] for number in sorted(few(cases, {"name": ("b", "e")}))]
    assert {case["name"] for case in kept} == {"b", "e"}
    assert {case["family"] for case in kept} == {1, 2}


@given(names=VALUES, families=VALUES, most=st.integers(1, 4))
def test_no_more_than_so_many_are_kept_if_that_is_asked_for(
    names: list[int], families: list[int], most: int
) -> None:
    cases = [{"name": name, "family": family} for name, family in product(names, families)]
    kept = few(cases, {}, most)
    assert len(kept) == min(most, len(few(cases, {})))


def test_a_matrix_with_holes_is_covered_all_the_same() -> None:
    cases = [{"name": "a", "family": 1}, {"name": "a", "family": 2}, {"name": "b", "family": 1}]
    assert few(cases, {}) >= {1, 2}


@pytest.mark.few
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("letter", "ab")
def test_the_others_are_marked(request: pytest.FixtureRequest, number: int, letter: str) -> None:
    """Of six cases three are run by `make test`: those on a diagonal, and one more."""
    is_marked = request.node.get_closest_marker("exhaustive") is not None
    assert is_marked == ((number, letter) not in {(0, "a"), (1, "b"), (2, "a")})
