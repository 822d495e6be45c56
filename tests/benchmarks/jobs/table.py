"""Results as Markdown, ready for docs/performance.md."""

from collections.abc import Iterable, Sequence

from moebatch.units import format_bytes, format_duration, format_flops, format_rate
from tests.benchmarks.jobs.estimate import PeerResult
from tests.benchmarks.jobs.result import JobResult

LEGEND = (
    "*Measured* and *predicted* are the time of all passes, prompts included; *whole* is the "
    "process from its start to its end. *Bound* is the time in which the bytes that the plan reads "
    "cross the disk's link, or the operations of the job are done, whichever is longer, at the "
    "rates probed right before and after the job, or at the rate that the disk had while it was "
    "busy in between, where that is higher. *Predicted* in brackets: at the rate that the disk had "
    "during the run. Behind *weights*: how many times as fast as with the checkpoint as it was "
    "made. The last column has what the probes found."
)
_JOBS = (
    "job",
    "weights",
    "measured",
    "a row",
    "tok/s",
    "prompt tok/s",
    "predicted",
    "bound",
    "of bound",
    "disk busy",
    "peak memory",
    "whole",
    "disk, GEMM",
)
_PEERS = ("job", "program", "batch", "time", "tok/s", "moebatch is faster", "how")


def jobs_table(results: Iterable[JobResult]) -> str:
    """A line for each job."""
    return markdown(_JOBS, [_job_cells(result) for result in results])


def comparisons_table(results: Iterable[JobResult]) -> str:
    """A line for each variant and each peer."""
    return markdown(_PEERS, [cells for result in results for cells in _comparisons(result)])


def _job_cells(result: JobResult) -> list[str]:
    run, rates = result.run, result.rates
    return [
        f"{result.job.name}: {result.job.in_words}",
        result.weights if result.faster is None else f"{result.weights}, {result.faster:.1f} x",
        format_duration(run.passes_s),
        format_duration(run.passes_s / result.job.lengths.num_rows),
        f"{result.answer_rate:.1f}",
        f"{result.prompt_rate:.1f}",
        f"{_duration(run.predicted_s)} ({_duration(run.hindsight_s)})",
        f"{format_duration(result.bound.seconds)}, {result.bound.lane}",
        f"{result.of_bound:.0%}",
        f"{run.disk_share:.0%}",
        format_bytes(run.peak_bytes),
        format_duration(run.wall_s),
        f"{format_rate(rates.disk_rate)}, {format_flops(rates.gemm_rate)}",
    ]


def _comparisons(result: JobResult) -> Iterable[list[str]]:
    ours_s = result.run.passes_s
    for variant in result.variants:
        name = f"moebatch {variant.option}"
        if variant.passes_s is None:
            yield [result.job.name, name, "", "", "", "", variant.why_not]
        else:
            yield _compared(result, name, "", variant.passes_s, ours_s, variant.name)
    for peer in result.peers:
        if peer.best is None:
            yield [result.job.name, peer.name, "", "", "", "", peer.ended]
        else:
            best = peer.best
            yield _compared(result, peer.name, str(best.batch), best.job_s, ours_s, _how(peer))


def _compared(
    result: JobResult, name: str, batch: str, job_s: float, ours_s: float, how: str
) -> list[str]:
    rate = result.job.lengths.answer_tokens / job_s
    time = format_duration(job_s)
    return [result.job.name, name, batch, time, f"{rate:.2f}", f"{job_s / ours_s:.1f} x", how]


def _how(peer: PeerResult) -> str:
    best = peer.best
    assert best is not None
    part = "run whole"
    if best.measured_share < 0.999:
        part = f"{best.measured_share:.1%} of it run, the rest extrapolated"
    others = ", ".join(
        f"{trial.batch}: {format_duration(trial.job_s)}"
        for trial in peer.trials
        if trial.batch != best.batch
    )
    parts = [part, best.detail, f"other batches {others}" if others else "", peer.ended]
    return "; ".join(text for text in parts if text)


def _duration(seconds: float | None) -> str:
    return "?" if seconds is None else format_duration(seconds)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of titles and rows."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
