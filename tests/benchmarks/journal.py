"""What the journal costs: a record while a job runs, and the start of a job that is nearly done.

python -m tests.benchmarks.journal [--rows 1000000]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.approximation import EXACT
from moebatch.folder.claim import FirstRun, claim
from moebatch.folder.row_key import RowKeys, name_hash
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import ALL
from moebatch.job.identity import manifest_of
from moebatch.journal.record import Record
from moebatch.journal.writer import JournalWriter
from moebatch.rows.source import open_source
from moebatch.spec.job import load_job
from moebatch.units import format_bytes
from tests.tiny import write_checkpoint

_TEXT = "words of an answer " * 12
_ROWS_PER_S = 1000
"""A rate at which rows might end, far above what any disk lets a large model do."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.journal", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moebatch-journal-") as name:
        folder = Path(name)
        job = _write_job(folder, asked.rows)
        record_s = _fill(job, asked.rows - 1)
        print(
            f"{asked.rows - 1} records: {record_s * 1e6:.1f} us each, "
            f"{record_s * _ROWS_PER_S:.2%} of the time at {_ROWS_PER_S} rows a second"
        )
        start_s, peak_bytes = _start(job)
        print(
            f"resumed with all of {asked.rows} rows done but one: first pass planned after "
            f"{start_s:.1f} s, {format_bytes(peak_bytes)} at most"
        )


def _write_job(folder: Path, num_rows: int) -> Path:
    model = write_checkpoint(folder / "model")
    with (folder / "in.jsonl").open("w") as file:
        for number in range(num_rows):
            row = {"custom_id": f"row-{number}", "prompt": f"number {number}", "max_tokens": 4}
            file.write(json.dumps(row) + "\n")
    job = {
        "model": {"path": str(model)},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"temperature": 0},
        "resources": {"dram": "2GiB", "threads": 1, "hardware": "generic-cpu"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def _fill(path: Path, count: int) -> float:
    """Writes records of all rows but the last; returns seconds that one of them takes."""
    job = load_job(path)
    manifest = manifest_of(job, open_model(job.model.path, "auto"), EXACT)
    claim(manifest, RunFolder(job.output.path), open_source(job.input.path), FirstRun.today(ALL))
    total_s = 0.0
    with JournalWriter(job.output.path.with_name("out.jsonl.moebatch") / "journal") as journal:
        for number, record in _records(job.input.path, manifest.row_keys):
            if number == count:
                break
            start = time.perf_counter()
            journal.add(record)
            total_s += time.perf_counter() - start
    return total_s / count


def _records(path: Path, keys: RowKeys) -> Iterator[tuple[int, Record]]:
    for raw in open_source(path):
        custom_id = f"row-{raw.index}"
        line = json.dumps({"custom_id": custom_id, "response": {"text": _TEXT}}).encode()
        yield raw.index, Record(keys.all_of(raw).own, name_hash(custom_id), "done", line)


def _start(job: Path) -> tuple[float, int]:
    """Seconds until the plan is there, and the most memory until then."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "moebatch", "run", str(job)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("expected"):
            break
    seconds, peak = time.perf_counter() - begun, _peak_bytes(process.pid)
    process.stderr.read()
    if process.wait() != 0:
        raise SystemExit(f"the run ended with {process.returncode}")
    return seconds, peak


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no peak")


if __name__ == "__main__":
    main()
