"""Steady decoding and prompts that ride on it, on a checkpoint that streams from disk.

    python -m tests.benchmarks.decode [--model FOLDER] [--sequences 512,1024] [--ride 1024]

Prints seconds per pass and tokens per second of passes in which everybody decodes, and how much
longer passes are that compute so many prompt tokens beside the smallest number of sequences. Both
kinds take turns in one run, so what disturbs one disturbs the other. Runs in a process of its own
for each number of sequences, under a memory cap.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from moebatch.units import format_bytes, format_rate, parse_bytes
from tests.benchmarks.jobs.checkpoint import checkpoint
from tests.benchmarks.jobs.machine import commit, machine_in_words, today
from tests.benchmarks.jobs.memory_cap import memory_cap
from tests.benchmarks.jobs.options import default_folder
from tests.benchmarks.jobs.setting import Setting

PROMPT_TOKENS = 32
RIDER_TOKENS = 128
FILLING_TOKENS = 2048
"""Tokens of a pass while prompts come in; more would take memory that decoding can use."""
_STEADY_AFTER = 2
"""Passes that are left out after the last prompt came in."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a run."""

    decoding: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run."""

    passes: list[Pass]
    disk_rate: float
    """Bytes per second while the disk was busy."""
    disk_share: float
    peak_bytes: int
    policy: str


class NoText:
    """Tokens need no text here."""

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


def measured(setting: Setting, sequences: int, ride: int, num_passes: int) -> Measured:
    """Decodes with so many sequences, and if `ride` is not 0, with so many prompt tokens beside
    them in every second pass."""
    import torch

    from moebatch.engine.build import build_engine
    from moebatch.engine.model_files import open_model
    from moebatch.engine.order import Order
    from moebatch.job.planning import plan_job
    from moebatch.plan.machine import detect_machine
    from moebatch.plan.problem import Problem
    from moebatch.spec.policy import pages_of
    from moebatch.spec.profile import load_profile
    from moebatch.spec.workload import Workload
    from moebatch.store.memory import peak_resident_bytes, resident_bytes

    torch.set_num_threads(detect_machine().num_cores)
    files = open_model(setting.checkpoint, "auto")
    riders = ride // RIDER_TOKENS
    tokens_per_pass = together(sequences, ride, max(FILLING_TOKENS, sequences) + ride + riders)
    filling = len(filling_left(sequences, tokens_per_pass))
    answer = filling + _STEADY_AFTER + (2 if ride else 1) * num_passes + 1
    max_tokens = max(PROMPT_TOKENS + answer, RIDER_TOKENS + 2)
    workload = Workload(
        num_sequences=sequences,
        mean_prompt_tokens=PROMPT_TOKENS,
        mean_new_tokens=answer,
        max_total_tokens=max_tokens,
    )
    hardware = load_profile(str(setting.profile)).hardware().without("vram")
    problem = Problem(
        shape=files.shape,
        dtypes=files.dtypes,
        hardware=hardware,
        workload=workload,
        program_bytes={"dram": resident_bytes()},
        experts_on_cpu=False,
    ).with_capacity("dram", setting.dram_bytes)
    pages = sequences * pages_of(PROMPT_TOKENS + answer) + riders * pages_of(RIDER_TOKENS + 2)
    policy = replace(
        plan_job(problem).policy,
        batch_size=sequences + riders,
        tokens_per_pass=tokens_per_pass,
        num_kv_pages=pages,
    )
    policy = _with_most_experts(problem, policy)
    built = build_engine(
        Order(
            files=files,
            policy=policy,
            max_tokens=max_tokens,
            num_traced_passes=10**6,
        ),
        decoder=NoText(),
        end_tokens=frozenset(),
        job_seed=0,
    )
    assert built.recorder is not None and built.log is not None
    requests = _requests(files.shape.vocab_size, sequences, answer, riders * (answer // 2))
    built.recorder.begin()
    try:
        with torch.inference_mode():
            outcomes = list(built.engine.run(requests))
    finally:
        built.close()
    assert all(outcome.error is None for outcome in outcomes), "every sequence was computed"
    loads = [done.loads for done in built.log.passes]
    passes = [
        Pass(
            decoding=round(sum(load.decode_sequences for load in of_pass)),
            prompt_tokens=round(sum(load.prompt_tokens for load in of_pass)),
            seconds=seconds,
        )
        for of_pass, seconds in zip(loads, built.recorder.timeline.pass_s, strict=True)
    ]
    reads, total_s = built.experts.statistics, sum(done.seconds for done in passes)
    return Measured(
        passes=passes,
        disk_rate=reads.num_bytes / reads.busy.total_s if reads.num_bytes else 0.0,
        disk_share=reads.busy.total_s / total_s,
        peak_bytes=peak_resident_bytes(),
        policy=str(policy),
    )


def _with_most_experts(problem: Any, policy: Any) -> Any:
    """As many in memory as there is room for: the planner's choice also serves the filling."""
    from moebatch.plan.refusal import too_large
    from moebatch.spec.policy import Placement

    for count in range(problem.num_experts, -1, -1):
        share = count / problem.num_experts
        tried = replace(policy, weights=Placement(dram=share, disk=1 - share))
        if too_large(problem, tried) is None:
            return tried
    raise SystemExit("so many sequences do not fit into --dram")


def _requests(vocab_size: int, sequences: int, answer: int, riders: int) -> Iterator:  # type: ignore[type-arg]
    """Riders get two tokens: they come in one pass, end in the next, and others come after it."""
    from moebatch.spec.request import Request
    from moebatch.spec.sampling import Sampling

    noise = random.Random(1)
    for index in range(sequences + riders):
        stays = index < sequences
        length = PROMPT_TOKENS if stays else RIDER_TOKENS
        yield Request(
            index=index,
            custom_id=str(index),
            prompt_tokens=tuple(noise.randrange(5, vocab_size) for _ in range(length)),
            sampling=Sampling(temperature=0.0, max_tokens=answer if stays else 2, ignore_eos=True),
        )


def filling_left(sequences: int, tokens_per_pass: int) -> list[int]:
    """Tokens that the passes have room for while prompts come in, beside those of the sequences:
    0 but for the last one."""
    left: list[int] = []
    computed, prompts = 0, sequences * PROMPT_TOKENS
    while computed < prompts:
        budget = tokens_per_pass - computed // PROMPT_TOKENS
        left.append(max(0, computed + budget - prompts))
        computed = min(prompts, computed + budget)
    return left


def together(sequences: int, ride: int, tokens_per_pass: int) -> int:
    """At least so many tokens per pass, such that the first riders come in all at once: they then
    stay together."""
    while 0 < filling_left(sequences, tokens_per_pass)[-1] < ride:
        tokens_per_pass += PROMPT_TOKENS
    return tokens_per_pass


def steady(passes: Sequence[Pass], sequences: int, ride: int = 0) -> list[Pass]:
    """Passes in which that many decode, a few beside them included, and so many prompt tokens
    come in; the first ones after the filling are left out."""
    filled = next(i for i, one in enumerate(passes) if one.decoding >= sequences)
    return [
        one
        for one in passes[filled + _STEADY_AFTER :]
        if sequences <= one.decoding <= sequences * 1.05 and one.prompt_tokens == ride
    ]


def report(found: Measured, sequences: int, ride: int) -> str:
    """A line or two."""
    alone = steady(found.passes, sequences)
    alone_s = median(one.seconds for one in alone)
    disk = f"disk {format_rate(found.disk_rate)}, busy {found.disk_share:.0%}"
    lines = [
        f"{sequences} sequences: {alone_s:.2f} s a pass, {sequences / alone_s:.0f} tok/s "
        f"(median of {len(alone)} passes, {min(p.seconds for p in alone):.2f} to "
        f"{max(p.seconds for p in alone):.2f} s); {disk}; peak {format_bytes(found.peak_bytes)}"
    ]
    if ride:
        with_riders = steady(found.passes, sequences, ride)
        ride_s = median(one.seconds for one in with_riders)
        lines.append(
            f"    with {ride} prompt tokens beside them: {ride_s:.2f} s a pass, "
            f"{ride_s / alone_s - 1:+.1%} (median of {len(with_riders)} passes, taking turns)"
        )
    return "\n".join((*lines, f"    policy: {found.policy}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--model", type=Path, help="default: the checkpoint of the jobs")
    parser.add_argument("--sequences", default="512,1024")
    parser.add_argument("--ride", type=int, default=1024, help="prompt tokens, with the first one")
    parser.add_argument("--passes", type=int, default=8, help="of each kind")
    parser.add_argument("--cap", default="3GiB")
    parser.add_argument("--dram", default="2.5GiB")
    parser.add_argument("--inside", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = Setting(
        folder=options.folder.absolute(),
        checkpoint=options.model or checkpoint(options.folder / "checkpoint"),
        cap_bytes=parse_bytes(options.cap),
        dram_bytes=parse_bytes(options.dram),
    )
    if options.inside:
        found = measured(setting, options.inside, options.ride, options.passes)
        print(json.dumps(asdict(found)))
        return
    if not setting.profile.is_file():
        setting.measure_machine()
    with memory_cap(setting.cap_bytes) as cap:
        print(f"{machine_in_words()}; {cap.in_words}; commit {commit()}, {today()}", flush=True)
    ride = options.ride
    for sequences in map(int, options.sequences.split(",")):
        print(report(_in_own_process(setting, sequences, ride, options), sequences, ride))
        ride = 0


def _in_own_process(
    setting: Setting, sequences: int, ride: int, options: argparse.Namespace
) -> Measured:
    command = [sys.executable, "-m", "tests.benchmarks.decode", "--inside", str(sequences)]
    command += ["--folder", str(setting.folder), "--model", str(setting.checkpoint)]
    command += ["--ride", str(ride), "--passes", str(options.passes), "--dram", options.dram]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with memory_cap(setting.cap_bytes) as cap:
        done = subprocess.run(
            cap.wrapped(command), stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
    figures = json.loads(done.stdout.splitlines()[-1])
    passes = [Pass(**one) for one in figures.pop("passes")]
    return Measured(passes=passes, **figures)


if __name__ == "__main__":
    main()
