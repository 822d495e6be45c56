"""`kill -9` at random instants; python -m tests.reliability.kill does it 200 times, and SIGTERM."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.kill import LONGEST, kill_again_and_again
from tests.tiny import CACHED_APART


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CACHED_APART)
@pytest.mark.parametrize("kills", [1, 3])
def test_a_job_that_is_killed_ends_with_the_same_bytes(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], kills: int, family: str
) -> None:
    outcome = kill_again_and_again(
        tmp_path,
        tiny_checkpoint(family, max_position_embeddings=LONGEST),
        kills=kills,
        number=signal.SIGKILL,
        num_rows=40,
        is_sampled=True,
    )
    assert outcome.num_kills >= kills
