"""What each predictor is worth in a run: the same rows with all of them in turn, on an
emulated GPU whose link is as slow as ProMoE's, schedule promoe.

    python -m tests.benchmarks.predictors [--model FOLDER --rows FILE] [--svg FILE] ...

Prints accuracy, FetchRate and GoodPred by layer, counted while the rows were answered, and what a
decoding pass took. Without a model it is the built-in one, calibrated first; another one has to be
calibrated: moebatch calibrate MODEL --text FILE --predictor all. All have to answer alike.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

from moebatch.report.pictures.figure import write_picture
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
from tests.benchmarks.predictors.picture import picture
from tests.benchmarks.predictors.rig import Setting
from tests.benchmarks.predictors.rows import decodes, questions
from tests.benchmarks.predictors.table import table

PREDICTORS = ("none", "correlation", "token", "next-gate", "learned")
SETTINGS = {name: Setting(predictor=name, schedule="promoe", num_chunks=3) for name in PREDICTORS}
_ROWS = "rows"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.predictors")
    add_options(parser, batch_sizes="1", rounds=3)
    parser.add_argument("--svg", type=Path, help="draw it into this file")
    asked = parser.parse_args()
    options = options_of(asked)
    for batch_size in options.batch_sizes:
        taken, words = measured(options, batch_size)
        found = {name: one.foresight for name, one in taken.items()}
        print(f"{words}\n\n{table(found)}\n\n{passes(taken, batch_size)}", flush=True)
        if asked.svg is not None:
            subtitle = words.splitlines()[-1]
            path = asked.svg.with_stem(f"{asked.svg.stem}-{batch_size}")
            write_picture(path, partial(picture, found, title="Predictors", subtitle=subtitle))
            print(f"picture: {path}")


def measured(options: Options, batch_size: int) -> tuple[dict[str, Taken], str]:
    """Runs the rows with every predictor; also what it was run on, in words."""
    job = job_of(options)
    if options.rows is None:
        lines = "".join(f"{line}\n" for line in questions(options.count))
        job.input.path.write_text(lines)
    batches = batches_of(job, job.input.path, batch_size, options.count)
    ground = ground_of(job, batches, options)
    taken = in_turn(SETTINGS, ground, {_ROWS: batches}, options.rounds)
    return taken, in_words(ground, options)


def passes(taken: Mapping[str, Taken], batch_size: int) -> str:
    """What a decoding pass took with each of them."""
    rows = []
    for name, one in taken.items():
        seconds = [s for done in one.rounds[_ROWS] for s in decodes(done.passes, batch_size)]
        rows.append((name, f"{median(seconds) * 1e3:.1f} ms", str(len(seconds))))
    return markdown(("predictor", "a decoding pass", "passes"), rows)


if __name__ == "__main__":
    main()
