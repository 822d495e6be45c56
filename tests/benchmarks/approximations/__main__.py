"""What adaptive gating and pre-gates buy: the same rows with and without them in turn, on an
emulated GPU whose link is as slow as ProMoE's, half of the experts on it.

    python -m tests.benchmarks.approximations [--batch 1,4] [--rounds 5] ...

The built-in model is calibrated first: --predictor all --gating adaptive --loss 1 --pregate. Steps
take turns; a time is the median of rounds, ratios are those of rounds that were neighbours. What
leaves the model's own answers alone has to answer alike; of the others the share of rows is given
whose answer is still the same.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from tests.benchmarks.ablation.step_times import StepTimes
from tests.benchmarks.approximations.settings import BASES, EXACT, SETTINGS
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
from tests.benchmarks.predictors.model import gated_model
from tests.benchmarks.predictors.rows import is_decode, questions

_TITLES = (
    "setting",
    "a decoding pass",
    "faster",
    "least to most",
    "ready",
    "GPU busy",
    "link busy",
    "single expert",
    "same answers",
)
_ROWS = "rows"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.approximations")
    add_options(parser, batch_sizes="1,4", rounds=5)
    options = options_of(parser.parse_args())
    for batch_size in options.batch_sizes:
        taken, words = measured(options, batch_size)
        print(f"{words}\n\n{table(taken, batch_size)}\n", flush=True)


def measured(options: Options, batch_size: int) -> tuple[dict[str, Taken], str]:
    """Runs the rows with every setting; also what it was run on, in words."""
    job = job_of(options, gated_model)
    if options.rows is None:
        job.input.path.write_text("".join(f"{line}\n" for line in questions(options.count)))
    batches = batches_of(job, job.input.path, batch_size, options.count)
    ground = ground_of(job, batches, options)
    taken = in_turn(SETTINGS, ground, {_ROWS: batches}, options.rounds)
    return taken, in_words(ground, options)


def table(taken: Mapping[str, Taken], batch_size: int) -> str:
    """A line for each setting."""
    choose = partial(is_decode, batch_size=batch_size)
    times = {
        name: StepTimes.of(
            [done.passes for done in one.rounds[_ROWS]],
            [timeline for done in one.rounds[_ROWS] for timeline in done.timelines],
            choose,
        )
        for name, one in taken.items()
    }
    own = taken[EXACT].answers(_ROWS)
    return markdown(
        _TITLES,
        [_cells(name, taken[name], times[name], times[BASES[name]], own) for name in SETTINGS],
    )


def _cells(
    name: str,
    taken: Taken,
    times: StepTimes,
    base: StepTimes,
    own: Mapping[str, tuple[int, ...]],
) -> Sequence[str]:
    least, usual, most = times.faster_than(base)
    answers = taken.answers(_ROWS)
    same = sum(answers[row] == own[row] for row in own) / len(own)
    return [
        name,
        f"{times.pass_s * 1e3:.1f} ms",
        f"{usual:.2f} x",
        f"{least:.2f} to {most:.2f}",
        f"{taken.total.ready:.0%}",
        f"{times.shares.get('gpu', 0.0):.0%}",
        f"{times.shares.get('dram->vram', 0.0):.0%}",
        "" if taken.single_share is None else f"{taken.single_share:.0%}",
        f"{same:.0%}",
    ]


if __name__ == "__main__":
    main()
