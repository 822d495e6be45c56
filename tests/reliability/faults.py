"""Every operation on files of a small job goes wrong once, in every way; a second run mends it.

python -m tests.reliability.faults [--every 1] [--way fails]
"""

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moebatch.errors import MoebatchError
from moebatch.job.options import RunOptions
from moebatch.job.run import JobRun
from moebatch.spec.job import load_job
from tests.reliability.faulty_os import WAYS, FaultyOs, Way
from tests.tiny import write_checkpoint

_ROWS = 6
_NO_FAULT = -1


def sweep(
    folder: Path, model: Path, way: Way, *, every: int = 1, first: int = 1
) -> Counter[tuple[str, str]]:
    """How many runs ended how, by the operation that went wrong. Raises AssertionError as soon as
    an output is wrong, or something other than a message reaches the user."""
    expected = _answers(write_job(folder / "whole", model))
    counting = FaultyOs([folder / "count", model], _NO_FAULT, way)
    assert _run(write_job(folder / "count", model), counting) is None
    ends: Counter[tuple[str, str]] = Counter()
    for fails_at in range(first, counting.num_operations + 1, every):
        job = write_job(folder / "faulty", model)
        faulty = FaultyOs([job.parent, model], fails_at, way)
        error = _run(job, faulty)
        output = job.parent / "out.jsonl"
        if error is None or output.exists():
            assert output.read_bytes() == expected, f"{fails_at}, {faulty.name}: wrong rows"
        assert _answers(job) == expected, f"{fails_at}, {faulty.name}: wrong rows in the end"
        end = "finished" if error is None else type(error).__name__
        ends[faulty.name or "not reached", end] += 1
        shutil.rmtree(job.parent)
    return ends


def write_job(folder: Path, model: Path) -> Path:
    """A job of a few rows."""
    folder.mkdir(parents=True)
    with (folder / "in.jsonl").open("w") as file:
        for number in range(_ROWS):
            row = {"custom_id": f"row-{number}", "prompt": [3 + number] * 5, "max_tokens": 3}
            file.write(json.dumps(row) + "\n")
    job = {
        "model": {"path": str(model), "dtype": "float32"},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"temperature": 0, "ignore_eos": True},
        "resources": {"dram": "8GiB", "threads": 1, "hardware": "generic-cpu"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def _run(job: Path, system: FaultyOs) -> MoebatchError | None:
    """What the run ended with."""
    with system.in_force():
        return _ended(job)


def _ended(job: Path) -> MoebatchError | None:
    try:
        JobRun(load_job(job), lambda line: None, RunOptions(is_plain=True)).execute()
    except MoebatchError as error:
        return error
    return None


def _answers(job: Path) -> bytes:
    error = _ended(job)
    assert error is None, f"an undisturbed run fails: {error}"
    return (job.parent / "out.jsonl").read_bytes()


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moebatch-faults-") as name:
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.faults", description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, action="append")
    asked = parser.parse_args()
    for way in asked.way or WAYS:
        start = time.monotonic()
        with _folder() as folder:
            model = write_checkpoint(folder / "model", "mixtral", num_hidden_layers=1)
            ends = sweep(folder, model, way, every=asked.every)
        print(f"{way}: {ends.total()} operations in {time.monotonic() - start:.0f} s")
        for (name, end), count in sorted(ends.items()):
            print(f"    {name}: {end} {count}")


if __name__ == "__main__":
    main()
