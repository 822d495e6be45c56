"""Schedules on an emulated GPU, executed and simulated: a command of its own, no test.

    python -m tests.benchmarks.schedules MODEL [--link 1GB/s] [--batches 15] [--batch 4] ...

Runs every schedule with the same prompts in turn, several rounds, and prints the median time of a
decoding pass, its ratio to the one before, and what the simulator says. The simulator knows the
routing of that run, and how long each kind of task took in runs of their own before all others.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.engine.build import build_engine
from moebatch.engine.device import Device
from moebatch.engine.passes.log import PassLog
from moebatch.engine.spec import EngineSpec
from moebatch.layout.placed import PlacedModel
from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.registry import find_schedule
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.units import format_rate, parse_bytes, parse_rate

ABLATION = ("simple", "multi", "hot", "klotski")
WARM_UP_PASSES = 2
_IDLE_S = 0.001
"""A longer gap is a wait for something."""
LINKS = (Kind.PAGE, Kind.STAGE, Kind.BLOCK, Kind.CHUNK)
"""Held to a rate, hand-over included."""
_ALIKE = {"simple": "simple", "multi": "multi", "hot": "multi"}
"""Schedules whose experts are computed alike: once for each batch, or for all batches in turn."""


class NoText:
    """Tokens need no text here."""

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


@dataclass(frozen=True)
class Executed:
    """A run: its timeline and what its passes had to do."""

    timeline: Timeline
    log: PassLog

    @property
    def decode_s(self) -> float:
        """Median of the passes in which everybody decodes."""
        return median(self.timeline.pass_s[1 + WARM_UP_PASSES : -1])


@dataclass(frozen=True)
class Bench:
    """One model under one policy, on one emulated device."""

    files: ModelFiles
    policy: Policy
    device: Device
    prompt_tokens: int
    new_tokens: int

    def run(self, name: str) -> Executed:
        """All sequences of one batch, from prompts to last tokens."""
        order = EngineSpec(
            files=self.files,
            policy=self.of(name),
            max_tokens=self.prompt_tokens + self.new_tokens,
            device=self.device,
            num_traced_passes=10**6,
        )
        built = build_engine(order, decoder=NoText(), end_tokens=frozenset(), job_seed=0)
        try:
            with torch.inference_mode():
                outcomes = list(built.engine.run(self.requests()))
            assert all(outcome.error is None for outcome in outcomes)
            assert built.recorder is not None and built.log is not None
            return Executed(built.recorder.timeline, built.log)
        finally:
            built.close()

    def of(self, name: str) -> Policy:
        """The policy with that schedule; CGOPipe attends on the CPU."""
        on_gpu = name not in ("cgopipe", "fastdecode", "flexgen_c")
        return replace(self.policy, schedule=name, attention_on_gpu=on_gpu)

    def requests(self) -> list[Request]:
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.files.shape.vocab_size
        return [
            Request(
                index=i,
                custom_id=str(i),
                prompt_tokens=tuple(
                    torch.randint(
                        3, vocabulary, (self.prompt_tokens,), generator=generator
                    ).tolist()
                ),
                sampling=Sampling(temperature=0.0, max_tokens=self.new_tokens, ignore_eos=True),
            )
            for i in range(self.policy.batch_size)
        ]


@dataclass
class Prices:
    """Seconds of tasks as they were measured: medians by kind, of experts by their rows."""

    by_kind: Mapping[Kind, float]
    expert_points: Sequence[tuple[float, float]]
    hand_over_s: float
    """From the end of a task to the start of the next one that has been waiting for its lane."""
    between_s: float
    """From the end of a pass to its successor's first task: head, sampling, rows and plans."""

    @classmethod
    def of(cls, runs: Sequence[tuple[Executed, "World"]]) -> "Prices":
        kinds: dict[Kind, list[float]] = defaultdict(list)
        rows: dict[int, list[float]] = defaultdict(list)
        for executed, world in runs:
            since_s = executed.timeline.pass_ends_s[WARM_UP_PASSES]
            for span in executed.timeline.spans:
                if span.start_s < since_s:
                    continue
                if span.task.kind is Kind.EXPERT:
                    count = world.rows_of(span.task)
                    if count:
                        rows[count].append(span.seconds)
                kinds[span.task.kind].append(span.seconds)
        points = sorted((count, float(np.mean(seconds))) for count, seconds in rows.items())
        by_kind = {kind: float(np.mean(found)) for kind, found in kinds.items()}
        timelines = [executed.timeline for executed, _ in runs]
        return cls(by_kind, points, _hand_over_s(timelines), _between_s(timelines))

    def expert_s(self, rows: int) -> float:
        counts, seconds = zip(*self.expert_points, strict=True)
        return float(np.interp(rows, counts, seconds))


def _hand_over_s(timelines: Sequence[Timeline]) -> float:
    gaps = [
        later.start_s - span.end_s
        for timeline in timelines
        for span, later in pairwise(timeline.on("gpu"))
    ]
    return median(gap for gap in gaps if gap < _IDLE_S)


def _between_s(timelines: Sequence[Timeline]) -> float:
    return median(
        min(span.start_s for span in timeline.on("gpu") if span.start_s >= end_s) - end_s
        for timeline in timelines
        for end_s in timeline.pass_ends_s[WARM_UP_PASSES:-1]
    )


@dataclass
class World:
    """Passes of a run again, for the simulator."""

    policy: Policy
    setup: Setup
    log: PassLog
    prices: Prices | None = None
    number: int = 0
    first_pass: int = 1 + WARM_UP_PASSES
    walks_per_pass: int = 1

    def begin_pass(self, number: int) -> Sweep:
        self.number = self.first_pass + number
        on_cpu = self.log.passes[self.number].on_cpu
        return Sweep(num_micro_batches=len(on_cpu), on_cpu=on_cpu)

    def rows(self, number: int, layer: int, k: int | None) -> NDArray[np.float64]:
        batches = range(self.policy.num_micro_batches) if k is None else [k]
        return sum(self.log.rows(number, layer, batch, 0) for batch in batches)

    def chosen(self, step: int, micro_batch: int) -> list[int]:
        rows = self.rows(self.number, self.setup.layer(step), micro_batch)
        return [int(e) for e in np.flatnonzero(rows)]

    def selected(self, step: int, micro_batch: int, later: int) -> list[int]:
        return self.chosen(later, micro_batch)

    def ranked(self, step: int) -> list[int]:
        return np.argsort(-self.log.chances(self.setup.layer(step)), kind="stable").tolist()

    def chances(self, layer: int) -> list[float]:
        return self.log.chances(layer).tolist()

    def rows_of(self, task: Task) -> int:
        """Rows of an expert's task of the run; its pass follows from its step."""
        number = task.step // (self.setup.num_layers * self.walks_per_pass)
        if number >= len(self.log.passes) or number == 0:
            return 0
        return int(self.rows(number, self.setup.layer(task.step), task.micro_batch)[task.expert])

    def seconds(self, task: Task) -> float:
        assert self.prices is not None
        hand_over_s = self.prices.hand_over_s if task.kind not in LINKS else 0.0
        if task.kind is Kind.EXPERT:
            rows = self.rows(self.number, self.setup.layer(task.step), task.micro_batch)
            return hand_over_s + self.prices.expert_s(int(rows[task.expert]))
        share = 1 / (task.num_pages or 1) if task.kind in (Kind.PAGE, Kind.STAGE) else 1.0
        return hand_over_s + share * self.prices.by_kind[task.kind]


def world_of(bench: Bench, name: str, executed: Executed) -> World:
    policy = bench.of(name)
    setup = PlacedModel(bench.files.shape, policy, bench.device.ladder).setup()
    walks = policy.num_micro_batches if name == "simple" else 1
    return World(policy, setup, executed.log, walks_per_pass=walks)


def simulated_s(bench: Bench, name: str, executed: Executed, prices: Prices) -> float:
    world = world_of(bench, name, executed)
    world.prices = prices
    shape = bench.files.shape
    placed = PlacedModel(shape, world.policy, bench.device.ladder)
    room: Room = placed.room(expert_bytes=bench.files.dtypes.expert_bytes(shape))
    num_passes = len(executed.timeline.pass_s) - 2 - WARM_UP_PASSES
    timeline = simulate(name, world.setup, room, world, num_passes=num_passes)
    return median(timeline.pass_s[1:]) + prices.between_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--link", default="1GB/s")
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--vram", default="4GiB")
    parser.add_argument("--schedules", default=",".join((*ABLATION, "cgopipe")))
    options = parser.parse_args()

    torch.set_num_threads(1)
    files = open_model(options.model, "auto")
    sequences = options.batches * options.batch
    slots = options.slots or 2 * files.shape.num_experts
    policy = Policy(
        batch_size=sequences,
        micro_batch_size=options.batch,
        tokens_per_pass=sequences * (options.prompt + 1),
        num_slots=slots,
        num_kv_pages=sequences * pages_of(options.prompt + options.new),
        weights=Placement(dram=1.0),
        kv_cache=Placement(dram=1.0),
        attention_on_gpu=True,
        ffn_on_gpu=True,
        num_hot=files.shape.experts_per_token,
    )
    rate = parse_rate(options.link)
    hardware = load_profile("t4").hardware()
    links = {
        name: replace(link, bandwidth=rate, staging_bandwidth=None)
        for name, link in hardware.links.items()
    }
    vram = replace(hardware.levels["vram"], capacity_bytes=parse_bytes(options.vram))
    hardware = replace(hardware, links=links, levels={**hardware.levels, "vram": vram})
    device = Device(kind="emulate", hardware=hardware)
    bench = Bench(files, policy, device, options.prompt, options.new)
    names = options.schedules.split(",")
    print(f"{sequences} sequences, {options.batches} batches, {slots} slots, {format_rate(rate)}")

    # Weights that several batches use in turn are in the processor's cache, others are not.
    beforehand = {
        name: Prices.of([(run := bench.run(name), world_of(bench, name, run))])
        for name in ("ondemand", "simple", "multi", "fastdecode")
    }
    for name, prices in beforehand.items():
        kinds = {str(kind): f"{1e3 * s:.2f} ms" for kind, s in prices.by_kind.items()}
        print(f"measured beforehand in {name}:", kinds)
        between = f"{1e3 * prices.between_s:.1f} ms between passes"
        print(f"    {1e3 * prices.hand_over_s:.3f} ms from task to task, {between}")
    executed: dict[str, list[Executed]] = defaultdict(list)
    for _ in range(options.rounds):
        for name in names:
            executed[name].append(bench.run(name))
    before = None
    for name in names:
        runs = executed[name]
        seconds = median(run.decode_s for run in runs)
        known = beforehand[
            "fastdecode" if find_schedule(name).traits.is_paged else _ALIKE.get(name, "ondemand")
        ]
        expected = median(simulated_s(bench, name, run, known) for run in runs)
        ratio = f"{before / seconds:.2f} x the one before" if before else ""
        print(
            f"{name:>12}  {1e3 * seconds:8.1f} ms a pass  simulated {1e3 * expected:8.1f} ms "
            f"({expected / seconds:.2f})  {sequences / seconds:7.1f} tok/s  {ratio}"
        )
        before = seconds


if __name__ == "__main__":
    main()
