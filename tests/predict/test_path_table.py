"""What the correlation table counts: a pencil example, and how it grows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from moebatch.errors import ConfigError
from moebatch.predict.path_table import PathTable, path_codes

PENCIL_LTK = np.array(
    [
        [[0, 1], [0, 1], [0, 2], [2, 1]],
        [[0, 2], [2, 0], [1, 2], [0, 1]],
    ]
)
"""Two layers, four tokens, two of three experts each."""


def pencil_table(path_length: int = 1) -> PathTable:
    table = PathTable.empty((0, 1), num_experts=3, experts_per_token=2, path_length=path_length)
    table.add_pass(PENCIL_LTK)
    return table


def random_pass(seed: int, *, layers: int, tokens: int, experts: int, k: int) -> NDArray[np.intp]:
    scores = np.random.default_rng(seed).random((layers, tokens, experts))
    return np.argsort(scores, axis=-1)[..., :k]


def test_a_token_counts_every_pair_of_its_experts() -> None:
    marginal, pairs = pencil_table().counts
    assert marginal[:, 0].tolist() == [[3, 3, 2], [3, 2, 3]]
    assert pairs[1].tolist() == [[2, 1, 3], [3, 1, 2], [1, 2, 1]]


def test_the_first_layer_has_no_pairs() -> None:
    assert not pencil_table().counts[1][0].any()


def test_longer_paths_need_more_layers_before_them() -> None:
    table = PathTable.empty((3, 5, 8), num_experts=2, experts_per_token=1, path_length=2)
    table.add_pass(np.array([[[1], [0]], [[0], [1]], [[1], [1]]]))
    assert not table.counts[2][:2].any()
    # Paths in base 2, the oldest expert first: (1, 0) is 2, (0, 1) is 1.
    assert table.counts[2][2].tolist() == [[0, 0], [0, 1], [0, 1], [0, 0]]


def test_shorter_paths_are_counted_the_same_beside_longer_ones() -> None:
    experts_LTK = random_pass(2, layers=4, tokens=50, experts=5, k=2)
    tables = [
        PathTable.empty(range(4), num_experts=5, experts_per_token=2, path_length=length)
        for length in (1, 3)
    ]
    for table in tables:
        table.add_pass(experts_LTK)
    for one, other in zip(tables[0].counts, tables[1].counts, strict=False):
        assert np.array_equal(one, other)


def test_all_paths_of_a_token_have_codes() -> None:
    before = [np.array([[1, 2]]), np.array([[0, 4]])]
    assert path_codes(before, 5, 1).tolist() == [[5, 9, 10, 14]]
    assert path_codes([], 5, 2).tolist() == [[0], [0]]


def test_a_pass_in_parts_counts_as_one() -> None:
    experts_LTK = random_pass(1, layers=3, tokens=3000, experts=6, k=2)
    whole, parts = (
        PathTable.empty(range(3), num_experts=6, experts_per_token=2, path_length=2)
        for _ in range(2)
    )
    whole.add_pass(experts_LTK)
    for some in np.split(experts_LTK, [1, 700, 2999], axis=1):
        parts.add_pass(some)
    for one, other in zip(whole.counts, parts.counts, strict=True):
        assert np.array_equal(one, other)
    assert [int(counts[2].sum()) for counts in whole.counts] == [6000, 12000, 24000]


def test_a_table_that_would_be_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match=r"--path-length: paths through 2 layers of 128 experts"):
        PathTable.empty(range(48), num_experts=128, experts_per_token=8, path_length=2)
