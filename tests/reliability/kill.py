"""A job that is killed again and again, at any instant, ends with the bytes of one that was not.

python -m tests.reliability.kill --kills 200 [--signal KILL|TERM] [--sampled] [--rows 300]
                                 [--family gpt_oss]
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tiny import FAMILIES, write_checkpoint

_WORDS = ["river", "lamp", "stone", "counts", "under", "seven", "light", "of", "the", "and"]
_HEADERS = [" ".join(_WORDS), " ".join(reversed(_WORDS)), ""]
"""Beginnings of prompts: pages of the cache that rows share where all tokens are kept."""
_LONG = 16
"""Each so manieth row is longer than what the cache holds of a window."""
LONGEST = 2048
_FINISHED, _STOPPED = 0, 75
_POLICY = """\
title: many small passes, so that most kills find the job running
policy:
  batch_size: 8
  micro_batch_size: 4
  tokens_per_pass: 64
  num_slots: 4
  weights: {dram: 0.3, disk: 0.7}
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it."""

    num_kills: int
    num_runs: int
    num_jobs: int
    """Jobs that were begun: each is killed until it ends all the same."""
    phases: dict[str, int]
    """Kills by what had been said last."""


def write_job(folder: Path, model: Path, *, num_rows: int, is_sampled: bool) -> Path:
    """A job whose rows are of all lengths, most of which begin as others do."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(3)
    with (folder / "in.jsonl").open("w") as file:
        for number in range(num_rows):
            num_words = noise.randint(1, 40) if number % _LONG else 250
            words = " ".join(noise.choices(_WORDS, k=num_words))
            row = {
                "custom_id": f"row-{number}",
                "prompt": noise.choice(_HEADERS) + words,
                "max_tokens": noise.randint(1, 60),
            }
            file.write(json.dumps(row) + "\n")
    job = {
        "model": {"path": str(model), "dtype": "float32"},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"temperature": 0.8 if is_sampled else 0, "ignore_eos": True},
        "resources": {"dram": "1GiB", "threads": 1, "hardware": "generic-cpu"},
    }
    (folder / "policy.yaml").write_text(_POLICY)
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def kill_again_and_again(
    folder: Path, model: Path, *, kills: int, number: int, num_rows: int, is_sampled: bool
) -> Outcome:
    """Raises AssertionError as soon as anything is lost, double or different."""
    undisturbed = write_job(folder / "whole", model, num_rows=num_rows, is_sampled=is_sampled)
    took_s = _timed(undisturbed)
    expected = (folder / "whole/out.jsonl").read_bytes()
    assert expected.count(b"\n") == num_rows, "the undisturbed run lacks rows"
    noise = random.Random(7)
    num_kills = num_runs = num_jobs = 0
    phases: dict[str, int] = {}
    while num_kills < kills:
        num_jobs += 1
        job = write_job(folder / f"cut-{num_jobs}", model, num_rows=num_rows, is_sampled=is_sampled)
        while True:
            num_runs += 1
            allowed_s = noise.uniform(0, took_s * 1.2) if num_kills < kills else 600.0
            code, said = _run_for(job, allowed_s, number)
            if code == _FINISHED:
                break
            assert code in (-number, _STOPPED), f"exit code {code}: {said}"
            output = job.parent / "out.jsonl"
            whole = not output.exists() or output.read_bytes() == expected
            assert whole, "an output before the end"
            num_kills += 1
            phases[said] = phases.get(said, 0) + 1
        assert (job.parent / "out.jsonl").read_bytes() == expected, f"{job} differs"
    return Outcome(num_kills=num_kills, num_runs=num_runs, num_jobs=num_jobs, phases=phases)


def _timed(job: Path) -> float:
    start = time.monotonic()
    code, said = _run_for(job, 600.0, signal.SIGKILL)
    assert code == _FINISHED, said
    return time.monotonic() - start


def _run_for(job: Path, seconds: float, number: int) -> tuple[int, str]:
    """Exit code of a run that is given so long, and the first word of what it said last."""
    log = job.parent / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "moebatch", "run", str(job)),
                *("--policy", str(job.with_name("policy.yaml"))),
            ],
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if process.poll() is None:
            process.send_signal(number)
        code = process.wait(600)
    lines = [line.split(":")[0] for line in log.read_text().splitlines() if ":" in line]
    return code, (lines or ["nothing yet"])[-1]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moebatch-kill-") as name:
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--family", choices=FAMILIES, default="mixtral")
    asked = parser.parse_args()
    start = time.monotonic()
    with _folder() as folder:
        outcome = kill_again_and_again(
            folder,
            write_checkpoint(folder / "model", asked.family, max_position_embeddings=LONGEST),
            kills=asked.kills,
            number=getattr(signal, f"SIG{asked.signal}"),
            num_rows=asked.rows,
            is_sampled=asked.sampled,
        )
    print(f"{outcome} in {time.monotonic() - start:.0f} s: every output is the same")


if __name__ == "__main__":
    main()
