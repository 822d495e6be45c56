"""`kill -9` and SIGTERM at random instants; python -m tests.reliability.kill does it 200 times."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.kill import kill_again_and_again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_that_is_killed_ends_with_the_same_bytes(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], number: int
) -> None:
    is_sampled = number == signal.SIGKILL
    outcome = kill_again_and_again(
        tmp_path,
        tiny_checkpoint("mixtral"),
        kills=3,
        number=number,
        num_rows=120,
        is_sampled=is_sampled,
    )
    assert outcome.num_kills >= 3
