"""What the benchmarks of predictors and of schedules have in common: a model, rows, a machine whose
link is as slow as ProMoE's, and settings that take turns."""

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.schedule.drivers.foresight import LayerForesight
from moebatch.schedule.task import Kind
from moebatch.spec.job import InputSection, Job, ModelSection, OutputSection
from moebatch.spec.machine.profile import load_profile
from moebatch.units import format_bytes, format_rate
from tests.benchmarks.jobs.machine import commit, machine_in_words, today
from tests.benchmarks.jobs.options import default_folder
from tests.benchmarks.predictors.model import demo_model
from tests.benchmarks.predictors.paper import TRANSFER_RATIO
from tests.benchmarks.predictors.rig import ALL_RESIDENT, Ground, Rig, Round, Setting
from tests.benchmarks.predictors.rows import Batches, decodes, longest, read_batches

_DTYPE = "float32"
_WARM_UP_ROUNDS = 1
MakeModel = Callable[[Path, Callable[[str], None]], Path]
"""Makes a model ready in a folder, and tells how it goes on."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both commands ask for."""

    folder: Path
    model: Path | None
    rows: Path | None
    batch_sizes: tuple[int, ...]
    count: int
    rounds: int
    ratio: float
    layer_s: float | None
    """Seconds of a layer on the emulated GPU; None is as fast as the CPU computes."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a setting has made of the rows."""

    rounds: Mapping[str, list[Round]]
    """By name of the rows."""
    foresight: Mapping[int, LayerForesight]
    """By layer, of all rounds."""
    single_share: float | None = None
    """Gates' decisions for a single expert among all, where some are left out."""

    def answers(self, kind: str) -> Mapping[str, tuple[int, ...]]:
        """Tokens of rows of one kind by name; they are the same in all rounds."""
        return self.rounds[kind][0].tokens

    @property
    def total(self) -> LayerForesight:
        """Of all layers together."""
        return LayerForesight.total(self.foresight.values())


def add_options(parser: argparse.ArgumentParser, *, batch_sizes: str, rounds: int) -> None:
    """Those that both commands have."""
    parser.add_argument("--folder", type=Path, default=default_folder() / "predictors")
    parser.add_argument("--model", type=Path, help="calibrated; default: the built-in one")
    parser.add_argument("--rows", type=Path, help="input of a job; default: demo rows")
    parser.add_argument("--batch", default=batch_sizes, help="sequences; default: %(default)s")
    parser.add_argument("--count", type=int, default=20, help="rows of a round")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument(
        "--ratio",
        type=float,
        default=TRANSFER_RATIO,
        help="layers computed while one expert comes; default: %(default).2f, as in ProMoE",
    )
    parser.add_argument(
        "--layer-ms",
        type=float,
        help="what the emulated GPU takes for a layer of one token at least, for less noise and "
        "less of the interpreter; default: what the CPU takes",
    )


def options_of(asked: argparse.Namespace) -> Options:
    """As they were given."""
    return Options(
        folder=asked.folder.expanduser().absolute(),
        model=asked.model,
        rows=asked.rows,
        batch_sizes=tuple(map(int, asked.batch.split(","))),
        count=asked.count,
        rounds=asked.rounds,
        ratio=asked.ratio,
        layer_s=None if asked.layer_ms is None else asked.layer_ms / 1e3,
    )


def job_of(options: Options, made: MakeModel = demo_model) -> Job:
    """A job on the model that was asked for, or else on the built-in one that is `made` ready
    first."""
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.model or made(options.folder, lambda line: print(line, flush=True))
    return Job(
        model=ModelSection(path=model.absolute()),
        input=InputSection(path=options.rows or options.folder / "rows.jsonl"),
        output=OutputSection(path=options.folder / "answers.jsonl"),
    )


def batches_of(job: Job, path: Path, batch_size: int, count: int) -> Batches:
    """Whole batches of rows of a file."""
    files = open_model(job.model.path, _DTYPE)
    return read_batches(job, files, path, batch_size=batch_size, count=count)


def ground_of(job: Job, rows: Batches, options: Options) -> Ground:
    """The machine of ProMoE, its link so slow that as many layers are computed while an expert
    comes; what a layer takes here is measured first."""
    torch.set_num_threads(1)
    ground = Ground(
        job=job,
        files=open_model(job.model.path, _DTYPE),
        hardware=load_profile("rtx4090").hardware(),
        batch_size=len(rows[0]),
        longest=longest(rows),
    )
    if options.layer_s is not None:
        usual_s = resident_passes(ground, rows).task_s
        factor = options.layer_s / layer_of(usual_s, ground)
        slowed_s = {kind: seconds * factor for kind, seconds in usual_s.items()}
        ground = replace(ground, least_s=slowed_s)
    layer_s = resident_passes(ground, rows).layer_s
    return ground.with_link(ground.expert_bytes / (options.ratio * layer_s))


@dataclass(frozen=True, kw_only=True)
class ResidentPasses:
    """Decoding passes for which nothing has to come."""

    layer_s: float
    """Of a layer, waits for whoever launches included."""
    task_s: Mapping[Kind, float]
    """Of the GPU's tasks by kind."""


def resident_passes(ground: Ground, rows: Batches) -> ResidentPasses:
    """Medians of a round."""
    with Rig(ALL_RESIDENT, ground.with_link(1e15)) as rig:
        done = [rig.run(rows) for _ in range(1 + _WARM_UP_ROUNDS)][-1]
    seconds: dict[Kind, list[float]] = {}
    for span in (span for timeline in done.timelines for span in timeline.on("gpu")):
        seconds.setdefault(span.task.kind, []).append(span.seconds)
    pass_s = median(decodes(done.passes, ground.batch_size))
    return ResidentPasses(
        layer_s=pass_s / ground.files.shape.num_layers,
        task_s={kind: median(of_kind) for kind, of_kind in seconds.items()},
    )


def layer_of(task_s: Mapping[Kind, float], ground: Ground) -> float:
    """Seconds of the tasks of a layer in which a token chooses its experts."""
    return sum(task_s.values()) + (ground.files.shape.experts_per_token - 1) * task_s[Kind.EXPERT]


def in_turn(
    settings: Mapping[str, Setting], ground: Ground, rows: Mapping[str, Batches], num_rounds: int
) -> dict[str, Taken]:
    """Rounds of all settings in turn, forth and back, the first of each left out.

    Raises AssertionError if two settings of the same gating answer differently.
    """
    with ExitStack() as opened:
        rigs = {name: opened.enter_context(Rig(one, ground)) for name, one in settings.items()}
        rounds = {name: {kind: list[Round]() for kind in rows} for name in settings}
        for number in range(num_rounds + _WARM_UP_ROUNDS):
            for name in list(rigs) if number % 2 else reversed(list(rigs)):
                for kind, batches in rows.items():
                    rounds[name][kind].append(rigs[name].run(batches))
        for kind, gating in product(rows, {one.gating for one in settings.values()}):
            alike = [name for name, one in settings.items() if one.gating == gating]
            answers = [done.tokens for name in alike for done in rounds[name][kind]]
            assert all(one == answers[0] for one in answers), f"{kind} are answered differently"
        return {
            name: Taken(
                rounds={kind: done[_WARM_UP_ROUNDS:] for kind, done in rounds[name].items()},
                foresight=rig.foresight,
                single_share=rig.single_share,
            )
            for name, rig in rigs.items()
        }


def in_words(ground: Ground, options: Options) -> str:
    """What is measured on what."""
    rate = ground.hardware.links["dram->vram"].bandwidth
    expert_s = ground.expert_bytes / rate
    return (
        f"{machine_in_words()}, one thread; commit {commit()}, {today()}\n"
        f"batch {ground.batch_size}; an expert of {format_bytes(ground.expert_bytes)} at "
        f"{format_rate(rate)} takes {expert_s * 1e3:.2f} ms, {options.ratio:.2f} times as long as "
        f"a layer of a decoding pass without waits, {expert_s / options.ratio * 1e3:.2f} ms"
    )
