"""Decodes in this process and prints what the passes took, as JSON.

python -m tests.benchmarks.decode.measured MODEL PROFILE --sequences 512 --ride 1024 ...
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.spec import EngineSpec
from moebatch.job.planning import job_problem
from moebatch.measure.process_limits import detect_machine
from moebatch.plan.problem import Problem
from moebatch.spec.job import InputSection, Job, ModelSection, OutputSection, ResourcesSection
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.policy.policy import Policy
from moebatch.store.memory import peak_resident_bytes
from tests.benchmarks.decode.passes import Pass
from tests.benchmarks.decode.task import Task


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run."""

    passes: list[Pass]
    disk_rate: float
    """Bytes per second while the disk was busy; 0 if nothing was read."""
    disk_share: float
    """Part of the time in which it was busy, 0..1."""
    peak_bytes: int
    policy: str


class NoText:
    """Tokens need no text here."""

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


def measured(model: Path, profile: Path, dram_bytes: int, task: Task) -> Measured:
    """Runs the task from its prompts to its last tokens."""
    torch.set_num_threads(detect_machine().num_cores)
    files = open_model(model, "auto")
    policy = task.policy(_problem(files, profile, dram_bytes, task))
    order = EngineSpec(
        files=files,
        policy=policy,
        max_tokens=task.workload.max_total_tokens,
        num_traced_passes=10**6,
    )
    built = build_engine(order, decoder=NoText(), end_tokens=frozenset(), job_seed=0)
    assert built.recorder is not None, "there are lanes"
    built.recorder.begin()
    try:
        with torch.inference_mode():
            outcomes = list(built.engine.run(task.requests(files.shape.vocab_size)))
    finally:
        built.close()
    assert all(outcome.error is None for outcome in outcomes), "every sequence was computed"
    return _figures(built, policy)


def _problem(files: ModelFiles, profile: Path, dram_bytes: int, task: Task) -> Problem:
    """That of a job with so much memory, on this machine without its GPU."""
    job = Job(
        model=ModelSection(path=files.checkpoint.folder),
        input=InputSection(path=files.checkpoint.folder / "none.jsonl"),
        output=OutputSection(path=files.checkpoint.folder / "none-answered.jsonl"),
        resources=ResourcesSection(dram=dram_bytes),
    )
    return job_problem(job, files, task.workload, load_profile(str(profile)).hardware())


def _figures(built: BuiltEngine, policy: Policy) -> Measured:
    assert built.recorder is not None and built.log is not None, "passes are kept"
    loads = [done.loads for done in built.log.passes]
    passes = [
        Pass(
            decoding=round(sum(load.decode_sequences for load in of_pass)),
            prompt_tokens=round(sum(load.prompt_tokens for load in of_pass)),
            seconds=seconds,
        )
        for of_pass, seconds in zip(loads, built.recorder.timeline.pass_s, strict=True)
    ]
    reads, total_s = built.reads, sum(done.seconds for done in passes)
    return Measured(
        passes=passes,
        disk_rate=reads.num_bytes / reads.busy.total_s if reads.num_bytes else 0.0,
        disk_share=reads.busy.total_s / total_s,
        peak_bytes=peak_resident_bytes(),
        policy=str(policy),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("profile", type=Path)
    for name in ("sequences", "ride", "passes", "dram-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    task = Task(sequences=options.sequences, ride=options.ride, num_passes=options.passes)
    found = measured(options.model, options.profile, options.dram_bytes, task)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
