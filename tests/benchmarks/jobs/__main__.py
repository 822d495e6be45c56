"""Runs the jobs one by one and prints the tables.

python -m tests.benchmarks.jobs --help
"""

import json
import sys
from collections.abc import Iterator

from tests.benchmarks.jobs.bench import Bench
from tests.benchmarks.jobs.catalogue import full_jobs, scale_jobs, small_jobs
from tests.benchmarks.jobs.checkpoint import checkpoint
from tests.benchmarks.jobs.machine import command_in_words, commit, machine_in_words, today
from tests.benchmarks.jobs.memory_cap import memory_cap
from tests.benchmarks.jobs.options import Options, parse_options
from tests.benchmarks.jobs.peer import Accelerate, LlamaCpp, Peer
from tests.benchmarks.jobs.result import JobResult
from tests.benchmarks.jobs.run import RunFailed
from tests.benchmarks.jobs.setting import Setting
from tests.benchmarks.jobs.table import LEGEND, comparisons_table, jobs_table


def main() -> int:
    options = parse_options(tuple(full_jobs()), tuple(scale_jobs()))
    setting = Setting(
        folder=options.folder,
        checkpoint=checkpoint(options.folder, options.shape),
        cap_bytes=options.cap_bytes,
        dram_bytes=options.dram_bytes,
    )
    heading = list(_heading(options))
    _say("\n".join(heading))
    if not options.is_small or not setting.profile.is_file():
        _say("measuring this machine, about three minutes")
        setting.measure_machine()
    bench = Bench(setting, _peers(options, setting), options.probe_s, options.with_variants)
    jobs = {**(small_jobs() if options.is_small else full_jobs()), **scale_jobs()}
    results: list[JobResult] = []
    failed = False
    for name in options.only:
        try:
            results += bench.results(jobs[name], options.weights, _say)
        except RunFailed as error:
            failed = True
            _say(f"{name}: {error}")
        if options.json is not None:
            figures = {"heading": heading, "jobs": [result.as_json() for result in results]}
            options.json.write_text(json.dumps(figures, indent=2))
    print("\n".join(("", *heading, "", jobs_table(results), "", LEGEND)))
    if any(result.variants or result.peers for result in results):
        print(f"\n{comparisons_table(results)}")
    return 1 if failed else 0


def _heading(options: Options) -> Iterator[str]:
    yield f"`{command_in_words()}`, commit {commit()}, {today()}"
    with memory_cap(options.cap_bytes) as cap:
        how = cap.in_words
    yield f"{machine_in_words()}; {how}; `resources.dram: {options.dram_bytes / 2**30:.3g}GiB`"


def _peers(options: Options, setting: Setting) -> list[Peer]:
    peers: list[Peer] = []
    if options.accelerate_python is not None:
        peers.append(
            Accelerate(
                python=options.accelerate_python,
                longest_s=options.peer_s,
                memory=options.accelerate_memory,
            )
        )
    if options.llama_python is not None:
        trial_s = options.peer_s / 4
        peers.append(
            LlamaCpp(
                python=options.llama_python,
                longest_s=options.peer_s,
                trial_s=trial_s,
                sources=options.llama_sources,
            )
        )
    names = [peer.name for peer in peers]
    for name in ("accelerate", "llama.cpp"):
        if name not in names:
            _say(f"{name}: left out; its interpreter is not given, or no peers are wanted")
    return [peer for peer in peers if is_ready(peer, setting)]


def is_ready(peer: Peer, setting: Setting) -> bool:
    """Whether a peer has what it reads; a shape that it does not know is no reason to stop."""
    try:
        peer.prepare(setting)
    except RunFailed as failure:
        _say(f"{peer.name}: left out; {failure}")
        return False
    return True


def _say(line: str) -> None:
    """Progress goes to standard error: the tables are all that standard output has."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
