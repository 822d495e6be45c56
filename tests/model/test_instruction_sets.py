"""The tests of the model's arithmetic hold on every instruction set that this processor has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebatch.model.native import instruction_set, loader
from moebatch.model.native.instruction_set import INSTRUCTION_SETS

FOLDER = Path(__file__).parent
LOWER = INSTRUCTION_SETS[INSTRUCTION_SETS.index(instruction_set.highest()) + 1 :]
FILES = (
    "test_oracle.py",
    "test_native_attention.py",
    "test_native_slices.py",
    "test_native_elementwise.py",
    "test_steps.py",
    "test_independence.py",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOWER)
def test_what_holds_on_the_best_set_holds_on_lower_ones(name: str) -> None:
    """Against transformers first; a process of its own, since a set is chosen once."""
    if loader.kernels() is None:
        pytest.skip(f"no kernels: {loader.prepare()}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(FOLDER / f for f in FILES)],
        cwd=FOLDER.parents[1],
        env={**os.environ, instruction_set.VARIABLE: name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
