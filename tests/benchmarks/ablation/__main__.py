"""ProMoE's ablation on an emulated GPU: LRU alone, then prefetching, chunks, early preemption and
reordered inference on top of each other, and in the end a cache that goes by what is foreseen, on
the built-in model and rows that it has not seen.

    python -m tests.benchmarks.ablation [--batch 1,4] [--rounds 7] [--gantt FILE.svg] ...

Half of the experts find room on the device; the link to it is so slow that an expert weighs as much
as on ProMoE's machine. Steps take turns, so what disturbs one disturbs the others; a time is
the median of rounds, ratios are those of rounds that were neighbours. All have to answer alike.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from moebatch.report.pictures.figure import Picture, write_picture
from moebatch.report.pictures.gantt import gantt_picture
from moebatch.schedule.timeline.timeline import Timeline
from tests.benchmarks.ablation.step_times import Choose, StepTimes
from tests.benchmarks.ablation.steps import BASE, STEPS
from tests.benchmarks.jobs.table import markdown
from tests.benchmarks.predictors.bench import (
    Options,
    Taken,
    add_options,
    batches_of,
    ground_of,
    in_turn,
    in_words,
    job_of,
    options_of,
)
from tests.benchmarks.predictors.rows import conversations, is_decode, is_prefill, questions

_TITLES = ("step", "a pass", "faster", "least to most", "passes", "GPU busy", "link busy")
_WHERE = (
    "step",
    "GPU computes",
    "waits for experts not begun when the gate chose",
    "for those begun",
    "for launching",
    "link: needed",
    "in vain",
    "at most",
)
_DRAWN_PASSES = 3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ablation")
    add_options(parser, batch_sizes="1,4", rounds=7)
    parser.add_argument("--gantt", type=Path, help="draw decoding passes, base and whole, as SVG")
    asked = parser.parse_args()
    options = options_of(asked)
    for batch_size in options.batch_sizes:
        taken = measured(options, batch_size)
        if asked.gantt is not None:
            name = asked.gantt.with_stem(f"{asked.gantt.stem}-{batch_size}")
            write_picture(name, partial(picture, taken))
            print(f"picture: {name}")


def measured(options: Options, batch_size: int) -> dict[str, Taken]:
    """Runs all steps with so many sequences, and prints what came of it."""
    job = job_of(options)
    short, long = options.rows or options.folder / "rows.jsonl", options.folder / "long.jsonl"
    if options.rows is None:
        short.write_text("".join(f"{line}\n" for line in questions(options.count)))
    long.write_text("".join(f"{line}\n" for line in conversations(options.count)))
    rows = {
        "decode": batches_of(job, short, batch_size, options.count),
        "prefill": batches_of(job, long, batch_size, options.count),
    }
    ground = ground_of(job, (*rows["decode"], *rows["prefill"]), options)
    print(in_words(ground, options), flush=True)
    taken = in_turn(STEPS, ground, rows, options.rounds)
    kinds: Mapping[str, Choose] = {
        "decode": partial(is_decode, batch_size=batch_size),
        "prefill": is_prefill,
    }
    for kind, choose in kinds.items():
        found = times(taken, kind, choose)
        print(f"\n{kind}\n\n{table(found)}\n\n{where_table(found)}", flush=True)
    return taken


def times(taken: Mapping[str, Taken], kind: str, choose: Choose) -> dict[str, StepTimes]:
    """By step, of rows of one kind."""
    return {
        name: StepTimes.of(
            [done.passes for done in one.rounds[kind]],
            [timeline for done in one.rounds[kind] for timeline in done.timelines],
            choose,
        )
        for name, one in taken.items()
    }


def table(found: Mapping[str, StepTimes]) -> str:
    """A line for each step."""
    return markdown(_TITLES, [_cells(name, one, found[BASE]) for name, one in found.items()])


def where_table(found: Mapping[str, StepTimes]) -> str:
    """Where the time of a pass goes, by step, in ms; and what binds: how fast a pass could be at
    most that foresees everything, with the same cache and the same launching."""
    return markdown(_WHERE, [_where_cells(name, one, found[BASE]) for name, one in found.items()])


def _where_cells(name: str, one: StepTimes, base: StepTimes) -> Sequence[str]:
    trace = one.trace
    seconds = (
        trace.computing_s,
        trace.waiting_s,
        trace.waiting_begun_s,
        trace.launching_s,
        trace.needed_s,
        trace.in_vain_s,
    )
    return [name, *(f"{s * 1e3:.1f}" for s in seconds), f"{base.pass_s / trace.least_s:.2f} x"]


def _cells(name: str, one: StepTimes, base: StepTimes) -> Sequence[str]:
    least, usual, most = one.faster_than(base)
    return [
        name,
        f"{one.pass_s * 1e3:.1f} ms",
        f"{usual:.2f} x",
        f"{least:.2f} to {most:.2f}",
        str(one.num_passes),
        f"{one.shares.get('gpu', 0.0):.0%}",
        f"{one.shares.get('dram->vram', 0.0):.0%}",
    ]


def picture(taken: Mapping[str, Taken]) -> Picture:
    """Some decoding passes of the first step and of the last, from the same moment of a row."""
    names = (BASE, list(taken)[-1])
    shown = {name: _longest(taken[name].rounds["decode"][-1].timelines) for name in names}
    until_s = max(timeline.pass_ends_s[_DRAWN_PASSES] for timeline in shown.values())
    return gantt_picture(shown, since_s=0.0, until_s=until_s, title="ProMoE's ablation")


def _longest(timelines: Sequence[Timeline]) -> Timeline:
    return max(timelines, key=lambda timeline: len(timeline.pass_ends_s))


if __name__ == "__main__":
    main()
