"""Steady decoding and prompts that ride on it, on a checkpoint that streams from disk.

    python -m tests.benchmarks.decode [--model FOLDER] [--sequences 512,1024] [--ride 1024]

Prints seconds per pass and tokens per second of passes in which everybody decodes, and how much
longer passes are that compute so many prompt tokens beside the first number of sequences. Both
kinds take turns in one run, so what disturbs one disturbs the other. Runs in a process of its own
for each number of sequences, under a memory cap.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from moebatch.units import format_bytes, format_rate, parse_bytes
from tests.benchmarks.decode.passes import Pass, steady
from tests.benchmarks.jobs.checkpoint import checkpoint, weight_files
from tests.benchmarks.jobs.machine import commit, machine_in_words, today
from tests.benchmarks.jobs.memory_cap import memory_cap
from tests.benchmarks.jobs.options import default_folder
from tests.benchmarks.jobs.probe import between, probe
from tests.benchmarks.jobs.setting import Setting

_PROBE_S = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.decode", description=__doc__)
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--model", type=Path, help="default: the checkpoint of the jobs")
    parser.add_argument("--sequences", default="512,1024")
    parser.add_argument("--ride", type=int, default=1024, help="prompt tokens, with the first one")
    parser.add_argument("--passes", type=int, default=8, help="of each kind")
    parser.add_argument("--cap", default="3GiB")
    parser.add_argument("--dram", default="2.8GiB")
    options = parser.parse_args()
    setting = Setting(
        folder=options.folder.expanduser().absolute(),
        checkpoint=options.model or checkpoint(options.folder.expanduser()),
        cap_bytes=parse_bytes(options.cap),
        dram_bytes=parse_bytes(options.dram),
    )
    if not setting.profile.is_file():
        setting.measure_machine()
    with memory_cap(setting.cap_bytes) as cap:
        print(f"{machine_in_words()}; {cap.in_words}; commit {commit()}, {today()}", flush=True)
    ride, files = options.ride, weight_files(setting.checkpoint)
    for sequences in map(int, options.sequences.split(",")):
        before = probe(files, read_s=_PROBE_S)
        found = in_own_process(setting, sequences, ride, options.passes)
        disk_rate = between(before, probe(files, read_s=_PROBE_S)).disk_rate
        passes = [Pass(**one) for one in found["passes"]]
        print("\n".join(report(passes, sequences, ride, disk_rate)))
        print(
            f"    while it ran: disk {format_rate(found['disk_rate'])}, busy "
            f"{found['disk_share']:.0%}; peak {format_bytes(found['peak_bytes'])}; "
            f"policy: {found['policy']}",
            flush=True,
        )
        ride = 0


def report(passes: Sequence[Pass], sequences: int, ride: int, disk_rate: float) -> list[str]:
    """Passes alone, and those with riders. `disk_rate` is what was probed beside the run."""
    alone = steady(passes, sequences)
    if not alone:
        return [f"{sequences} sequences: no pass was steady"]
    alone_s = median(one.seconds for one in alone)
    lines = [
        f"{sequences} sequences: {alone_s:.2f} s a pass, {sequences / alone_s:.0f} tok/s "
        f"(median of {len(alone)} passes, {min(p.seconds for p in alone):.2f} to "
        f"{max(p.seconds for p in alone):.2f} s) where the disk gives {format_rate(disk_rate)}"
    ]
    riding = steady(passes, sequences, ride) if ride else []
    if riding:
        ride_s = median(one.seconds for one in riding)
        lines.append(
            f"    with {ride} prompt tokens beside them: {ride_s:.2f} s a pass, "
            f"{ride_s / alone_s - 1:+.1%} (median of {len(riding)} passes, taking turns)"
        )
    return lines


def in_own_process(setting: Setting, sequences: int, ride: int, num_passes: int) -> dict[str, Any]:
    """Figures of one run under the cap."""
    command = [sys.executable, "-m", "tests.benchmarks.decode.measured"]
    command += [str(setting.checkpoint), str(setting.profile), "--sequences", str(sequences)]
    command += ["--ride", str(ride), "--passes", str(num_passes)]
    command += ["--dram-bytes", str(setting.dram_bytes)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with memory_cap(setting.cap_bytes) as cap:
        done = subprocess.run(
            cap.wrapped(command), stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
