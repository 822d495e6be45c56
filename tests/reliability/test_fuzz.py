"""A short run of python -m tests.reliability.fuzz."""

from pathlib import Path

import pytest

from tests.reliability.fuzz import fuzz
from tests.reliability.fuzz_targets import TARGETS, Target


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_is_damaged_was_whole_before(target: Target, tmp_path: Path) -> None:
    assert target.hit(tmp_path, target.seeds[0])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_files_are_a_message_and_never_more(target: Target) -> None:
    fuzz(target, 150, seed=20)
