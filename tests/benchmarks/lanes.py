"""How busy lanes are, predicted and executed, under every schedule on an emulated GPU.

    python -m tests.benchmarks.lanes [--schedules klotski,cgopipe] [--kinds] ...

Makes a checkpoint, measures this machine, and runs the same prompts under each schedule. The passes
that were run are then simulated at the prices of the profile, token for token, with the routing of
the run. For each lane: seconds in which it was busy, as predicted and as executed, and their ratio.
One thread computes, so that the other core is left for links. Weights and caches live on
all three levels, so that every lane has something to do.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.engine.build import build_engine
from moebatch.engine.device import Device
from moebatch.engine.spec import EngineSpec
from moebatch.job.machine import emulated_hardware
from moebatch.layout.ladder import lanes_of, stages_pages
from moebatch.measure.machine import measure_machine
from moebatch.plan.fitting import fitted, policy_for
from moebatch.plan.problem import Problem
from moebatch.plan.simulation.world import SimWorld
from moebatch.schedule.drivers.simulate import simulate
from moebatch.schedule.lanes import LANES, READ
from moebatch.schedule.registry import SCHEDULES, traits_of
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.statistics import Statistics
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.machine.profile import HardwareProfile, load_profile
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Workload
from moebatch.units import format_rate, parse_rate
from tests.benchmarks.decode.measured import NoText
from tests.benchmarks.jobs.machine import commit, machine_in_words, today
from tests.benchmarks.jobs.options import default_folder
from tests.benchmarks.jobs.table import markdown

HIDDEN, WIDTH, LAYERS, EXPERTS, CHOSEN, VOCABULARY = 1024, 3584, 4, 8, 2, 8000
GPU = "t4"
SEQUENCES, MICRO_BATCH, PROMPT, ANSWER = 32, 8, 48, 8
STAGING_FACTOR = 0.8
"""Of the link, at which pages are copied into pinned buffers."""
SPREAD = Placement(vram=0.25, dram=0.5, disk=0.25)
ALLOWED = 0.1


@dataclass(frozen=True)
class Compared:
    """The same passes, simulated and executed."""

    predicted: Timeline
    executed: Timeline
    reading_s: float
    """Of the disk, for pages."""

    @property
    def lanes(self) -> dict[str, tuple[float, float]]:
        """Busy seconds by lane: predicted, executed."""
        both = [Statistics.of(timeline).lanes for timeline in (self.predicted, self.executed)]
        names = (lane.name for lane in LANES if any(lane.name in one for one in both))
        return {
            name: (
                (both[0][name].busy_s if name in both[0] else 0.0)
                + (self.reading_s if name == READ.name else 0.0),
                both[1][name].busy_s if name in both[1] else 0.0,
            )
            for name in names
        }

    @property
    def kinds(self) -> dict[Kind, tuple[int, float, int, float]]:
        """Number and seconds of the tasks of each kind: predicted, executed."""
        found: dict[Kind, list[float]] = defaultdict(lambda: [0, 0.0, 0, 0.0])
        for place, timeline in enumerate((self.predicted, self.executed)):
            for span in timeline.spans:
                found[span.task.kind][2 * place] += 1
                found[span.task.kind][2 * place + 1] += span.seconds
        return {kind: (int(a), b, int(c), d) for kind, (a, b, c, d) in found.items()}


@dataclass(frozen=True)
class Bench:
    """A model on a machine."""

    files: ModelFiles
    problem: Problem
    folder: Path

    def policy(self, schedule: str) -> Policy:
        """Experts and caches on all levels, and slots for two layers."""
        policy = Policy(
            batch_size=SEQUENCES,
            micro_batch_size=MICRO_BATCH,
            tokens_per_pass=SEQUENCES * (PROMPT + 1),
            num_slots=2 * EXPERTS,
            num_kv_pages=SEQUENCES * pages_of(PROMPT + ANSWER),
            weights=SPREAD,
            kv_cache=SPREAD,
            attention_on_gpu=True,
            ffn_on_gpu=True,
        )
        return fitted(self.problem, policy_for(policy, schedule, self.problem))

    def compare(self, schedule: str) -> Compared:
        """Runs all sequences under a schedule, and simulates the passes that this took."""
        policy = self.policy(schedule)
        spec = EngineSpec(
            files=self.files,
            policy=policy,
            max_tokens=PROMPT + ANSWER,
            device=Device(kind="emulate", hardware=self.problem.hardware),
            num_traced_passes=10**6,
            shares=False,
            scratch=self.folder,
        )
        built = build_engine(spec, decoder=NoText(), end_tokens=frozenset(), job_seed=0)
        assert built.recorder is not None and built.log is not None, "passes are kept"
        store = built.experts
        try:
            if store is not None:  # reading what lives there is no part of any pass
                with store.monitor:
                    store.monitor.wait_for(lambda: store.has_residents)
            built.recorder.begin()
            with torch.inference_mode():
                assert all(outcome.error is None for outcome in built.engine.run(self.requests()))
            executed = built.recorder.timeline
        finally:
            built.close()
        world = SimWorld(self.problem, policy, passes=built.log.passes, routing=built.log)
        count = len(executed.pass_ends_s)
        predicted = simulate(schedule, world.setup, world.room, world, num_passes=count)
        # Pages read the disk themselves: a simulation has that time in them, not on the lane.
        paged = traits_of(policy).is_paged
        reading_s = (
            paged * count * world.price.fetch_s(policy.weights.disk * self.problem.num_experts)
        )
        there = {lane.name for lane in lanes_of(self.problem.ladder, policy)}
        compared = Compared(predicted, executed, reading_s)
        assert compared.lanes.keys() <= there, "lanes that the machine does not have"
        return compared

    def requests(self) -> Iterator[Request]:
        noise = torch.Generator().manual_seed(1)
        for index in range(SEQUENCES):
            tokens = torch.randint(3, VOCABULARY, (PROMPT,), generator=noise).tolist()
            yield Request(
                index=index,
                custom_id=str(index),
                prompt_tokens=tuple(tokens),
                sampling=Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.lanes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=default_folder() / "lanes")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="default: all")
    parser.add_argument("--link", default="1GB/s", help="to the emulated GPU; default: %(default)s")
    parser.add_argument("--profile", type=Path, help="of this machine; default: measured now")
    parser.add_argument("--kinds", action="store_true", help="tasks by their kind, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder.expanduser().absolute()
    files = open_model(checkpoint(folder / "checkpoint"), "auto")
    own = load_profile(str(options.profile)) if options.profile else measured(files, folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bench = Bench(files, problem(files, own, parse_rate(options.link)), Path(scratch))
        print(f"{machine_in_words()}, one thread; commit {commit()}, {today()}")
        print(
            f"link {options.link}, staging {format_rate(STAGING_FACTOR * parse_rate(options.link))}"
        )
        found = {name: bench.compare(name) for name in options.schedules.split(",")}
    print(lanes_table(found))
    if options.kinds:
        print(kinds_table(found))


def checkpoint(folder: Path) -> Path:
    """A Mixtral of 730 MB with random weights in `folder`, made if it is not there."""
    from transformers import MixtralConfig, MixtralForCausalLM

    if not (folder / "config.json").is_file():
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=16,
            num_key_value_heads=4,
            num_local_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            dtype="bfloat16",
        )
        torch.manual_seed(0)
        MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def measured(files: ModelFiles, folder: Path) -> HardwareProfile:
    """This machine as `moebatch profile` measures it, with one thread: about three minutes."""
    profile = measure_machine(
        folder, read=folder / "checkpoint", num_threads=1, log=lambda line: None
    )
    (folder / "profile.yaml").write_text(profile.to_yaml())
    return profile


def problem(files: ModelFiles, own: HardwareProfile, rate: float) -> Problem:
    """The model on this machine with a GPU whose links have that rate."""
    gpu = load_profile(GPU).hardware()
    links = {
        name: replace(link, bandwidth=rate, staging_bandwidth=STAGING_FACTOR * rate)
        if "vram" in name
        else link
        for name, link in gpu.links.items()
    }
    hardware = emulated_hardware(replace(gpu, links=links), own.hardware())
    return Problem(
        shape=files.shape,
        dtypes=files.dtypes,
        hardware=hardware,
        workload=Workload.uniform(prompt_tokens=PROMPT, new_tokens=ANSWER, num_sequences=SEQUENCES),
        stages=stages_pages(hardware, "emulate"),
    )


def lanes_table(found: Mapping[str, Compared]) -> str:
    """A line for each schedule, a column for each lane."""
    names = [lane.name for lane in LANES if any(lane.name in one.lanes for one in found.values())]
    lines = [
        [schedule, *(_cell(one.lanes[name]) if name in one.lanes else "" for name in names)]
        for schedule, one in found.items()
    ]
    return markdown(("schedule", *names), lines)


def _cell(pair: tuple[float, float]) -> str:
    """Predicted and executed seconds, and their ratio, which stands out where it is too far off."""
    predicted_s, executed_s = pair
    if not executed_s:
        return f"{predicted_s:.2f} / 0"
    ratio = predicted_s / executed_s
    shown = f"{ratio:.2f}" if abs(ratio - 1) <= ALLOWED else f"**{ratio:.2f}**"
    return f"{predicted_s:.2f} / {executed_s:.2f} = {shown}"


def kinds_table(found: Mapping[str, Compared]) -> str:
    """A line for each kind of task of each schedule, with milliseconds of a task."""
    lines = []
    for schedule, one in found.items():
        for kind, (count, seconds, count_run, seconds_run) in sorted(one.kinds.items()):
            each, each_run = seconds / max(1, count), seconds_run / max(1, count_run)
            cells = [f"{count}", f"{1e3 * each:.3f}", f"{count_run}", f"{1e3 * each_run:.3f}"]
            lines.append([schedule, str(kind), *cells, f"{seconds / (seconds_run or 1):.2f}"])
    titles = ("schedule", "task", "predicted", "ms each", "executed", "ms each", "seconds, ratio")
    return markdown(titles, lines)


if __name__ == "__main__":
    main()
