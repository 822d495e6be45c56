"""Some of what python -m tests.reliability.faults does: operations on files that go wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.faults import sweep
from tests.reliability.faulty_os import WAYS, Way


@pytest.mark.few(every=(68,))
@pytest.mark.parametrize("every", [17, 68])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_goes_wrong_a_second_run_mends_it(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], way: Way, every: int
) -> None:
    model = tiny_checkpoint("mixtral", num_hidden_layers=1)
    ends = sweep(tmp_path, model, way, every=every, first=1 + WAYS.index(way))
    assert ends, "nothing was counted"
    if way in ("is short", "is late"):
        assert {end for _, end in ends} == {"finished"}
